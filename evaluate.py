"""Evaluation: the rollout of training, without branching, over benchmarks or question files; graded and reported.

    torchrun --nproc_per_node 8 evaluate.py configs/qwen2.5_7b.yaml configs/eval.yaml --model.path MODEL
    python evaluate.py --model.path MODEL --eval.server http://host:8000 --eval.benchmarks gaia --eval.num_samples 5
    python evaluate.py RUN/config.yaml --eval.regrade RUN            # records -> grades and report, no model
    python evaluate.py --eval.compare RUN_A RUN_B                    # paired differences

Writes runs/NAME/{records/, grades/, scores.json, report.md, report.html, config.yaml, sessions.jsonl}; the same command
continues what was killed. A run folder's report is about all of its records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from arpo.config.checks import check_result_room
from arpo.config.evals import EvalSection, JudgeConfig
from arpo.config.load import load_or_exit, run_or_exit, save_config
from arpo.config.sections import EngineConfig, ModelConfig, ProtocolConfig, RunConfig
from arpo.config.tools import ToolsConfig
from arpo.errors import UserError, require
from arpo.options import BranchingConfig, RewardConfig, RolloutConfig
from arpo.start.inputs import check_evaluation


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
        if self.eval.regrade or self.eval.compare:
            return
        some = self.eval.benchmarks or self.eval.files
        require(some, "nothing to evaluate; pass eval.benchmarks (all, math, gaia, ...) or eval.files")
        check_result_room(self.tools.search, self.rollout)
        ordered = self.rollout.pull_order != "drawn"
        require(
            not ordered, "rollout.pull_order=longest_first goes by earlier epochs, of which there are none; drop it"
        )


# The config is read before torch is imported, so that --help and mistakes answer at once.
CONFIG = load_or_exit(EvalConfig, check_evaluation) if __name__ == "__main__" else None

from dataclasses import replace
from functools import partial
from pathlib import Path

from arpo import ranks
from arpo.config.model_folder import check_model_folder
from arpo.data import load_prompts, tokenize_prompts
from arpo.data.hub import local_file, source_of
from arpo.engine import Engine
from arpo.engine.server_engine import ServerEngine, find_model
from arpo.engine.team import form_team
from arpo.evals.about import read_about, record_session
from arpo.evals.benchmarks import BENCHMARKS, Benchmark, questions, select
from arpo.evals.compare import compare_runs
from arpo.evals.grading import grade_records
from arpo.evals.judge import Judge
from arpo.evals.prompts import asked_as
from arpo.evals.records import Record, append_records, group_records, read_records
from arpo.evals.report import RunMeta, summary, write_report
from arpo.evals.resume import claim_run, read_settings, unfinished, what_decides
from arpo.evals.scores import MUTED
from arpo.log import Console
from arpo.model import load_tokenizer
from arpo.protocol import Codec
from arpo.protocol.schema import ToolSchema
from arpo.rewards import load_custom
from arpo.sampling import Sampler
from arpo.sampling.sources import dealt_or_pulled
from arpo.start.memory import check_memory, read_job
from arpo.tools import check_offered, make_codec, make_tools, system_prompt_for, tool_schemas
from arpo.tools.base import MutedTool
from arpo.trajectory import Group, Prompt


def main(cfg: EvalConfig) -> None:
    if cfg.eval.compare:
        print(compare_runs(cfg.eval.compare))
        return
    if cfg.eval.regrade:
        run = Path(cfg.eval.regrade)
        grade_and_report(cfg, run, open_judge(cfg.judge, run, probe=False))  # it may be gone: its replies are kept
        return
    dist = ranks.init(cfg.run.peer_timeout_minutes, cfg.run.silence_timeout_s)
    dist.log_devices()

    # ---- everything that can be wrong is found before the model is loaded
    if not cfg.eval.server:
        asked = "eval.max_prompt_tokens"
        check_model_folder(cfg.model.path, max_model_len=cfg.max_model_len, prompt_option=asked)
        check_memory(read_job(cfg.model, engine=cfg.engine, max_model_len=cfg.max_model_len), dist.device)
    tool_cfg = cfg.tools.replayed() if cfg.eval.replay else cfg.tools
    schemas, tokenizer = tool_schemas(tool_cfg), load_tokenizer(cfg.model.path)
    codec = make_codec(tokenizer, cfg.protocol, schemas, enable_thinking=cfg.model.enable_thinking)
    codec.check_result_room(cfg.rollout.max_result_tokens)
    chosen, absent = select(cfg.eval.benchmarks, cfg.eval.data_dir)
    sets, overlong = load_questions(cfg.eval, chosen, codec, schemas)
    muted = {name + MUTED: prompts[: cfg.eval.num_muted] for name, prompts in sets.items() if cfg.eval.num_muted}
    if cfg.reward.file:
        load_custom(cfg.reward.file, cfg.reward.function).try_on(next(iter(sets.values()))[0], codec)
    tools = dist.together(lambda: make_tools(tool_cfg))
    team = form_team(dist, 1 if cfg.eval.server else cfg.engine.tensor_parallel, cfg.model.path)
    runner = team.tool_runner(tools)
    refusing = team.tool_runner({tag: MutedTool(tag) for tag in tools})

    # ---- what an earlier run of the same command has finished stays
    folder = Path(cfg.run.dir) / cfg.run.name
    judge = None
    if dist.is_main:
        served = served_model(cfg) if cfg.eval.server else ""
        settings = what_decides(cfg.run.seed, cfg.eval, cfg.model, cfg.rollout, cfg.tools, served, codec.format)
        claim_run(folder, settings, resume=cfg.run.resume)
        save_config(cfg, folder / "config.yaml")
        judge = open_judge(cfg.judge, folder, probe=True)
    dist.barrier()
    records = read_records(folder / "records")
    todo = {name: unfinished(name, prompts, cfg.eval.num_samples, records) for name, prompts in (sets | muted).items()}
    dist.barrier()  # nobody writes before all have read
    if dist.is_main and any(todo.values()):
        record_session(folder, overlong)
    log = Console(is_main=dist.is_main)
    for name in absent:
        log.line(f"{name}: left out; it is not in {cfg.eval.data_dir}")
    for name, prompts in sets.items():
        log.line(f"{name}: {len(prompts)} questions, {len(prompts) - len(todo[name])} of them finished before")

    # ---- one set after the other, questions dealt out over the ranks; each finished group is saved at once
    engine = make_engine(cfg, codec, team.index) if any(todo.values()) else None
    sampling = replace(cfg.rollout, group_size=cfg.eval.num_samples)
    no_branching = BranchingConfig(selector="none", num_initial_rollouts=sampling.group_size)
    sampler = Sampler(engine, runner, codec, team, log, cfg.run.seed, sampling, no_branching, cfg.engine.max_num_seqs)
    for name, prompts in todo.items():
        path = folder / "records" / (f"{name}.rank{dist.rank}.jsonl" if dist.rank else f"{name}.jsonl")
        of_muted = name in muted
        benchmark = chosen.get(name.removesuffix(MUTED) if of_muted else name)
        metric = benchmark.grader if benchmark else "reward"
        if not prompts:
            continue
        save = partial(save_group, path, name, metric, codec) if team.is_first else None
        part = replace(sampler, tools=refusing if of_muted else runner, on_group=save)
        # max_at_once: a batch, and those whose tools are at work
        source = dealt_or_pulled(part, prompts, 0, label=name, max_at_once=2 * cfg.engine.max_num_seqs)
        part.run([source], name, len(team.share(prompts)), is_part=False)
    runner.close()
    refusing.close()
    if engine is not None:
        engine.close()
    dist.close()  # the other ranks need not wait for the judge

    if dist.is_main:
        grade_and_report(cfg, folder, judge)


def load_questions(
    cfg: EvalSection, chosen: dict[str, Benchmark], codec: Codec, schemas: dict[str, ToolSchema]
) -> tuple[dict[str, list[Prompt]], dict[str, int]]:
    """Return the tokenized questions of the chosen benchmarks, by name, and of the question files, by file stem.

    Also the number of questions of each that were left out as too long.
    """
    how = {"max_questions": cfg.max_questions, "form": codec.format}
    sets = {name: questions(name, b, cfg.data_dir, **how) for name, b in chosen.items()}
    for file in cfg.files:
        path = local_file(file)
        if path.stem in sets or file.endswith(f"{MUTED}{path.suffix}"):
            raise UserError(f"eval.files: {file} has the name of another set; rename it, the report goes by name")
        sets[path.stem] = load_prompts(path, source=source_of(file))[: cfg.max_questions or None]
        check_offered(sets[path.stem], codec.tools, file)
    system_prompt = system_prompt_for(cfg.system_prompt, schemas, form=codec.format)
    overlong = {}
    for name, prompts in sets.items():
        asked = [asked_as(prompt, system_prompt, codec.format) for prompt in prompts]
        sets[name] = tokenize_prompts(asked, codec.render_prompt, cfg.max_prompt_tokens, cfg.overlong, name)
        overlong[name] = len(prompts) - len(sets[name])
    return sets, overlong


def save_group(path: Path, name: str, metric: str, codec: Codec, group: Group, wall_s: list[float]) -> None:
    append_records(path, group_records(group, name, metric, wall_s, codec.tools, codec.format))


def served_model(cfg: EvalConfig) -> str:
    """Return the name of the model that the server has, and the folder it comes from where the server says so."""
    _, model = find_model(cfg.eval.server, cfg.eval.server_model, cfg.max_model_len)
    return f"{model['id']} ({model['root']})" if model.get("root", model["id"]) != model["id"] else model["id"]


def make_engine(cfg: EvalConfig, codec: Codec, index: int) -> Engine | ServerEngine:
    if not cfg.eval.server:
        return Engine(cfg.model.path, cfg.engine, max_model_len=cfg.max_model_len, seed=cfg.run.seed + index)
    limits = {"max_model_len": cfg.max_model_len, "max_concurrent": cfg.engine.max_num_seqs}
    return ServerEngine(cfg.eval.server, cfg.eval.server_model, codec, **limits)


def open_judge(cfg: JudgeConfig, folder: Path, *, probe: bool) -> Judge | None:
    """Return the judge, or None without one. With `probe`, UserError is raised at once if it cannot be reached."""
    if not cfg.url:
        return None
    judge = Judge(cfg, folder / "judge.sqlite")
    if probe:
        judge.probe()
    return judge


def grade_and_report(cfg: EvalConfig, folder: Path, judge: Judge | None) -> None:
    """Grade all records of a run, and write its tables and pages."""
    settings = read_settings(folder)
    found: dict[str, list[Record]] = {}
    for record in read_records(folder / "records"):
        found.setdefault(record.benchmark, []).append(record)
    by_name = {name: found[name] for name in [*BENCHMARKS, *found] if name in found}  # benchmarks in their own order
    custom = load_custom(cfg.reward.file, cfg.reward.function) if cfg.reward.file else None
    grades = {
        name: grade_records(records, metric=records[0].metric, judge=judge, reward=cfg.reward, custom=custom)
        for name, records in by_name.items()
    }
    about = read_about(folder, settings, cfg.judge.model)
    meta = RunMeta(
        title=about.title,
        judge=cfg.judge.model,
        families={name: benchmark.family for name, benchmark in BENCHMARKS.items()},
        seed=settings["seed"],
        notes=(f"SET{MUTED}: all tool calls were refused.",) if any(name.endswith(MUTED) for name in found) else (),
        overlong=about.overlong,
        settings=about.settings,
        links=about.links,
    )
    write_report(folder, by_name, grades, meta)
    if judge is not None:
        judge.close()
    print(summary(folder))
    print(f"all tables: {folder / 'report.md'}\nreport: {folder / 'report.html'}")


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
