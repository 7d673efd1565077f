"""Caches of tool results: opening one (a file or a Redis server), and files in the released format.

Wherever a file is named, redis://host:port/db may stand. The released format is one JSON object, query -> text.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from arpo.errors import UserError
from arpo.tools.cache.redis_client import is_redis_url
from arpo.tools.cache.sqlite_files import derived_paths, first_writable
from arpo.tools.cache.store import CacheFile, DamagedEntry, Row, unpack

logger = logging.getLogger(__name__)

PYTHON, PAGE, SUMMARY = "python", "page", "summary"
"""Backends of what the python tool and the reading of pages recorded; the released format holds searches only."""


class Cache(Protocol):
    """The interface that `CacheFile` and `RedisCache` share; the docstrings are theirs."""

    path: str | Path
    usable: bool
    """False once it could not be written or read any more: the run goes on without it."""

    def get(self, key: bytes, query: str) -> str | None: ...
    def get_any(self, query: str) -> str | None: ...
    def put(self, key: bytes, backend: str, query: str, text: str) -> None: ...
    def add(self, rows: Iterable[Row]) -> int: ...
    def rows(self) -> Iterator[Row]: ...
    def prune(self, *, older_than_s: float = 0.0, backend: str = "", no_results: bool = False) -> int: ...
    def has_imported(self, source_stat: os.stat_result) -> bool: ...
    def import_entries(self, entries: dict[str, str], source_stat: os.stat_result, *, replace: bool = False) -> int: ...
    def close(self) -> None: ...


def open_cache(place: str | Path, *, read_only: bool, setting: str = "tools.search.cache") -> Cache:
    """The cache of a run: a SQLite file, redis://host:port/db, or a .json file in the released format.

    The last is imported into a SQLite file beside it (or, where that folder is read-only or on a network, in the user's
    cache folder); again only when it has changed. Raises UserError where `place` cannot be used; see `CacheFile` and
    `RedisCache`. `setting` is the config field that names it.
    """
    if is_redis_url(place):
        from arpo.tools.cache.redis_cache import RedisCache

        return RedisCache(str(place), read_only=read_only, setting=setting)
    path = Path(place)
    if path.suffix != ".json":
        return CacheFile(path, read_only=read_only, setting=setting)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; set {setting} to an existing cache")
    try:
        target = first_writable(derived_paths(path, ".sqlite"), local=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be imported: {error}") from None
    cache = CacheFile(target, setting=setting)
    import_json(cache, path, replace=True)
    if not read_only:
        return cache
    cache.close()
    return CacheFile(target, read_only=True, setting=setting)


def import_json(cache: Cache, path: Path, *, replace: bool = False) -> int:
    """Add a file in the released format; the number of new entries (0 when it is unchanged since its last import)."""
    try:
        stat = path.stat()
        if not cache.usable:
            raise UserError(f"{path}: cannot be imported into {cache.path}, which is not writable")
        return 0 if cache.has_imported(stat) else cache.import_entries(read_released(path), stat, replace=replace)
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{path}: cannot be imported into {cache.path} ({error})") from None


def read_released(path: Path) -> dict[str, str]:
    """query -> text of a released cache. Empty texts are left out: the released code writes them when a call failed."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}); is the file truncated?") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text; save it as UTF-8") from None
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
    """Write the cache in the released format; the number of entries. Of several answers to a query the first counts."""
    entries: dict[str, str] = {}
    for _, backend, _, value, _, _ in _intact(cache):
        if backend not in (PYTHON, PAGE, SUMMARY):
            entries.setdefault(*unpack(value))
    writing = path.with_name(path.name + ".tmp")
    writing.write_text(json.dumps(entries, indent=2, ensure_ascii=False), encoding="utf-8")
    writing.replace(path)
    return len(entries)


def merge(cache: Cache, other: str | Path) -> int:
    """Add the entries of another cache (another node's, say); the number of new ones."""
    source = open_cache(other, read_only=True)  # raises UserError where it is none, or corrupt
    num_new = cache.add(_intact(source))
    source.close()
    return num_new


def _intact(cache: Cache) -> Iterator[Row]:
    """Its rows but for damaged ones, whose number is said at the end."""
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
    """Return lines that say what the cache holds."""
    by_backend: Counter[str] = Counter()
    negative, num_bytes, times_s = 0, 0, []
    for _, backend, _, value, is_negative, created_s in cache.rows():
        by_backend[backend] += 1
        negative += bool(is_negative)
        num_bytes += len(value)
        times_s.append(created_s)
    lines = [f"entries     {by_backend.total()}"]
    lines += [f"  {backend:<10}{count}" for backend, count in sorted(by_backend.items())]
    lines += [f"no results  {negative}", f"texts       {num_bytes / 2**20:.1f} MiB, compressed"]
    if times_s:
        first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(s)) for s in (min(times_s), max(times_s)))
        lines.append(f"recorded    {first} .. {last}")
    return lines
