"""The files that a script's options name, looked at before torch is imported: a misspelt path is answered in a second.

Of data only the first rows are read here. All of it is read, with the same checks, once the script runs.
"""

from __future__ import annotations

from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from arpo.config.model_folder import check_model_folder
from arpo.config.run_folder import check_run_folder
from arpo.config.tools import ToolsConfig
from arpo.data import BadRow, parse_prompt, read_rows
from arpo.data.hub import check_hub_model, local_file
from arpo.errors import UserError
from arpo.evals.benchmarks import questions, select
from arpo.log.trackers import check_installed
from arpo.named import find, is_own
from arpo.sft import PARSERS
from arpo.sft.conversations import read_conversations
from arpo.tools import check_known, tool_class, tool_schemas
from arpo.tools.interface import is_stateful

NUM_ROWS = 50
OWN = (
    "loss.kind", "loss.aggregation", "loss.kl_estimator", "loss.rollout_correction", "branching.selector",
    "advantage.kind", "advantage.tree",
)  # fmt: skip
"""Options whose FILE.py is imported here, so that what is wrong with it is known before a model is loaded."""


def check_inputs(cfg: Any) -> None:
    """Raise UserError for the first file of a script's config that is missing, or whose first rows cannot be used."""
    {"train_sft": _check_sft, "train_rl": _check_rl, "evaluate": _check_evaluation}[cfg.SCRIPT](cfg)
    if cfg.SCRIPT != "evaluate":
        check_run_folder(cfg.run, cfg)
        check_installed(cfg.run.trackers)
    if cfg.SCRIPT != "evaluate" or not (cfg.eval.regrade or cfg.eval.compare):
        check_hub_model("model.path", cfg.model.path)


def _check_sft(cfg: Any) -> None:
    check_model_folder(cfg.model.path)
    for path in filter(None, (cfg.data.train, cfg.data.valid)):
        for _ in islice(read_conversations(local_file(path), parse=PARSERS[cfg.protocol.format]), NUM_ROWS):
            pass


def _check_rl(cfg: Any) -> None:
    check_model_folder(cfg.model.path, max_model_len=cfg.max_model_len)
    tools = _check_tools(cfg)
    if cfg.rollout.reuse_last_epoch:
        _check_reuse(cfg.rollout.top_p, cfg.tools)
    if "judge" in cfg.reward.weights and not (cfg.judge.url and cfg.judge.model):
        raise UserError("reward.terms has judge, but judge.url or judge.model is empty; set both, or drop the term")
    for path in filter(None, (cfg.data.train, cfg.data.valid)):
        _check_questions(path, tools)
    for option in OWN:
        if is_own(value := attrgetter(option)(cfg)):
            find(option, value, {})


def _check_reuse(top_p: float, tools: ToolsConfig) -> None:
    """Raise UserError where an earlier rollout cannot be compared with the policy of now, or not be gone on from."""
    if top_p < 1:
        raise UserError(f"rollout.reuse_last_epoch compares probabilities, which top_p={top_p} cuts off; set it to 1")
    stateful = [(f"the {n} tool", f"drop {n} from tools.names") for n in tools.names if is_stateful(tool_class(n))]
    stateful += [(server.label, "set its max_sessions to 0") for server in tools.servers if server.max_sessions]
    for what, fix in stateful:
        why = f"{what} has sessions, which calls that are not made again would leave behind"
        raise UserError(f"rollout.reuse_last_epoch: {why}; set it to False, or {fix}")


def _check_evaluation(cfg: Any) -> None:
    if cfg.eval.regrade or cfg.eval.compare:
        return
    if not cfg.eval.server:
        prompts = "eval.max_prompt_tokens"
        check_model_folder(cfg.model.path, max_model_len=cfg.max_model_len, prompt_option=prompts)
    tools = _check_tools(cfg)
    for name, benchmark in select(cfg.eval.benchmarks, cfg.eval.data_dir)[0].items():
        questions(name, benchmark, cfg.eval.data_dir, max_questions=NUM_ROWS)
    for path in cfg.eval.files:
        _check_questions(path, tools)


def _check_tools(cfg: Any) -> tuple[str, ...]:
    """Return the names of the tools, those of MCP servers included."""
    if cfg.reward.file and not Path(cfg.reward.file).is_file():
        raise UserError(f"reward.file={cfg.reward.file}: there is no such file; check the path")
    replays = cfg.SCRIPT == "evaluate" and cfg.eval.replay
    return tuple(tool_schemas(cfg.tools.replayed() if replays else cfg.tools))


def _check_questions(path: str, tools: tuple[str, ...]) -> None:
    """Raise UserError where none of the first rows is a question, or one offers a tool that is not loaded."""
    prompts, bad = [], []
    for place, row in islice(read_rows(local_file(path)), NUM_ROWS):
        try:
            prompts.append(parse_prompt(row, place.removeprefix(path).lstrip(": "), default_source="")[0])
        except BadRow as error:
            bad.append(f"{place}: {error}")
    if bad and not prompts:
        raise UserError(f"{bad[0]} (so it is with all of the first {len(bad)}); repair the file, or rename its columns")
    check_known(prompts, tools, path)
