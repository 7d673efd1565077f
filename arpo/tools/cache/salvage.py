"""Saving what is intact of a corrupt cache file."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from arpo.tools.cache.rows import NO_RESULTS, DamagedEntry, Row, clean_query, unpack

# By the table alone: an index may be what is damaged.
_ROWS_AFTER = """SELECT id, key, backend, query, value, negative, created_s FROM entries NOT INDEXED WHERE id > ?
    ORDER BY id"""


def salvaged_rows(path: Path) -> Iterator[Row]:
    """Yield the intact rows of a corrupt file, row by row past the pages that cannot be read. Reads a copy of it."""
    with tempfile.TemporaryDirectory(prefix=".salvage-", dir=path.parent) as folder:
        copy = Path(folder) / "copy.sqlite"
        for ending in ("", "-wal"):
            if Path(f"{path}{ending}").exists():
                shutil.copyfile(f"{path}{ending}", f"{copy}{ending}")
        _fill_up(copy)
        connection = sqlite3.connect(copy, isolation_level=None)
        with contextlib.closing(connection), contextlib.suppress(sqlite3.Error):  # of a file without a readable head
            yield from filter(_is_intact, _readable_rows(connection, max_id=copy.stat().st_size // 64))


def _fill_up(path: Path) -> None:
    """Give a cut file the length that its header says, without which SQLite reads nothing of it."""
    with path.open("rb") as file:
        header = file.read(32)
    page_bytes, num_pages = int.from_bytes(header[16:18], "big"), int.from_bytes(header[28:32], "big")
    if page_bytes == 4096 and path.stat().st_size < page_bytes * num_pages < 1 << 40:
        os.truncate(path, page_bytes * num_pages)  # a hole: it takes no space


def _readable_rows(connection: sqlite3.Connection, max_id: int) -> Iterator[Row]:
    """Yield rows in order of their ids. `max_id`: more rows do not fit in the file; its last page may be unreadable."""
    number = 0
    while number < max_id:
        try:
            for row_id, *row in connection.execute(_ROWS_AFTER, (number,)):
                if row_id <= number:
                    raise sqlite3.DatabaseError("ids out of order")
                number = row_id
                yield tuple(row)
            return
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_NOTADB:
                raise
            number += 1


def _is_intact(row: Row) -> bool:
    key, backend, query, value, negative, created_s = row
    try:
        recorded, text = unpack(value)
        fits = clean_query(recorded) == query and negative == (text == NO_RESULTS)
        return fits and len(key) == 32 and isinstance(backend, str) and math.isfinite(created_s)
    except (DamagedEntry, TypeError):
        return False
