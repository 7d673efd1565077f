"""metrics.jsonl: a line of JSON per step. The file has only complete lines, even if the disk is full for a while."""

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
    """Appends rows to a run's metrics.jsonl. If the disk is full, rows wait in memory."""

    def __init__(self, path: Path, resume_step: int):
        """Drop the lines after `resume_step` (0 = all lines). They are from an interrupted run. Raises OSError.

        This works on a full disk too.
        """
        self.path = path
        self._waiting: list[Mapping[str, float]] = []
        path.touch()
        self._num_bytes = _num_bytes_until(path, resume_step) if resume_step else 0
        """Size of the complete lines. A failed write may leave bytes after them."""
        os.truncate(path, self._num_bytes)

    @property
    def waiting_steps(self) -> list[int]:
        """Steps of the waiting rows."""
        return [int(row["step"]) for row in self._waiting]

    def write(self, *rows: Mapping[str, float]) -> str:
        """Write the waiting rows, and then these. Return "", or the reason if all of them still wait."""
        self._waiting += rows
        data = "".join(json.dumps(row) + "\n" for row in self._waiting).encode()
        try:
            with self.path.open("r+b") as file:
                file.truncate(self._num_bytes)
                file.seek(self._num_bytes)
                file.write(data)
        except OSError as error:
            # Remove an incomplete row. If this fails, the next write does it.
            with contextlib.suppress(OSError):
                os.truncate(self.path, self._num_bytes)
            return error.strerror or str(error)
        self._num_bytes += len(data)
        self._waiting.clear()
        return ""


def _num_bytes_until(path: Path, step: int) -> int:
    """Return the length of the lines up to this step. Damaged lines are removed, and missing steps are logged.

    A power loss may damage lines. This must not end the run.
    """
    steps: set[int] = set()
    num_bytes = 0
    is_damaged = False
    for start, line, row in _rows(path):
        if row["step"] > step:
            break
        is_damaged = is_damaged or start != num_bytes  # bytes before this line are not a row
        num_bytes += len(line)
        steps.add(row["step"])
    if is_damaged:
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as file:
            for _, line, row in _rows(path):
                if row["step"] > step:
                    break
                file.write(line)
        temporary.replace(path)
    missing = sorted({*range(1, step + 1)} - steps)
    if missing:
        logger.warning("%s: %d steps before %d have no numbers, %d first", path, len(missing), step + 1, missing[0])
    return num_bytes


def _rows(
    path: Path, *, names: Collection[str] = (), skip_broken: bool = True
) -> Iterator[tuple[int, bytes, dict[str, float]]]:
    """Yield (start in the file, line, row) of each complete line.

    names: skip lines without any of these names (only with skip_broken). skip_broken: skip damaged lines. Raises
    UserError for a damaged line without skip_broken, and for a path that is no file.
    """
    encoded_names = [json.dumps(name).encode() for name in names if skip_broken]
    end = 0
    try:
        for number, line in enumerate(read_lines(path), 1):
            if not line.endswith(b"\n"):  # the run was killed within this line, or is still writing it
                return
            start = end
            end += len(line)
            if encoded_names and not any(name in line for name in encoded_names):
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
    """Return the numbers of a line. Raises ValueError, TypeError or KeyError for any other text."""
    row = parse_json(line)
    if not isinstance(row, dict):
        raise TypeError("no object")
    for name, value in row.items():
        if type(value) not in (int, float):
            raise TypeError(f"{name} is no number")
    if not 0 <= row["step"] <= MAX_STEP or row["step"] != int(row["step"]):  # the first comparison is False for NaN
        raise ValueError("no step")
    row["step"] = int(row["step"])
    return row


def rows_until(
    path: Path, step: float, *, names: Collection[str] = (), skip_broken: bool = True
) -> dict[int, dict[str, float]]:
    """Return step -> metrics for the steps up to `step`. Return {} without a file. Raises UserError as `_rows` does.

    names: only these metrics, and only steps with at least one of them. (All metrics of a long run may not fit into
    memory.)
    """
    rows: dict[int, dict[str, float]] = {}
    for _, _, row in _rows(path, names=names, skip_broken=skip_broken):
        if row["step"] <= step:
            if names:
                row = {name: row[name] for name in ("step", *names) if name in row}
            rows.setdefault(row["step"], {}).update(row)
    return rows


def read_metrics(folder: Path, names: Collection[str] = ()) -> list[dict[str, float]]:
    """Return the metrics of each step in a run's metrics.jsonl, in order. names: as in `rows_until`.

    Raises UserError for a damaged line.
    """
    return list(rows_until(folder / "metrics.jsonl", inf, names=names, skip_broken=False).values())
