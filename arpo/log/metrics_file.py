"""metrics.jsonl: a line of JSON per step. It has whole lines only, also where the disk is full for a while."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path

from arpo.config.bounded import parse_json, read_file
from arpo.errors import UserError

logger = logging.getLogger(__name__)


class MetricsFile:
    """Appends rows to a run's metrics.jsonl. Rows for which there is no room wait in memory."""

    def __init__(self, path: Path, resume_step: int):
        """Drop the lines that an interrupted run wrote after that of `resume_step` (0: all), for which no room is
        needed. Raises OSError."""
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

    def write(self, *rows: Mapping[str, float]) -> str:
        """Write rows, after those that wait. Return why they still wait; "" where all are written."""
        self._waiting += rows
        data = "".join(json.dumps(row) + "\n" for row in self._waiting).encode()
        try:
            with self.path.open("r+b") as file:
                file.truncate(self._num_bytes)
                file.seek(self._num_bytes)
                file.write(data)
        except OSError as error:
            with contextlib.suppress(OSError):  # else the next write removes the part of a row that there was room for
                os.truncate(self.path, self._num_bytes)
            return error.strerror or str(error)
        self._num_bytes += len(data)
        self._waiting.clear()
        return ""


def _num_bytes_until(path: Path, step: int) -> int:
    """Return the length of the lines up to a step's. What a power loss has broken ends no run: lines that are none are
    removed, and missing steps are said."""
    kept: list[bytes] = []
    steps: list[int] = []
    for line, row in _rows(path):
        if row["step"] > step:
            break
        kept.append(line + b"\n")
        steps.append(row["step"])
    data = b"".join(kept)
    if not path.read_bytes().startswith(data):
        writing = path.with_name(path.name + ".tmp")
        writing.write_bytes(data)
        writing.replace(path)
    if missing := sorted({*range(1, step + 1)} - {*steps}):
        logger.warning("%s: %d steps before %d have no numbers, %d first", path, len(missing), step + 1, missing[0])
    return len(data)


def _rows(path: Path, *, skip_broken: bool = True) -> Iterator[tuple[bytes, dict[str, float]]]:
    """Yield each line that has an end, and its row; a killed or working run may leave half a line.

    Raises UserError for a device and the like, and for a line that is no row, unless those are passed over.
    """
    try:
        lines = read_file(path).split(b"\n")[:-1]
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UserError(f"{path}: {error}; move it away") from None
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            row["step"] = int(row["step"])
        except (ValueError, TypeError, KeyError):
            if skip_broken:
                continue
            raise UserError(f"{path}:{number}: not a line of metrics; drop the line") from None
        yield line, row


def rows_until(path: Path, step: float, *, skip_broken: bool = True) -> dict[int, dict[str, float]]:
    """Return the numbers of the first `step` steps by step; none where there is no file. Raises as `_rows` does."""
    rows: dict[int, dict[str, float]] = {}
    for _, row in _rows(path, skip_broken=skip_broken):
        if row["step"] <= step:
            rows.setdefault(row["step"], {}).update(row)
    return rows


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return what a run's metrics.jsonl has of each step, in order. Raises UserError for a broken line."""
    return list(rows_until(folder / "metrics.jsonl", inf, skip_broken=False).values())
