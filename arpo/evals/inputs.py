"""Checks the files that evaluate.py's options name, before torch is imported (see arpo/start/inputs.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arpo.data.model_folder import check_model_folder
from arpo.errors import UserError
from arpo.evals.benchmarks import read_benchmark, select
from arpo.protocol import form_of
from arpo.start.inputs import NUM_ROWS, check_questions, check_tool_names
from arpo.start.run_folder import claim_folder


def check_evaluation(cfg: Any) -> None:
    """Raise UserError for the first file of evaluate.py's config that is missing or has no usable first rows."""
    form_of(cfg.protocol.format)  # records of an earlier start may be in this form
    if cfg.eval.regrade:
        if not Path(cfg.eval.regrade).is_dir():
            raise UserError(f"eval.regrade={cfg.eval.regrade}: no such folder; pass runs/NAME")
        claim_folder(Path(cfg.eval.regrade), cfg.SCRIPT)
        return
    if not cfg.eval.server:
        check_model_folder(cfg.model.path, max_model_len=cfg.max_model_len)
    for name, benchmark in select(cfg.eval.benchmarks, cfg.eval.data_dir)[0].items():
        read_benchmark(name, benchmark, cfg.eval.data_dir, max_questions=NUM_ROWS)
    check_questions(cfg.eval.files, cfg.tools)
    check_tool_names(cfg)
    claim_folder(cfg.run.folder, cfg.SCRIPT)
