"""Caches of tool results: opening one.

Wherever a file is named, FILE.py:NAME=PLACE may stand: a class of yours, derived from `Cache`, and what it opens.
"""

from __future__ import annotations

from pathlib import Path

from arpo.config.named import find, is_own
from arpo.errors import UserError
from arpo.tools.cache.store import Cache, CacheFile

PAGE, SUMMARY = "page", "summary"
"""Backends of what was recorded besides searches."""


def open_cache(place: str | Path, *, read_only: bool, setting: str = "tools.search.cache") -> Cache:
    """Open a cache: a SQLite file, or FILE.py:NAME=PLACE. `setting` is the config field that names it.

    Raises UserError where `place` cannot be used; see `CacheFile`.
    """
    if is_own(str(place)):
        made, where = own_cache(str(place), setting)
        return made(where, read_only=read_only, setting=setting)
    if "://" in str(place):  # which may have a password in it
        raise UserError(f"{setting}: a cache at an address must be FILE.py:NAME=ADDRESS (docs/tools.md)")
    if Path(place).suffix == ".json":
        raise UserError(f"{place}: the released format is read by FILE.py:NAME={place}; docs/tools.md has it")
    return CacheFile(place, read_only=read_only, setting=setting)


def own_cache(place: str, setting: str) -> tuple[type[Cache], str]:
    """Return the class of FILE.py:NAME=PLACE, and the place. Raises UserError."""
    name, _, where = place.partition("=")
    return find(setting, name, {}), where
