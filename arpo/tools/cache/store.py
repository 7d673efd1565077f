"""The cache file: one SQLite row per answer, compressed; the first answer to a query wins, so that replays are stable.

Write-ahead log with synchronous=NORMAL: many processes read and write at once, and one that is killed loses nothing
that `put` returned from. Wherever a file is named, FILE.py:NAME=PLACE may stand: a class of yours, derived from
`Cache`, and what it opens.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from arpo.config.named import find, is_own
from arpo.errors import UserError
from arpo.tools.cache.rows import FORMAT, DamagedEntry, Row, clean_query, make_row, unpack
from arpo.tools.cache.sqlite_files import network_filesystem

logger = logging.getLogger(__name__)
T = TypeVar("T")

NEGATIVE_TTL_S = 7 * 86400.0
"""Age at which a "no results" is asked for again while recording. A replay keeps it for good."""
IMPORTED = "import"
"""Backend of imported rows. The released format does not say where its answers come from; they serve any backend."""
BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_APPLICATION_ID = 0x4152504F  # "ARPO"
_SCHEMA = f"""
    BEGIN;
    PRAGMA application_id = {_APPLICATION_ID};
    PRAGMA user_version = {FORMAT};
    CREATE TABLE entries (
        id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, backend TEXT NOT NULL, query TEXT NOT NULL,
        value BLOB NOT NULL, negative INTEGER NOT NULL, created_s REAL NOT NULL);
    CREATE INDEX entries_by_query ON entries (query);
    CREATE TABLE imports (source_bytes INTEGER, source_mtime_ns INTEGER, UNIQUE (source_bytes, source_mtime_ns));
    COMMIT;
