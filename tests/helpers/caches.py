"""Caches in files, filled and damaged."""

import os
import sqlite3
from pathlib import Path

from arpo.tools.cache.rows import cache_key, unpack
from arpo.tools.cache.store import CacheFile


def put(cache: CacheFile, query: str, text: str, backend: str = "b") -> None:
    cache.put(cache_key(backend, {}, query), backend, query, text)


def get(cache: CacheFile, query: str, backend: str = "b") -> str | None:
    return cache.get(cache_key(backend, {}, query), query)


def entries_of(cache: CacheFile) -> list[tuple[str, str]]:
    return [unpack(row[3]) for row in cache.rows()]


def filled(path: Path) -> None:
    cache = CacheFile(path)
    for i in range(200):
        put(cache, f"q{i}", os.urandom(200).hex())
    cache.close()


def damage_value(path: Path, query: str) -> None:
    """One bit of one answer; no check of SQLite's notices it."""
    with sqlite3.connect(path) as connection:
        [value] = connection.execute("SELECT value FROM entries WHERE query = ?", (query,)).fetchone()
    connection.close()
    blob = bytearray(path.read_bytes())
    blob[blob.index(value) + len(value) // 2] ^= 4
    path.write_bytes(blob)
