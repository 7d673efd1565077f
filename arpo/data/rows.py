"""Rows of parquet, jsonl and json-array files. Bad files are a UserError that names file and row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from arpo.config.bounded import check_plain, parse_json
from arpo.errors import UserError

BOM = b"\xef\xbb\xbf"
"""What Excel and Windows put at the start of a UTF-8 file."""


def read_rows(path: str | Path, *, part: int = 0, num_parts: int = 1) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a parquet, jsonl or json-array file as (place, row); the place is "file:line" or "file: row 3".

    Only a json array is read as a whole. `part` (from 0) of `num_parts` about equal, consecutive parts is read, so that
    ranks can share a file. Raises UserError for a file that is missing, empty, corrupt or of an unknown kind.
    """
    path = Path(path)
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        raise UserError(f"{path}: unknown file type {path.suffix!r}; use .parquet, .jsonl or .json")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty; was the download or the export interrupted?")
        yield from (_parquet_rows if path.suffix == ".parquet" else _json_rows)(path, part, num_parts)
    except OSError as error:
        raise UserError(f"{path}: cannot read the file ({error.strerror or error}); check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _parquet_rows(path: Path, part: int, num_parts: int) -> Iterator[tuple[str, dict]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(batch_size=256))
        for i, row in islice(enumerate(rows), *_bounds(file.metadata.num_rows, part, num_parts)):
            yield f"{path}: row {i}", row
    except (pa.ArrowException, OSError) as error:  # a corrupt page is an OSError without errno
        if isinstance(error, OSError) and error.errno:
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a readable parquet file ({reason}); download or export it again") from None


def _json_rows(path: Path, part: int, num_parts: int) -> Iterator[tuple[str, dict]]:
    with path.open("rb") as file:
        is_array = path.suffix == ".json" and file.read(4).removeprefix(BOM)[:1] == b"["
        file.seek(0)
        for place, row in (_array_items if is_array else _lines)(path, file, part, num_parts):
            if not isinstance(row, dict):
                raise UserError(f"{place}: must be a JSON object, not {type(row).__name__}")
            try:
                check_plain(row)
            except ValueError as error:
                raise UserError(f"{place}: {error}; repair or remove the row") from None
            yield place, row


def _array_items(path: Path, file: BinaryIO, part: int, num_parts: int) -> Iterator[tuple[str, object]]:
    items = _parsed(path, file.read())
    for i in range(*_bounds(len(items), part, num_parts)):
        yield f"{path}: item {i}", items[i]


def _lines(path: Path, file: BinaryIO, part: int, num_parts: int) -> Iterator[tuple[str, object]]:
    begin, end = 0, None
    if num_parts > 1:
        begin, end = _bounds(sum(1 for _ in file), part, num_parts)
        file.seek(0)
    for number, line in enumerate(islice(file, begin, end), start=begin + 1):
        if line.strip():
            yield f"{path}:{number}", _parsed(path, line, number)


def _parsed(path: Path, data: bytes, first_line: int = 1) -> object:
    text = data.removeprefix(BOM).decode().rstrip()
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place, what = f"{path}:{first_line + error.lineno - 1}", f"{error.msg} at column {error.colno}"
        raise UserError(f"{place}: not valid JSON ({what}); is the file truncated?") from None
    except ValueError as error:
        raise UserError(f"{path}:{first_line}: not valid JSON ({error})") from None


def _bounds(num: int, part: int, num_parts: int) -> tuple[int, int]:
    return num * part // num_parts, num * (part + 1) // num_parts
