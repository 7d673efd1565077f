"""metrics.jsonl: a line of JSON per step, and a second one with what came later of it (run.overlap_validation).

It has whole lines only, also where the disk is full for a while.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from arpo.errors import UserError


class MetricsFile:
    """Appends rows to a run's metrics.jsonl. Rows for which there is no room wait in memory."""

    def __init__(self, path: Path, resume_step: int):
        """Drop the lines that an interrupted run wrote after those of `resume_step`, for which no room is needed, and
        a second one of that step, which is written again. Raises OSError.

        From step 0 a run begins anew, and writes what it did before step 1 again.
        """
        self.path = path
        self._waiting: list[Mapping[str, float]] = []
        path.touch()
        self._num_bytes = _num_bytes_until(path, resume_step) if resume_step else 0
        """Size of the file without what a failed write has left."""
        os.truncate(path, self._num_bytes)

    @property
    def waiting_steps(self) -> list[int]:
        """Steps whose rows are not on disk."""
        return [int(row["step"]) for row in self._waiting]

    def append(self, row: Mapping[str, float]) -> str:
        """Write a row, after those that wait. Return why they still wait; "" where all are written."""
        self._waiting.append(row)
        return self.flush()

    def flush(self) -> str:
        """Write the rows that wait. Return why they still do; "" where none does."""
        data = "".join(json.dumps(row) + "\n" for row in self._waiting).encode()
        try:
            with self.path.open("r+b", buffering=0) as file:
                file.truncate(self._num_bytes)
                file.seek(self._num_bytes)
                left = data
                while left:
                    left = left[file.write(left) :]
        except OSError as error:
            self._cut()
            return error.strerror or str(error)
        self._num_bytes += len(data)
        self._waiting.clear()
        return ""

    def _cut(self) -> None:
        """Remove the part of a row that there was room for, as far as that is possible now."""
        try:
            os.truncate(self.path, self._num_bytes)
        except OSError:  # the next write does it
            return


def _num_bytes_until(path: Path, step: int) -> int:
    """Return the length of the lines up to a step's first one; a killed run may leave half a line."""
    num_bytes, newest = 0, -1
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n") or newest == step or json.loads(line)["step"] > step:
            break
        newest = json.loads(line)["step"]
        num_bytes += len(line)
    return num_bytes


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return what a run's metrics.jsonl has of each step, in order; [] where there is none.

    A last line without its end, which a working run may be writing, is passed over. Raises UserError for a broken line.
    """
    path = folder / "metrics.jsonl"
    lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    rows: dict[int, dict[str, float]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.setdefault(int(row["step"]), {}).update(row)
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}:{number}: not a line of metrics; drop the line") from None
    return list(rows.values())
