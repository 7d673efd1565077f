"""Evaluation: the rollout of training, without branching, over question files; accuracy, Pass@k, tool calls, report.

    torchrun --nproc_per_node 8 evaluate.py --model.path runs/arpo_7b/hf --eval.files aime24.jsonl gaia.jsonl

Writes runs/NAME/{scores.json, report.md, config.yaml, trajectories/<file>_000000.jsonl}.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arpo.config import UserError, load_or_exit, run_or_exit
from arpo.options import BranchingConfig, EngineConfig, ModelConfig, RewardConfig, RolloutConfig, RunConfig
from arpo.tools.options import ToolsConfig


@dataclass(frozen=True)
class EvalSection:
    """What to evaluate."""

    files: tuple[str, ...] = ()
    """Question files (parquet or jsonl), each reported on its own."""
    max_questions: int = 0
    """Only the first N questions of each file; 0 = all."""
    num_samples: int = 1
    """Independent trajectories per question (n of avg@n, and the largest k of Pass@k)."""
    max_prompt_tokens: int = 2048
    """Questions with longer prompts are left out, and counted."""
    system_prompt: str = "keep"
    """keep = as the file has it; none = without; default = the protocol's own; anything else = that text."""
    mute_tools: bool = False
    """Every tool call is refused: the control that shows whether the agent needs its tools."""


@dataclass(frozen=True)
class EvalConfig:
    """All knobs of evaluate.py."""

    run: RunConfig = field(default_factory=lambda: RunConfig(name="eval"))
    eval: EvalSection = field(default_factory=EvalSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(temperature=0.6, top_p=0.95, max_tool_calls=10, max_response_tokens=8192)
    )
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        if not self.eval.files:
            raise ValueError("eval.files is empty; pass at least one question file")
        if self.eval.num_samples < 1:
            raise ValueError(f"eval.num_samples={self.eval.num_samples} must be at least 1")


CONFIG = (
    load_or_exit(EvalConfig) if __name__ == "__main__" else None
)  # before torch: --help and mistakes answer at once

import json  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402

from arpo import distributed  # noqa: E402
from arpo.data import load_prompts, tokenize_prompts  # noqa: E402
from arpo.engine import Engine  # noqa: E402
from arpo.evals.summary import score_table, summarize  # noqa: E402
from arpo.log import RunLog  # noqa: E402
from arpo.model import check_model_folder, load_tokenizer  # noqa: E402
from arpo.protocol import Codec, with_system_prompt  # noqa: E402
from arpo.rewards import load_custom, score_groups  # noqa: E402
from arpo.rollout import rollout  # noqa: E402
from arpo.tools import make_tools  # noqa: E402
from arpo.tools.base import MutedTool, ToolRunner  # noqa: E402


def main(cfg: EvalConfig) -> dict[str, dict[str, float]]:
    """Returns the scores by file stem, as written to scores.json."""
    dist = distributed.init()

    # ---- everything that can be wrong is found before the model is loaded
    check_model_folder(cfg.model.path)
    codec = Codec(load_tokenizer(cfg.model.path), enable_thinking=cfg.model.enable_thinking)
    questions = {}
    for file in cfg.eval.files:
        prompts = load_prompts(file)[: cfg.eval.max_questions or None]
        questions[Path(file).stem] = tokenize_prompts(
            prompts,
            lambda messages: codec.render_prompt(with_system_prompt(messages, cfg.eval.system_prompt)),
            cfg.eval.max_prompt_tokens,
            "drop",
            file,
        )
    if len(questions) < len(cfg.eval.files):
        raise UserError("eval.files: two files have the same name; rename one, the report goes by file name")
    custom_reward = load_custom(cfg.reward.file, cfg.reward.function) if cfg.reward.file else None
    tools = make_tools(cfg.tools)
    runner = ToolRunner({tag: MutedTool(tag) for tag in tools} if cfg.eval.mute_tools else tools)

    log = RunLog(Path(cfg.run.dir) / cfg.run.name, cfg, is_main=dist.is_main)
    max_model_len = cfg.eval.max_prompt_tokens + cfg.rollout.max_response_tokens
    engine = Engine(cfg.model.path, cfg.engine, max_model_len=max_model_len, seed=cfg.run.seed + dist.rank)
    sampling = replace(cfg.rollout, group_size=cfg.eval.num_samples)

    # ---- one file after the other, questions dealt out over the ranks
    scores = {}
    for name, prompts in questions.items():
        mine = prompts[dist.rank :: dist.world_size]
        with log.progress(len(mine) * sampling.group_size, name, "trajectory") as bar:
            groups = rollout(
                mine,
                engine,
                runner,
                codec,
                sampling,
                BranchingConfig(selector="none", num_initial_rollouts=sampling.group_size),
                seed=cfg.run.seed,
                on_progress=lambda done, bar=bar: bar.update(done - bar.n),
            )
        score_groups(groups, cfg.reward, custom_reward)
        groups = [group for part in dist.all_gather_objects(groups) for group in part]
        groups.sort(key=lambda group: group.prompt.prompt_id)
        scores[name] = summarize(groups, seed=cfg.run.seed)
        log.trajectories(0, groups, kind=name)
        s = scores[name]
        log.line(f"{name}: accuracy {s['accuracy']:.3f} [{s['accuracy_low']:.3f}, {s['accuracy_high']:.3f}]")

    # ---- report
    if dist.is_main:
        (log.folder / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
        (log.folder / "report.md").write_text(score_table(scores, cfg.model.path))
        log.line(score_table(scores, cfg.model.path))
        log.line(f"report: {log.folder / 'report.md'}")
    log.close()
    runner.close()
    engine.close()
    dist.close()
    return scores


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
