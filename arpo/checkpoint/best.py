"""RUN/best: the Hugging Face folder with the best validation. The folder stays when the checkpoint is deleted.

    runs/NAME/best -> checkpoints/best_000100      hard links to the files of checkpoints/step_000100/hf

The choice depends only on metrics.jsonl and the present folders, so a killed run can continue it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from math import isfinite, lcm, nan
from pathlib import Path

import arpo.checkpoint.manifest as manifest
from arpo.checkpoint.export import point_to
from arpo.config.sections import RunConfig
from arpo.log.metrics_file import rows_until
from arpo.log.settings import last_change

ACCURACY = "valid/accuracy"
REWARD = "valid/reward"
NLL = "valid/nll"
VALIDATION = ("data.valid", "data.num_valid_prompts", "data.system_prompt", "reward.", "contents.reward.")
"""Prefixes of the options that decide what a validation's score means."""
NAMES = (ACCURACY, f"{ACCURACY}_low", f"{ACCURACY}_high", REWARD, NLL)


def why_no_best(run: RunConfig, valid: str, num_steps: int) -> str:
    """Return a line for the log if RUN/best will not be written, or can only be the last step. Otherwise return "".

    valid: data.valid. num_steps: number of steps of the run.
    """
    if not run.keep_best:
        return ""
    reasons = {
        "data.valid is empty": not valid,
        "run.validate_every=0": not run.validate_every,
        "run.save_hf_every=0": not run.save_hf_every,
    }
    if missing := [reason for reason, holds in reasons.items() if holds]:
        return f"there will be no {run.folder}/best ({', '.join(missing)}): docs/data.md#hold-some-rows-out"
    export_every = run.save_every * run.save_hf_every
    if max(run.validate_every, export_every) < num_steps <= lcm(run.validate_every, export_every):
        return (
            f"{run.folder}/best will be the last step: no step before it has both a validation (one in every "
            f"{run.validate_every}) and a Hugging Face folder (one in every {export_every}); change run.save_every"
        )
    return ""


def keep_best(run: Path, checkpoints: Iterable[Path], step: int) -> str:
    """Point RUN/best to the export with the best validation within the first `step` steps.

    Candidates are the exports of `checkpoints`, and the present RUN/best. If two are equally good, the earlier one
    counts. After a change of the validation (VALIDATION) only later steps are compared, and the best one from before
    stays as its folder checkpoints/best_N. Return a line for the log about a new choice, or "". Raises OSError.
    """
    link = run / "best"
    all_rows = rows_until(run / "metrics.jsonl", step, names=NAMES)
    changed = last_change(run, VALIDATION)  # scores from before it are of other questions, or by another reward
    rows = {n: row for n, row in all_rows.items() if n > changed and isfinite(_score(row))}
    # 0 also for a link that the user has set to another folder: the next choice replaces it.
    kept = max(manifest.step_of(link.resolve(), "best"), 0) if link.exists() else 0
    if kept and kept not in (rows if kept > changed else all_rows):
        # The run has resumed before this step, and will do it again.
        link.unlink()
        kept = 0
    exports = {manifest.step_of(folder): folder / "hf" for folder in checkpoints if (folder / "hf").exists()}
    candidates = [n for n in rows if n in exports or n == kept]
    best = max(candidates, key=lambda n: (_score(rows[n]), -n), default=kept)
    if best == kept:
        return ""
    folder = run / "checkpoints" / f"best_{best:06d}"
    temporary = folder.with_suffix(".tmp")
    for stale in (temporary, folder):
        shutil.rmtree(stale, ignore_errors=True)
    shutil.copytree(exports[best], temporary, copy_function=_link_or_copy)
    temporary.rename(folder)
    point_to(folder, link)
    for other in filter(manifest.may_be_removed, (run / "checkpoints").glob("best_*")):
        is_of_former_validation = 0 < manifest.step_of(other, "best") <= changed
        if other != folder and not is_of_former_validation:
            shutil.rmtree(other)
    before = f", before: step {kept}, {_text(rows[kept])}" if kept in rows else ""
    return f"best validation so far: step {best}, {_text(rows[best])}{before}"


def _score(row: dict) -> float:
    """Return the score of a step's validation (higher is better); NaN without a validation. Callers must drop NaN:
    max() would never replace a NaN by another score."""
    if NLL in row:
        return -row[NLL]
    return row.get(ACCURACY, row.get(REWARD, nan))  # a custom reward may have no accuracy


def _text(row: dict) -> str:
    if ACCURACY not in row:
        return f"loss {row[NLL]:.4f}" if NLL in row else f"reward {row[REWARD]:+.3f}"
    return f"accuracy {row[ACCURACY]:.3f} [{row[ACCURACY + '_low']:.3f}, {row[ACCURACY + '_high']:.3f}]"


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
