"""Caches in the released format (one JSON object, query -> text), and the commands of the cache's command line.

--tools.search.cache extras/cache/released.py:ReleasedCache=search_cache.json
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from arpo.config.bounded import parse_json
from arpo.errors import UserError
from arpo.tools.cache.rows import PAGE, SUMMARY, DamagedEntry, Row, cache_key, make_row, unpack
from arpo.tools.cache.sqlite_files import derived_paths, first_writable
from arpo.tools.cache.store import ADD, IMPORTED, Cache, CacheFile, open_cache
from extras.tools.recorder import MCP, PYTHON

logger = logging.getLogger(__name__)


class ReleasedCache(CacheFile):
    """A .json file in the released format, imported into a SQLite file. A changed .json file is imported again.

    A writer puts the SQLite file beside the .json file, so that the owner finds the recorded results. If this folder is
    read-only or on a network, the SQLite file is in the user's cache folder. A reader writes nothing beside the .json
    file, but reads the results recorded there.
    """

    def __init__(self, source: str | Path, *, read_only: bool = False, setting: str = "tools.search.cache"):
        """Raises UserError if the file is missing or cannot be imported; see also `CacheFile`."""
        source = Path(source)
        if not source.is_file():
            raise UserError(f"{source}: there is no such file; set {setting} to an existing cache")
        try:
            beside, *elsewhere = derived_paths(source, ".sqlite")
            places = elsewhere if read_only and not beside.exists() else [beside, *elsewhere]
            target = first_writable(places, local=True)
        except OSError as error:
            raise UserError(f"{source}: cannot be imported: {error}") from None
        super().__init__(target, setting=setting)
        check_writable(self, source)
        try:
            if not self.has_imported(stat := source.stat()):
                self.replace_imported(read_released(source), stat)
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"{source}: cannot be imported into {target} ({error})") from None
        if read_only:
            self.close()
            super().__init__(target, read_only=True, setting=setting)

    def replace_imported(self, entries: dict[str, str], source_stat: os.stat_result) -> int:
        """Replace all imported entries by these (query -> text), completely or not at all. Return the number."""
        rows = list(imported_rows(entries))  # compressed before the file is locked
        with self.connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if self.has_imported(source_stat):  # another rank was faster
                return 0
            connection.execute("DELETE FROM entries WHERE backend = ?", (IMPORTED,))
            connection.execute("DELETE FROM imports")
            connection.execute("INSERT INTO imports VALUES (?, ?)", (source_stat.st_size, source_stat.st_mtime_ns))
            return connection.executemany(ADD, rows).rowcount

    def has_imported(self, source_stat: os.stat_result) -> bool:
        """Return whether a released file of this size and time has been imported."""
        sql = "SELECT 1 FROM imports WHERE (source_bytes, source_mtime_ns) = (?, ?)"
        return bool(self.connection().execute(sql, (source_stat.st_size, source_stat.st_mtime_ns)).fetchone())


def imported_rows(entries: dict[str, str]) -> Iterator[Row]:
    """Yield the rows of query -> text entries."""
    return (make_row(cache_key(IMPORTED, {}, query), IMPORTED, query, text) for query, text in entries.items())


def check_writable(cache: Cache, source: Path) -> None:
    if not cache.usable:
        raise UserError(f"{source}: cannot be imported into {cache.path}, which is not writable")


def import_json(cache: Cache, path: Path) -> int:
    """Add a file in the released format. Return the number of new entries."""
    try:
        check_writable(cache, path)
        return cache.add(imported_rows(read_released(path)))
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: cannot be imported into {cache.path} ({error})") from None


def read_released(path: Path) -> dict[str, str]:
    """Return query -> text of a released cache, without empty texts: the released code writes them for failed calls."""
    try:
        tree = parse_json(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); is the file truncated?") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path}: must be one JSON object of query -> text, not {type(tree).__name__}")
    for query, text in tree.items():
        if not isinstance(text, str):
            raise UserError(f"{path}: the result of {query[:80]!r} must be a string, not {type(text).__name__}")
    answered = {query: text for query, text in tree.items() if text.strip()}
    if len(answered) < len(tree):
        logger.warning("%s: %d empty results (failed calls) left out", path, len(tree) - len(answered))
    return answered


def write_released(cache: Cache, path: Path) -> int:
    """Write the first answer to each search query in the released format. Return the number of answers."""
    entries: dict[str, str] = {}
    for _, backend, _, value, _, _ in _intact(cache):
        if backend not in (PYTHON, PAGE, SUMMARY, MCP):
            entries.setdefault(*unpack(value))
    writing = path.with_name(path.name + ".tmp")
    writing.write_text(json.dumps(entries, indent=2, ensure_ascii=False), encoding="utf-8")
    writing.replace(path)
    return len(entries)


def merge(cache: Cache, other: str | Path) -> int:
    """Add the entries of another cache (another node's, say). Return the number of new entries."""
    source = open_cache(other, read_only=True)  # raises UserError for a missing or corrupt cache
    num_new = cache.add(_intact(source))
    source.close()
    return num_new


def _intact(cache: Cache) -> Iterator[Row]:
    """Yield the intact rows. At the end, warn about the number of damaged rows."""
    num_damaged = 0
    for row in cache.rows():
        try:
            unpack(row[3])
        except DamagedEntry:
            num_damaged += 1
        else:
            yield row
    if num_damaged:
        logger.warning("%s: %d damaged entries left out", cache.path, num_damaged)


def stats(cache: Cache) -> list[str]:
    """Return a description of the cache's contents, as lines."""
    facts = [(backend, len(value), bool(negative), s) for _, backend, _, value, negative, s in cache.rows()]
    backends, sizes, negatives, times_s = zip(*facts, strict=True) if facts else [()] * 4
    lines = [f"entries     {len(facts)}"]
    lines += [f"  {backend:<10}{count}" for backend, count in sorted(Counter(backends).items())]
    lines += [f"no results  {sum(negatives)}", f"texts       {sum(sizes) / 2**20:.1f} MiB, compressed"]
    if times_s:
        first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(s)) for s in (min(times_s), max(times_s)))
        lines.append(f"recorded    {first} .. {last}")
    return lines
