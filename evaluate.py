"""Evaluation: the rollout of training, without branching, over benchmarks or question files; graded and reported.

    torchrun --nproc_per_node 8 evaluate.py configs/qwen2.5_7b.yaml configs/eval.yaml --model.path MODEL
    python evaluate.py --model.path MODEL --eval.files my_questions.jsonl --eval.num_samples 4
    python evaluate.py RUN/config.yaml --eval.regrade RUN            # new grades and report, no model

Writes runs/NAME/{trajectories/, grades/, scores.json, report.md, config.yaml, sessions.jsonl}; the same command
continues what was killed. The report is about all of the folder's trajectories; `arpo-view RUN` shows them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from arpo.config.evals import EvalSection, JudgeConfig
from arpo.config.named import definition_of, find, is_own
from arpo.config.rewards import RewardConfig
from arpo.config.sections import EngineConfig, ModelConfig, ProtocolConfig, RunConfig
from arpo.config.tools import ToolsConfig
from arpo.errors import raise_all, require
from arpo.evals.inputs import check_evaluation
from arpo.options import BranchingConfig, RolloutConfig
from arpo.start.checks import check_context, check_result_room
from arpo.start.load import load_or_exit, run_or_exit


@dataclass(frozen=True)
class EvalConfig:
    """All options of evaluate.py."""

    SCRIPT: ClassVar[str] = "evaluate"
    run: RunConfig = field(default_factory=lambda: RunConfig(name="eval"))
    eval: EvalSection = field(default_factory=EvalSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(
        default_factory=lambda: RolloutConfig(
            temperature=0.6,
            top_p=0.95,
            max_tool_calls=15,
            max_calls_per_tool=("python=5", "search=10"),
            max_response_tokens=8192,
        )
    )
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    @property
    def max_model_len(self) -> int:
        return self.eval.max_prompt_tokens + self.rollout.max_response_tokens

    def __post_init__(self) -> None:
        if self.eval.regrade:
            return
        some = self.eval.benchmarks or self.eval.files
        require(some, "nothing to evaluate; pass eval.benchmarks (all, math, gaia, ...) or eval.files")
        if server := self.eval.server:
            require(is_own(server), f"eval.server={server} must be FILE.py:NAME=ADDRESS (docs/evaluation.md)")
            definition_of("eval.server", server.partition("=")[0])
        room = check_result_room(self.tools.search, self.rollout)
        raise_all(*room, *check_context(self.rollout, self.max_model_len))


# The config is read before torch is imported, so that --help and mistakes answer at once.
CONFIG = load_or_exit(EvalConfig, check_evaluation) if __name__ == "__main__" else None

from dataclasses import replace
from pathlib import Path
from typing import Any

from arpo.engine import Engine
from arpo.engine.team import form_team
from arpo.evals.judge import Judge
from arpo.evals.question_sets import load_sets
from arpo.evals.records import SetDump, read_records
from arpo.evals.report import grade_and_report
from arpo.evals.resume import claim_run, record_session, unfinished
from arpo.log import Console
from arpo.protocol import Codec
from arpo.ranks import init_ranks
from arpo.rewards import load_custom
from arpo.sampling import Sampler
from arpo.sampling.environment import Environment
from arpo.sampling.sources import OneRollout
from arpo.start.memory import Job, check_memory, sizes_of
from arpo.tools.base import MutedTool


def main(cfg: EvalConfig) -> None:
    if cfg.eval.regrade:
        run = Path(cfg.eval.regrade)
        judge = Judge(cfg.judge, run / "judge.sqlite") if cfg.judge.url else None  # may be gone: its replies are kept
        grade_and_report(run, cfg.reward, judge)
        return
    ranks = init_ranks(cfg.run.peer_timeout_minutes, cfg.run.silence_timeout_s)
    ranks.log_devices()
    log = Console(is_main=ranks.is_main)

    # ---- set-up: everything that can be wrong is found before the model is loaded
    if not cfg.eval.server:
        job = Job(sizes_of(cfg.model.path), cfg.model, engine=cfg.engine, max_model_len=cfg.max_model_len)
        check_memory(job, ranks.device)
    team = form_team(ranks, 1 if cfg.eval.server else cfg.engine.tensor_parallel, cfg.model.path)
    env = Environment(cfg.model, cfg.protocol, cfg.tools, team, cfg.rollout)
    refusing = team.tool_runner({tag: MutedTool(tag) for tag in env.tools.tools})
    sets, absent = load_sets(cfg.eval, env.codec, env.schemas)
    if cfg.reward.file:
        load_custom("reward.file", cfg.reward.function).try_on(sets[0].prompts[0], env.codec)

    # ---- questions: what an earlier run of the same command has finished stays
    folder = cfg.run.folder
    judge = None
    if ranks.is_main:
        claim_run(folder, cfg, served_model(cfg) if cfg.eval.server else "")
        if cfg.judge.url:
            judge = Judge(cfg.judge, folder / "judge.sqlite")
            judge.probe()
    ranks.barrier()
    records = read_records(folder)
    todo = [replace(s, prompts=unfinished(s.name, s.prompts, cfg.eval.num_samples, records)) for s in sets]
    ranks.barrier()  # nobody writes before all have read
    is_finished = not any(questions.prompts for questions in todo)
    if ranks.is_main and not is_finished:
        record_session(folder, {s.name: s.num_overlong for s in sets if not s.is_muted})
    for name in absent:
        log.line(f"{name}: left out; it is not in {cfg.eval.data_dir}")
    for asked, left in zip(sets, todo, strict=True):
        if not asked.is_muted:
            num_finished = len(asked.prompts) - len(left.prompts)
            log.line(f"{asked.name}: {len(asked.prompts)} questions, {num_finished} of them finished before")

    # ---- rollout: one set after the other, questions dealt out over the ranks; each finished group is saved at once
    engine = None if is_finished else make_engine(cfg, env.codec, team.index)
    sampling = replace(cfg.rollout, group_size=cfg.eval.num_samples)
    no_branching = BranchingConfig(selector="none", num_initial_rollouts=sampling.group_size)
    for questions in todo:
        dump = SetDump(
            folder, questions.name, metric=questions.metric, tools=env.codec.tools, protocol=env.codec.format
        )
        used, save = refusing if questions.is_muted else env.tools, dump.add if team.is_first else None
        sampler = Sampler(
            engine,
            used,
            env.codec,
            team,
            log,
            cfg.run.seed,
            sampling,
            no_branching,
            cfg.engine.max_num_seqs,
            on_group=save,
        )
        if questions.prompts:
            at_once = 2 * cfg.engine.max_num_seqs  # a batch, and those whose tools are at work
            source = OneRollout(sampler, questions.prompts, 0, label=questions.name, max_at_once=at_once)
            sampler.run(source, questions.name, len(team.share(questions.prompts)), is_part=False)
    env.tools.close()
    refusing.close()
    if engine is not None:
        engine.close()
    ranks.close()  # the other ranks need not wait for the judge

    # ---- grades and report
    if ranks.is_main:
        grade_and_report(folder, cfg.reward, judge)


def served_model(cfg: EvalConfig) -> str:
    """Return what the server calls its model. Raises UserError where it does not answer, or lacks the model."""
    server, address = server_class(cfg.eval.server)
    return server.served(address, cfg.eval.server_model, cfg.max_model_len)


def server_class(server: str) -> tuple[Any, str]:
    """Return the class of FILE.py:NAME=ADDRESS, and the address."""
    name, _, address = server.partition("=")
    return find("eval.server", name, {}), address


def make_engine(cfg: EvalConfig, codec: Codec, index: int) -> Any:
    """Return an Engine, or what is named in its place."""
    if not cfg.eval.server:
        return Engine(cfg.model.path, cfg.engine, max_model_len=cfg.max_model_len, seed=cfg.run.seed + index)
    server, address = server_class(cfg.eval.server)
    return server(
        address,
        cfg.eval.server_model,
        codec,
        max_model_len=cfg.max_model_len,
        max_concurrent=cfg.engine.max_num_seqs,
    )


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
