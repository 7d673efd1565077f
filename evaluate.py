"""Evaluation: sample answers to benchmarks or question files, without branching, grade the answers, write a report.

    torchrun --nproc_per_node 8 evaluate.py configs/qwen2.5_7b.yaml configs/eval.yaml --model.path MODEL
    python evaluate.py --model.path MODEL --eval.files my_questions.jsonl --eval.num_samples 4
    python evaluate.py RUN/config.yaml --eval.regrade RUN            # new grades and report, no model

Writes runs/NAME/{trajectories/, grades/, scores.json, report.md, config.yaml, sessions.jsonl}. After a kill the same
command continues the run. The report covers all trajectories of the folder; `arpo-view RUN` shows them.
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
        require(
            self.eval.benchmarks or self.eval.files,
            "nothing to evaluate; pass eval.benchmarks (all, math, gaia, ...) or eval.files",
        )
        if self.eval.server:
            class_name, _, address = self.eval.server.partition("=")
            require(
                is_own(class_name) and address,
                f"eval.server={self.eval.server} must be FILE.py:NAME=ADDRESS (docs/evaluation.md)",
            )
            definition_of("eval.server", class_name)  # raises UserError if FILE.py does not define NAME
        raise_all(
            *check_result_room(self.tools.search, self.rollout),
            *check_context(self.rollout, self.max_model_len),
        )


# The config is read before torch is imported, so that --help and errors in options come at once.
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
        folder = Path(cfg.eval.regrade)
        # No probe: all replies may be in the cache, and then the judge need not run.
        judge = Judge(cfg.judge, folder / "judge.sqlite") if cfg.judge.url else None
        grade_and_report(folder, cfg.reward, judge)
        return
    ranks = init_ranks(cfg.run.peer_timeout_minutes, cfg.run.silence_timeout_s)
    ranks.log_devices({} if cfg.eval.server else {"engine.dtype": cfg.engine.dtype})
    log = Console(is_main=ranks.is_main)

    # ---- set-up: every error that can be detected is raised before the model is loaded
    if not cfg.eval.server:
        job = Job(sizes_of(cfg.model.path), cfg.model, engine=cfg.engine, max_model_len=cfg.max_model_len)
        check_memory(job, ranks.device)
    team = form_team(ranks, 1 if cfg.eval.server else cfg.engine.tensor_parallel, cfg.model.path)
    env = Environment(model=cfg.model, protocol=cfg.protocol, tools=cfg.tools, team=team, rollout=cfg.rollout)
    # for the muted sets (eval.num_muted), which show how many answers need no tool
    muted_tools = team.tool_runner({tag: MutedTool(tag) for tag in env.tools.tools})
    sets, absent = load_sets(cfg.eval, env.codec, env.schemas)
    to_reward = [prompt for question_set in sets if question_set.metric == "reward" for prompt in question_set.prompts]
    if cfg.reward.file and to_reward:
        load_custom("reward.file", cfg.reward.function).try_on(to_reward[0], env.codec)

    # ---- questions: those that an earlier run of the same command has finished are not asked again
    folder = cfg.run.folder
    judge = None
    if ranks.is_main:
        claim_run(folder, cfg, served_model(cfg) if cfg.eval.server else "")
        if cfg.judge.url:
            judge = Judge(cfg.judge, folder / "judge.sqlite")
            judge.probe()
    ranks.barrier()  # no rank may read the folder before the main rank has claimed it
    records = read_records(folder)
    sets_to_ask = [replace(s, prompts=unfinished(s.name, s.prompts, cfg.eval.num_samples, records)) for s in sets]
    del records  # they may be large
    ranks.barrier()  # no rank may write a record before all ranks have read the old ones
    is_finished = not any(to_ask.prompts for to_ask in sets_to_ask)
    # Only plain sets are counted here: a muted set has the questions of its plain set.
    if ranks.is_main and not is_finished:
        record_session(folder, {s.name: s.num_overlong for s in sets if not s.is_muted})
    for name in absent:
        log.line(f"{name}: left out; it is not in {cfg.eval.data_dir}")
    for question_set, to_ask in zip(sets, sets_to_ask, strict=True):
        if not question_set.is_muted:
            num_questions = len(question_set.prompts)
            num_finished = num_questions - len(to_ask.prompts)
            log.line(f"{question_set.name}: {num_questions} questions, {num_finished} of them finished before")

    # ---- rollout: set by set, each set's questions split over the teams; each finished group is saved at once
    engine = None if is_finished else make_engine(cfg, env.codec, team.index)
    sampling = replace(cfg.rollout, group_size=cfg.eval.num_samples)
    no_branching = BranchingConfig(selector="none", num_initial_rollouts=sampling.group_size)
    for to_ask in sets_to_ask:
        if not to_ask.prompts:
            continue
        dump = SetDump(
            folder,
            to_ask.name,
            metric=to_ask.metric,
            tools=env.codec.tools,
            protocol=env.codec.format,
        )
        sampler = Sampler(
            engine=engine,
            tools=muted_tools if to_ask.is_muted else env.tools,
            codec=env.codec,
            team=team,
            log=log,
            seed=cfg.run.seed,
            rollout=sampling,
            branching=no_branching,
            max_num_seqs=cfg.engine.max_num_seqs,
            on_group=dump.add if team.is_first else None,
        )
        source = OneRollout(
            sampler,
            to_ask.prompts,
            name=0,  # part of the seeds: a muted set gets the random numbers of its plain set
            label=to_ask.name,
            max_at_once=2 * cfg.engine.max_num_seqs,  # one full batch decodes while another waits for tools
        )
        sampler.run(source, to_ask.name, num_groups=len(team.share(to_ask.prompts)), is_part=False)
    env.tools.close()
    muted_tools.close()
    if engine is not None:
        engine.close()
    ranks.close()  # the other ranks need not wait for the judge

    # ---- grades and report
    if ranks.is_main:
        grade_and_report(folder, cfg.reward, judge)


def served_model(cfg: EvalConfig) -> str:
    """Return the name of the server's model. Raises UserError if the server does not answer, or has no such model."""
    server_class, address = find_server(cfg.eval.server)
    return server_class.served(address, cfg.eval.server_model, cfg.max_model_len)


def find_server(server: str) -> tuple[Any, str]:
    """Return the class and the address of FILE.py:NAME=ADDRESS."""
    name, _, address = server.partition("=")
    return find("eval.server", name, {}), address


def make_engine(cfg: EvalConfig, codec: Codec, team_index: int) -> Any:
    """Return an Engine, or the engine of eval.server."""
    if not cfg.eval.server:
        return Engine(cfg.model.path, cfg.engine, max_model_len=cfg.max_model_len, seed=cfg.run.seed + team_index)
    server_class, address = find_server(cfg.eval.server)
    return server_class(
        address,
        cfg.eval.server_model,
        codec,
        max_model_len=cfg.max_model_len,
        max_concurrent=cfg.engine.max_num_seqs,
    )


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
