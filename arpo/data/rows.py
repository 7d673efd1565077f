"""Reads rows of parquet, jsonl, json-array and csv files. A bad file is a UserError with file and row."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from arpo.config.bounded import check_plain, parse_json
from arpo.errors import UserError

KINDS = (".parquet", ".jsonl", ".json", ".csv")
BOM = b"\xef\xbb\xbf"
"""Byte order mark: Excel and Windows write it at the start of a UTF-8 file."""


def read_rows(path: str | Path, *, part: int = 0, num_parts: int = 1) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a parquet, jsonl, json-array or csv file as (place, row).

    The place is "file:line" or "file: row 3", for error messages. All kinds but parquet may be compressed by gzip
    (.jsonl.gz). Only a json array is read into memory at once. Ranks can share a file: it is divided into `num_parts`
    consecutive parts of about equal size, and only `part` (from 0) is read.
    Raises UserError for a file that is missing, empty, corrupt or of an unknown kind.
    """
    path = Path(path)
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind not in KINDS or (path.suffix == ".gz" and kind == ".parquet"):
        raise UserError(f"{path}: unknown file type {path.suffix!r}; use .parquet, .jsonl, .json, .csv or .jsonl.gz")
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path}: the file is empty; was the download or the export interrupted?")
        if kind == ".parquet":
            yield from _parquet_rows(path, part, num_parts)
            return
        rows_of = _csv_rows if kind == ".csv" else _json_rows
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from rows_of(path, file, part, num_parts)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path}: not a whole gzip file ({error}); download or export it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the file ({error.strerror or error}); check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _parquet_rows(path: Path, part: int, num_parts: int) -> Iterator[tuple[str, dict]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, arrow_extensions_enabled=True)
        kinds = {field.name: field.type for field in file.schema_arrow}
        rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(batch_size=256))
        begin, end = _bounds(file.metadata.num_rows, part, num_parts)
        for i, row in islice(enumerate(rows), begin, end):
            place = f"{path}: row {i}"
            try:
                yield place, {name: _as_written(value, kinds[name]) for name, value in row.items()}
            except ValueError as error:
                raise UserError(f"{place}: a value that should be JSON is not ({error}); export it again") from None
    except (pa.ArrowException, OSError) as error:  # a corrupt page is an OSError without errno
        if isinstance(error, OSError) and error.errno:
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: not a readable parquet file ({reason}); download or export it again") from None


def _as_written(value: Any, kind: Any) -> Any:
    """Undo the changes that writing to parquet made to a value.

    `datasets` writes values whose type differs between rows as JSON text (its Json type). Parquet gives every object
    the keys of all objects, with null for the keys that an object did not have. A number of 32 bits has about seven
    digits: read as 64 bits, 0.1 would be 0.10000000149011612.
    """
    import pyarrow as pa

    if isinstance(value, float) and pa.types.is_floating(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, str) and getattr(kind, "extension_name", "") == "arrow.json":
        tree = parse_json(value)
        check_plain(tree)
        return tree
    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind}
        return {name: _as_written(field, kinds[name]) for name, field in value.items() if field is not None}
    if isinstance(value, list) and not pa.types.is_map(kind):  # a map is a list too, but of (key, value) pairs
        return [_as_written(item, kind.value_type) for item in value]
    return value


def _csv_rows(path: Path, file: BinaryIO, part: int, num_parts: int) -> Iterator[tuple[str, dict]]:
    """Yield rows of text. An empty cell is left out: csv has no difference between an empty and a missing field."""
    csv.field_size_limit(sys.maxsize)
    with TextIOWrapper(file, "utf-8-sig", newline="") as text:
        begin = 0
        end = None
        if num_parts > 1:
            num_rows = max(sum(1 for _ in csv.reader(text)) - 1, 0)  # without the header
            begin, end = _bounds(num_rows, part, num_parts)
            text.seek(0)
        rows = csv.DictReader(text, strict=True)
        try:
            names = rows.fieldnames or []
            if repeated := [name for name in names if name and names.count(name) > 1]:
                raise UserError(f"{path}: two columns are called {repeated[0]!r}; rename or remove one")
            for row in islice(rows, begin, end):
                place = f"{path}:{rows.line_num}"
                if None in row or None in row.values():  # more cells than columns, or fewer
                    raise UserError(f"{place}: has not the {len(rows.fieldnames)} columns of the first line; repair it")
                yield place, {name: cell for name, cell in row.items() if cell}
        except csv.Error as error:
            raise UserError(f"{path}:{rows.line_num}: not valid csv ({error}); export it again") from None


def _json_rows(path: Path, file: BinaryIO, part: int, num_parts: int) -> Iterator[tuple[str, dict]]:
    is_array = ".json" in path.suffixes[-2:] and file.read(4096).removeprefix(BOM).lstrip()[:1] == b"["
    file.seek(0)
    values_of = _array_items if is_array else _lines
    for place, row in values_of(path, file, part, num_parts):
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
    begin = 0
    end = None
    if num_parts > 1:
        begin, end = _bounds(sum(1 for _ in file), part, num_parts)
        file.seek(0)
    for line_number, line in enumerate(islice(file, begin, end), start=begin + 1):
        if line.removeprefix(BOM).strip():
            yield f"{path}:{line_number}", _parsed(path, line, line_number)


def _parsed(path: Path, data: bytes, first_line: int = 1) -> object:
    """Return the JSON value of `data`, which begins at line `first_line` of the file."""
    text = data.removeprefix(BOM).decode().rstrip()
    try:
        return parse_json(text, unique_names=True)
    except json.JSONDecodeError as error:
        place = f"{path}:{first_line + error.lineno - 1}"
        reason = f"{error.msg} at column {error.colno}"
        raise UserError(f"{place}: not valid JSON ({reason}); is the file truncated?") from None
    except ValueError as error:
        raise UserError(f"{path}:{first_line}: not valid JSON ({error})") from None


def _bounds(num_rows: int, part: int, num_parts: int) -> tuple[int, int]:
    """Return the first row of a part, and the first row after it. Seven rows, part 1 of 2: (3, 7)."""
    return num_rows * part // num_parts, num_rows * (part + 1) // num_parts
