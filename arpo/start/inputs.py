"""Checks the files named by the options before torch is imported. So a misspelt path is reported in a second.

`load_or_exit` calls the check of its script: `check_rl`, sft/inputs.py:check_sft, or evals/inputs.py:check_evaluation.
The checks read only the first rows of data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter
from typing import Any

from arpo.config.contents import digest_of
from arpo.config.named import find, is_own
from arpo.config.tools import ToolsConfig
from arpo.data import BadRow, parse_prompt, read_rows
from arpo.data.hub import local_file
from arpo.data.model_folder import check_model_folder
from arpo.errors import UserError
from arpo.log.trackers import TRACKERS
from arpo.start.run_folder import check_run_folder
from arpo.tools import TOOLS, check_loaded, tool_schemas
from arpo.tools.search.tool import check_search
from arpo.trajectory import Prompt

NUM_ROWS = 50
"""Number of first rows to check in each file."""
IMPORTED = (
    "loss.kind",
    "loss.aggregation",
    "loss.kl_estimator",
    "loss.rollout_correction",
    "branching.selector",
    "advantage.kind",
    "advantage.tree",
    "data.order",
    "protocol.format",
)
"""The FILE.py of these options is imported here, so an error in the file shows before a model is loaded."""


def check_rl(cfg: Any) -> None:
    """Raise UserError for the first missing file in train_rl.py's config, or the first file without usable first
    rows."""
    check_model_folder(cfg.model.path, max_model_len=cfg.max_model_len)
    check_questions(filter(None, (cfg.data.train, cfg.data.valid)), cfg.tools)
    check_tool_names(cfg)
    for option in IMPORTED:
        value = attrgetter(option)(cfg)
        if is_own(value):
            find(option, value, {})
    check_run(cfg)


def check_tool_names(cfg: Any) -> None:
    """Raise UserError if a limit of calls, or the bonus, names a tool that does not exist. It would have no effect.

    The built-in tools need not be loaded, since these options name both of them by default.
    """
    tags = tuple(tool_schemas(cfg.tools))
    for option, names in (
        ("rollout.max_calls_per_tool", cfg.rollout.call_limits),
        ("reward.bonus_tools", cfg.reward.bonus_tools),
    ):
        unknown = [name for name in names if name not in (*tags, *TOOLS)]
        if unknown:
            raise UserError(f"{option}: no tool {unknown[0]!r} in tools.names; there are {', '.join(tags) or 'none'}")


def check_run(cfg: Any) -> None:
    """Check the folder, the data and the trackers of a run, for both trainings. Raises UserError."""
    check_run_folder(cfg.run, cfg)
    files = [local_file(path) for path in (cfg.data.train, cfg.data.valid) if path]
    if os.environ.get("RANK", "0") == "0" and len({digest_of(file) for file in files}) < len(files):
        print(f"warning: data.valid={cfg.data.valid} is the training data, so validation says nothing of new questions")
    for tracker in cfg.run.trackers:
        find("run.trackers", tracker, TRACKERS)


def check_questions(paths: Iterable[str], tools: ToolsConfig) -> None:
    """Check the first rows of question files, and the settings of the search.

    Raises UserError if a file has no question among these rows, if a row offers an unknown tool, or if the search
    settings are wrong.
    """
    tags = tuple(tool_schemas(tools))
    for path in paths:
        prompts: list[Prompt] = []
        bad: list[str] = []
        for where, row in islice(read_rows(local_file(path)), NUM_ROWS):
            try:
                prompts.append(parse_prompt(row, where.removeprefix(path).lstrip(": "), default_source="")[0])
            except BadRow as error:
                bad.append(f"{where}: {error}")
        if bad and not prompts:
            raise UserError(
                f"{bad[0]} (so it is with all of the first {len(bad)}); repair the file, or rename its columns"
            )
        check_loaded(prompts, tags, path)
    if "search" in tools.names:
        check_search(tools.search)