"""
_INSERT = "INSERT INTO entries (key, backend, query, value, negative, created_s) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT "
ADD = _INSERT + "DO NOTHING"
_PUT = f"""{_INSERT} (key) DO UPDATE SET value = excluded.value, negative = excluded.negative,
    created_s = excluded.created_s WHERE negative AND created_s < ?"""


def open_cache(place: str | Path, *, read_only: bool, setting: str = "tools.search.cache") -> Cache:
    """Open a cache: a SQLite file, or FILE.py:NAME=PLACE. `setting` is the config field that names it. Raises
    UserError where `place` cannot be used; see `CacheFile`."""
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


class Cache:
    """The part that all caches share: what happens when one cannot be used.

    It must not stop a recording run: there is one warning, `usable` is False, and `get` and `put` do nothing from then
    on. Where it can only not be written (a full disk), there is one warning too, and `get` goes on. A replay has
    nothing but its cache: `read_only` raises UserError instead.
    """

    failures: tuple[type[Exception], ...]
    remedy: str

    def __init__(self, path: str | Path, *, read_only: bool):
        self.path, self.read_only = path, read_only
        self._use_again_s = -math.inf  # by time.monotonic()
        self._has_failed_to_write = False

    @property
    def usable(self) -> bool:
        return time.monotonic() >= self._use_again_s

    def guarded(self, action: Callable[[], T]) -> T | None:
        """Return what the action returns; None where the cache cannot be used."""
        if not self.usable:
            return None
        try:
            return action()
        except self.failures as error:
            return self.give_up(error)

    def write(self, action: Callable[[], object]) -> None:
        """Do the action, unless the cache cannot be written."""

        def attempt() -> None:
            try:
                action()
            except self.failures as error:
                if not self.can_still_read(error):
                    raise
                if not self._has_failed_to_write:
                    logger.warning("%s: cannot write the cache (%s); what it holds is still read", self.path, error)
                self._has_failed_to_write = True

        self.guarded(attempt)

    def can_still_read(self, error: Exception) -> bool:
        """Return whether an error of `write` leaves the cache readable."""
        raise NotImplementedError

    def give_up(self, error: Exception) -> None:
        """Go on without the cache. Raises UserError in a replay."""
        if self.read_only:
            raise UserError(f"{self.path}: cannot read the cache ({error}); {self.remedy}") from None
        if self.usable:
            logger.warning("%s: cannot use the cache (%s); the run goes on without it", self.path, error)
        self._use_again_s = math.inf


class CacheFile(Cache):
    """One cache file, for any number of processes and threads; each thread has a connection of its own."""

    failures = (sqlite3.Error, DamagedEntry)
    remedy = "save what is intact with `sqlite3 OLD .recover | sqlite3 NEW` (docs/tools.md), or record it anew"

    def __init__(self, path: str | Path, *, read_only: bool = False, setting: str = "tools.search.cache"):
        """Makes a missing file. A corrupt one is moved aside with a warning, and a new one begun.

        `setting` is the config field that names it. Raises UserError for a file on a network file system or of another
        program; with `read_only` also for a missing, corrupt or unreadable one.
        """
        super().__init__(Path(path), read_only=read_only)
        self.setting = setting
        self._lock = None
        self._connections: dict[tuple[int, int], sqlite3.Connection] = {}  # by process and thread
        if read_only and not self.path.is_file():
            raise UserError(f"{self.path}: there is no such cache; set {setting} to a recorded one")
        try:
            if not read_only:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            if name := network_filesystem(self.path.parent):
                why = f"is on {name}, where SQLite cannot share a write-ahead log"
                raise UserError(f"{self.path}: {why}; set {setting} to a file on a local disk")
            self._open()
        except (OSError, sqlite3.Error, UserError) as error:
            self.close()
            if isinstance(error, UserError):
                raise
            self.give_up(error)

    def get(self, key: bytes, query: str) -> str | None:
        """Return the answer recorded under `key`, else an imported one for the query; None for neither."""
        oldest_negative_s = 0.0 if self.read_only else time.time() - NEGATIVE_TTL_S
        return self._text(
            "SELECT id, value FROM entries WHERE (key = ? OR query = ? AND backend = ?)"
            " AND NOT (negative AND created_s < ?) ORDER BY key != ? LIMIT 1",
            (key, clean_query(query), IMPORTED, oldest_negative_s, key),
        )

    def get_any(self, query: str) -> str | None:
        """Return the first recorded answer to the query, whichever backend gave it."""
        return self._text("SELECT id, value FROM entries WHERE query = ? ORDER BY id LIMIT 1", (clean_query(query),))

    def put(self, key: bytes, backend: str, query: str, text: str) -> None:
        """Keep an answer unless there is one already; it replaces an expired "no results"."""
        values = (*make_row(key, backend, query, text), time.time() - NEGATIVE_TTL_S)
        self.write(lambda: self.connection().execute(_PUT, values))

    def can_still_read(self, error: Exception) -> bool:
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in BROKEN

    def add(self, rows: Iterable[Row]) -> int:
        """Add the rows whose keys are new. Return their number."""
        with self.connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            return connection.executemany(ADD, rows).rowcount

    def rows(self) -> Iterator[Row]:
        """Yield all rows, in the order of recording."""
        sql = "SELECT key, backend, query, value, negative, created_s FROM entries ORDER BY id"
        return self.connection().execute(sql)

    def _text(self, sql: str, values: tuple) -> str | None:
        def find() -> str | None:
            found = self.connection().execute(sql, values).fetchone()
            try:
                return found and unpack(found[1])[1]
            except DamagedEntry as error:
                if self.read_only:
                    raise
                logger.warning("%s: %s; it is asked for again", self.path, error)
                self.write(lambda: self.connection().execute("DELETE FROM entries WHERE id = ? AND value = ?", found))

        return self.guarded(find)

    def connection(self) -> sqlite3.Connection:
        """Return this thread's connection, in autocommit mode."""
        key = (os.getpid(), threading.get_ident())  # SQLite connections do not survive a fork
        if key not in self._connections:
            # A read-only folder has no room for the log's index, and nobody writes there.
            is_frozen = not os.access(self.path.parent, os.W_OK) and not Path(f"{self.path}-shm").exists()
            mode = "rwc" if not self.read_only else "ro&immutable=1" if is_frozen else "ro"
            uri = f"{self.path.resolve().as_uri()}?mode={mode}"
            connection = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None, check_same_thread=False)
            self._connections[key] = connection
            connection.execute("PRAGMA synchronous = NORMAL")
        return self._connections[key]

    # ---- opening and closing

    def _open(self) -> None:
        is_first = self._take_lock()
        try:
            self._check(thorough=is_first)
        except sqlite3.DatabaseError as error:
            if self.read_only or not is_first or self.can_still_read(error):
                raise
            if self.path.suffix not in (".sqlite", ".sqlite3", ".db"):  # a slip must not move the user's data
                raise UserError(f"{self.path}: not a cache; name it *.sqlite if it is a broken one") from None
            self._disconnect()
            aside = self._move_aside()
            self._check(thorough=False)
            logger.warning("%s: corrupt cache (%s), kept as %s; a new one is begun, or stop and %s",
                           self.path, error, aside.name, self.remedy)  # fmt: skip
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _take_lock(self) -> bool:
        """Return True for the first user of the file, who holds the lock alone and may check and replace the file. The
        others come in when that is done, and share the lock for as long as they use the file."""
        try:
            self._lock = self.path.with_name(self.path.name + ".lock").open("a")
        except OSError:
            if self.read_only:
                return True
            raise
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            return False

    def _check(self, *, thorough: bool) -> None:
        connection = self.connection()
        [is_empty] = connection.execute("SELECT count(*) = 0 FROM sqlite_master").fetchone()
        if is_empty and not self.read_only:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA)
        identity = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        odd = "SELECT count(*) FROM sqlite_master WHERE type IN ('view', 'trigger')"  # a view's rows may have no end
        if identity != [_APPLICATION_ID, FORMAT] or connection.execute(odd).fetchone()[0]:
            raise UserError(f"{self.path}: not a cache of this version; set {self.setting} to another file")
        if thorough:
            [verdict] = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(" ".join(verdict.split()))

    def _move_aside(self) -> Path:
        aside = self.path.with_name(f"{self.path.name}.corrupt-{time.strftime('%Y%m%dT%H%M%S')}")
        for ending in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{ending}").rename(f"{aside}{ending}")
        return aside

    def _disconnect(self) -> None:
        for (pid, _), connection in self._connections.items():
            if pid == os.getpid():
                connection.close()
        self._connections = {}

    def close(self) -> None:
        """Close the file. No call may be running."""
        self._disconnect()
        if self._lock is not None:
            self._lock.close()
