"""The files that a script's options name, looked at before torch is imported: a misspelt path is answered in a second.

`load_or_exit` calls the check of its script: `check_rl`, sft/inputs.py:check_sft, or evals/inputs.py:check_evaluation.
They read the first rows of data only.
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
from arpo.tools import check_known, tool_schemas
from arpo.tools.search.tool import check_search

NUM_ROWS = 50
OWN = (
    "loss.kind", "loss.aggregation", "loss.kl_estimator", "loss.rollout_correction", "branching.selector",
    "advantage.kind", "advantage.tree", "data.order", "protocol.format",
)  # fmt: skip
"""Options whose FILE.py is imported here, so that what is wrong with it is known before a model is loaded."""


def check_rl(cfg: Any) -> None:
    """Raise UserError for the first file of train_rl.py's config that is missing, or whose first rows are useless."""
    check_model_folder(cfg.model.path, max_model_len=cfg.max_model_len)
    check_questions(filter(None, (cfg.data.train, cfg.data.valid)), cfg.tools)
    for option in OWN:
        if is_own(value := attrgetter(option)(cfg)):
            find(option, value, {})
    check_run(cfg)


def check_run(cfg: Any) -> None:
    """Check what the trainings have in common."""
    check_run_folder(cfg.run, cfg)
    files = [local_file(path) for path in (cfg.data.train, cfg.data.valid) if path]
    if os.environ.get("RANK", "0") == "0" and len({digest_of(file) for file in files}) < len(files):
        print(f"warning: data.valid={cfg.data.valid} is the training data, so validation says nothing of new questions")
    for tracker in cfg.run.trackers:
        find("run.trackers", tracker, TRACKERS)


def check_questions(paths: Iterable[str], tools: ToolsConfig) -> None:
    """Raise UserError where no first row of a file is a question, or one offers an unknown tool; or for the search."""
    tags = tuple(tool_schemas(tools))
    for path in paths:
        prompts, bad = [], []
        for place, row in islice(read_rows(local_file(path)), NUM_ROWS):
            try:
                prompts.append(parse_prompt(row, place.removeprefix(path).lstrip(": "), default_source="")[0])
            except BadRow as error:
                bad.append(f"{place}: {error}")
        if bad and not prompts:
            raise UserError(
                f"{bad[0]} (so it is with all of the first {len(bad)}); repair the file, or rename its columns"
            )
        check_known(prompts, tags, path)
    if "search" in tools.names:
        check_search(tools.search)
