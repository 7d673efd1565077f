"""Rows of parquet, jsonl and json-array files, each with its place for error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from arpo.config import UserError


class BadRow(ValueError):
    """One row that cannot be used; the message names the field and what is wrong with it."""


def read_rows(path: str | Path) -> Iterator[tuple[str, dict]]:
    """All rows of a parquet, jsonl or json-array file as (place, row); the place is "file:line" or "file: row 3".

    Raises UserError for a file that is missing, empty, corrupt or of an unknown kind.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise UserError(f"{path}: unknown file type {path.suffix!r}; use .parquet, .jsonl or .json")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty; was the download or the export interrupted?")
        yield from _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read the file ({error.strerror or error}); check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:  # a corrupt page is an OSError without errno
        if isinstance(error, OSError) and error.errno:
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a readable parquet file ({reason}); download or export it again") from None
    for i, row in enumerate(rows):
        yield f"{path}: row {i}", row


def _json_rows(path: Path) -> Iterator[tuple[str, dict]]:
    with path.open(encoding="utf-8") as file:
        first = file.read(1)
        file.seek(0)
        if path.suffix == ".json" and first == "[":
            try:
                rows = json.load(file)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}:{error.lineno}: not valid JSON ({error.msg}); is the file truncated?"
                ) from None
            places = (f"{path}: item {i}" for i in range(len(rows)))
        else:
            rows, places = [], []
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError as error:
                    raise UserError(
                        f"{path}:{number}: not valid JSON ({error.msg} at column {error.colno}); is the line truncated?"
                    ) from None
                places.append(f"{path}:{number}")
    for place, row in zip(places, rows, strict=True):
        if not isinstance(row, dict):
            raise UserError(f"{place}: must be a JSON object, not {type(row).__name__}")
        yield place, row
