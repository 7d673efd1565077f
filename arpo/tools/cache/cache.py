"""Caches of tool results: opening one, and files in the released format.

Wherever a file is named, FILE.py:NAME=PLACE may stand: a class of yours, derived from `Cache`, and what it opens. The
released format is one JSON object, query -> text.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from arpo.config.bounded import parse_json
from arpo.config.named import find, is_own
from arpo.errors import UserError
from arpo.tools.cache.rows import DamagedEntry, Row, unpack
from arpo.tools.cache.sqlite_files import derived_paths, first_writable
from arpo.tools.cache.store import Cache, CacheFile

logger = logging.getLogger(__name__)

PYTHON, PAGE, SUMMARY, MCP = "python", "page", "summary", "mcp"
"""Backends of what other tools than search have recorded. The released format holds searches only."""


def open_cache(place: str | Path, *, read_only: bool, setting: str = "tools.search.cache") -> Cache:
    """Open a cache: a SQLite file, a .json file in the released format, or FILE.py:NAME=PLACE.

    A .json file is imported into a SQLite file, again only when it has changed. For writing that file lies beside it,
    where its owner finds what a run has recorded (or, where that folder is read-only or on a network, in the user's
    cache folder). Who only reads leaves nothing beside it, and reads what was recorded there. Raises UserError where
    `place` cannot be used; see `CacheFile`. `setting` is the config field that names it.
    """
    if is_own(str(place)):
        made, where = own_cache(str(place), setting)
        return made(where, read_only=read_only, setting=setting)
    if "://" in str(place):  # which may have a password in it
        raise UserError(f"{setting}: a cache at an address must be FILE.py:NAME=ADDRESS (docs/tools.md)")
    path = Path(place)
    if path.suffix != ".json":
        return CacheFile(path, read_only=read_only, setting=setting)
    if not path.is_file():
        raise UserError(f"{path}: there is no such file; set {setting} to an existing cache")
    try:
        beside, *elsewhere = derived_paths(path, ".sqlite")
        places = elsewhere if read_only and not beside.exists() else [beside, *elsewhere]
        target = first_writable(places, local=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be imported: {error}") from None
    cache = CacheFile(target, setting=setting)
    import_json(cache, path, replace=True)
    if not read_only:
        return cache
    cache.close()
    return CacheFile(target, read_only=True, setting=setting)


def own_cache(place: str, setting: str) -> tuple[type[Cache], str]:
    """Return the class of FILE.py:NAME=PLACE, and the place. Raises UserError."""
    name, _, where = place.partition("=")
    return find(setting, name, {}), where


def import_json(cache: Cache, path: Path, *, replace: bool = False) -> int:
    """Add a file in the released format. Return the number of new entries.

    `replace`: drop what was imported before, unless the file is unchanged since then (of a CacheFile).
    """
    try:
        stat = path.stat()
        if not cache.usable:
            raise UserError(f"{path}: cannot be imported into {cache.path}, which is not writable")
        if not replace:
            return cache.add(cache.imported_rows(read_released(path)))
        return 0 if cache.has_imported(stat) else cache.replace_imported(read_released(path), stat)
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
    """Write the first answer to each search query in the released format. Return their number."""
    entries: dict[str, str] = {}
    for _, backend, _, value, _, _ in _intact(cache):
        if backend not in (PYTHON, PAGE, SUMMARY, MCP):
            entries.setdefault(*unpack(value))
    writing = path.with_name(path.name + ".tmp")
    writing.write_text(json.dumps(entries, indent=2, ensure_ascii=False), encoding="utf-8")
    writing.replace(path)
    return len(entries)


def merge(cache: Cache, other: str | Path) -> int:
    """Add the entries of another cache (another node's, say). Return the number of new ones."""
    source = open_cache(other, read_only=True)  # raises UserError where it is none, or corrupt
    num_new = cache.add(_intact(source))
    source.close()
    return num_new


def _intact(cache: Cache) -> Iterator[Row]:
    """Yield the rows that are not damaged; a warning at the end says how many are."""
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
    facts = [(backend, len(value), bool(negative), s) for _, backend, _, value, negative, s in cache.rows()]
    backends, sizes, negatives, times_s = zip(*facts, strict=True) if facts else [()] * 4
    lines = [f"entries     {len(facts)}"]
    lines += [f"  {backend:<10}{count}" for backend, count in sorted(Counter(backends).items())]
    lines += [f"no results  {sum(negatives)}", f"texts       {sum(sizes) / 2**20:.1f} MiB, compressed"]
    if times_s:
        first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(s)) for s in (min(times_s), max(times_s)))
        lines.append(f"recorded    {first} .. {last}")
    return lines
