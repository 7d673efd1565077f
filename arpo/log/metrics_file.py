"""metrics.jsonl: a line of JSON per step. It has whole lines only, also where the disk is full for a while."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from arpo.config.bounded import parse_json, read_file
from arpo.errors import UserError

logger = logging.getLogger(__name__)


class MetricsFile:
    """Appends rows to a run's metrics.jsonl. Rows for which there is no room wait in memory."""

    def __init__(self, path: Path, resume_step: int):
        """Drop the lines that an interrupted run wrote after that of `resume_step`, for which no room is needed. Raises
        OSError.

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
    """Return the length of the lines up to a step's; a killed run may leave half a line.

    What a power loss has broken ends no run: lines that are none are removed, and missing steps are said.
    """
    kept: list[bytes] = []
    steps: list[int] = []
    for line, row in _whole_lines(path):
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


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, float]]]:
    """Yield each line and its row, and pass over those that are none."""
    for line in _lines(path):
        try:
            row = parse_json(line)
            row["step"] = int(row["step"])
        except (ValueError, TypeError, KeyError):
            continue
        yield line, row


def _lines(path: Path) -> list[bytes]:
    """Return the lines with an end; [] where there is no file. Raises UserError for a device and the like."""
    try:
        return read_file(path).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UserError(f"{path}: {error}; move it away") from None


def rows_until(path: Path, step: int) -> dict[int, dict[str, float]]:
    """Return the numbers of the first `step` steps by step, as far as the file has whole lines of them."""
    rows: dict[int, dict[str, float]] = {}
    for _, row in _whole_lines(path):
        if row["step"] <= step:
            rows.setdefault(row["step"], {}).update(row)
    return rows


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return what a run's metrics.jsonl has of each step, in order; [] where there is none.

    A last line without its end, which a working run may be writing, is passed over. Raises UserError for a broken line.
    """
    path = folder / "metrics.jsonl"
    rows: dict[int, dict[str, float]] = {}
    for number, line in enumerate(_lines(path), 1):
        try:
            row = parse_json(line)
            rows.setdefault(int(row["step"]), {}).update(row)
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}:{number}: not a line of metrics; drop the line") from None
    return list(rows.values())
