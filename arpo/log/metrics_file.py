"""metrics.jsonl: a line of JSON per step. It has whole lines only, also where the disk is full for a while."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from math import inf
from pathlib import Path

from arpo.config.bounded import parse_json, read_lines
from arpo.errors import UserError

MAX_STEP = 1 << 53
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
    steps: set[int] = set()
    num_bytes, is_damaged = 0, False
    for start, line, row in _rows(path):
        if row["step"] > step:
            break
        is_damaged = is_damaged or start != num_bytes
        num_bytes += len(line)
        steps.add(row["step"])
    if is_damaged:
        writing = path.with_name(path.name + ".tmp")
        with writing.open("wb") as file:
            for _, line, row in _rows(path):
                if row["step"] > step:
                    break
                file.write(line)
        writing.replace(path)
    if missing := sorted({*range(1, step + 1)} - steps):
        logger.warning("%s: %d steps before %d have no numbers, %d first", path, len(missing), step + 1, missing[0])
    return num_bytes


def _rows(
    path: Path, *, names: Collection[str] = (), skip_broken: bool = True
) -> Iterator[tuple[int, bytes, dict[str, float]]]:
    """Yield each line that has an end: its place in the file, itself, and its row.

    Raises UserError for a device and the like, and for a line that is no row, unless those are passed over; then lines
    that have none of these names, if some are given, are not read.
    """
    wanted = [json.dumps(name).encode() for name in names if skip_broken]
    position = 0
    try:
        for number, line in enumerate(read_lines(path), 1):
            if not line.endswith(b"\n"):  # a killed or working run may leave half a line
                return
            start, position = position, position + len(line)
            if wanted and not any(name in line for name in wanted):
                continue
            try:
                yield start, line, _row_of(line)
            except (ValueError, TypeError, KeyError):
                if not skip_broken:
                    raise UserError(f"{path}:{number}: not a line of metrics; drop the line") from None
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UserError(f"{path}: {error}; move it away") from None


def _row_of(line: bytes) -> dict[str, float]:
    """Return the numbers of a line. Raises ValueError, TypeError or KeyError for another text."""
    row = parse_json(line)
    for name, value in row.items() if isinstance(row, dict) else ():
        if type(value) not in (int, float):
            raise TypeError(f"{name} is no number")
    if not 0 <= row["step"] <= MAX_STEP or row["step"] != int(row["step"]):  # NaN is in no range
        raise ValueError("no step")
    row["step"] = int(row["step"])
    return row


def rows_until(
    path: Path, step: float, *, names: Collection[str] = (), skip_broken: bool = True
) -> dict[int, dict[str, float]]:
    """Return the numbers of the first `step` steps by step; none where there is no file. Raises as `_rows` does.

    names: only these numbers, of the steps that have one of them; a long run has more than fits into memory.
    """
    rows: dict[int, dict[str, float]] = {}
    for _, _, row in _rows(path, names=names, skip_broken=skip_broken):
        if row["step"] <= step:
            kept = {name: row[name] for name in ("step", *names) if name in row} if names else row
            rows.setdefault(row["step"], {}).update(kept)
    return rows


def read_metrics(folder: Path, names: Collection[str] = ()) -> list[dict[str, float]]:
    """Return what a run's metrics.jsonl has of each step, in order; `names` as in `rows_until`.

    Raises UserError for a broken line.
    """
    return list(rows_until(folder / "metrics.jsonl", inf, names=names, skip_broken=False).values())
