"""RUN/best: the Hugging Face folder of the best validation, which stays when newer checkpoints take its own away.

    runs/NAME/best -> checkpoints/best_000100      hard links to the files of checkpoints/step_000100/hf

What is best is read off metrics.jsonl and the folders that are there, so a run that was killed goes on with it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from math import isfinite, nan
from pathlib import Path

import arpo.checkpoint.manifest as manifest
from arpo.checkpoint.export import point_to
from arpo.config.sections import RunConfig
from arpo.log.metrics_file import rows_until

ACCURACY, REWARD, NLL = "valid/accuracy", "valid/reward", "valid/nll"
NAMES = (ACCURACY, f"{ACCURACY}_low", f"{ACCURACY}_high", REWARD, NLL)


def no_best(run: RunConfig, valid: str) -> str:
    """Return the line that says at the start why RUN/best will never be there; "" where it will, or is not wanted.

    valid: data.valid.
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
    return ""


def keep_best(run: Path, checkpoints: Iterable[Path], step: int) -> str:
    """Point RUN/best to the export with the best validation of the first `step` steps, of `checkpoints` or its own.

    Of two that are equally good the earlier is taken. Return what to say of a new choice, or "". Raises OSError.
    """
    link = run / "best"
    found = rows_until(run / "metrics.jsonl", step, names=NAMES)
    rows = {n: row for n, row in found.items() if n and isfinite(_score(row))}
    kept = int(link.resolve().name.removeprefix("best_")) if link.exists() else 0
    if kept and kept not in rows:  # of steps that are to be done again
        link.unlink()
        kept = 0
    exports = {manifest.step_of(folder): folder / "hf" for folder in checkpoints if (folder / "hf").exists()}
    best = max((n for n in rows if n in exports or n == kept), key=lambda n: (_score(rows[n]), -n), default=kept)
    if best == kept:
        return ""
    folder = run / "checkpoints" / f"best_{best:06d}"
    temporary = folder.with_suffix(".tmp")
    for stale in (temporary, folder):
        shutil.rmtree(stale, ignore_errors=True)
    shutil.copytree(exports[best], temporary, copy_function=_link_or_copy)
    temporary.rename(folder)
    point_to(folder, link)
    for other in (run / "checkpoints").glob("best_*"):
        if other != folder:
            shutil.rmtree(other)
    before = f", before: step {kept}, {_text(rows[kept])}" if kept else ""
    return f"best validation so far: step {best}, {_text(rows[best])}{before}"


def _score(row: dict) -> float:
    """Return how good a validation is; NaN where the step has none. NaN would be the maximum that nothing beats."""
    if NLL in row:
        return -row[NLL]
    return row.get(ACCURACY, row.get(REWARD, nan))  # a reward of one's own may know no accuracy


def _text(row: dict) -> str:
    if ACCURACY not in row:
        return f"loss {row[NLL]:.4f}" if NLL in row else f"reward {row[REWARD]:+.3f}"
    return f"accuracy {row[ACCURACY]:.3f} [{row[ACCURACY + '_low']:.3f}, {row[ACCURACY + '_high']:.3f}]"


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
