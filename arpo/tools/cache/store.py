"""The cache file: one compressed SQLite row per answer. The first answer to a query stays, so replays are stable.

The file uses a write-ahead log with synchronous=NORMAL. Many processes read and write at once. If a process is killed,
no answer is lost after `put` has returned. A config may name a custom cache instead of a file, as FILE.py:NAME=PLACE:
NAME is a class derived from `Cache`, and PLACE is opened by this class.
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
"""Age after which a recording run asks again for a "no results" answer. A replay uses these answers forever."""
IMPORTED = "import"
"""Backend of imported rows. The released format does not name the source of its answers; they serve any backend."""
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
    """Open a cache: a SQLite file, or FILE.py:NAME=PLACE. `setting` is the config field, for messages.

    Raises UserError if `place` cannot be used; see `CacheFile`.
    """
    if is_own(str(place)):
        made, where = own_cache(str(place), setting)
        return made(where, read_only=read_only, setting=setting)
    if "://" in str(place):  # the message does not quote the address: it may contain a password
        raise UserError(f"{setting}: a cache at an address must be FILE.py:NAME=ADDRESS (docs/tools.md)")
    if Path(place).suffix == ".json":
        raise UserError(f"{place}: the released format is read by FILE.py:NAME={place}; docs/tools.md has it")
    return CacheFile(place, read_only=read_only, setting=setting)


def own_cache(place: str, setting: str) -> tuple[type[Cache], str]:
    """Return the class NAME and the text PLACE of FILE.py:NAME=PLACE. Raises UserError."""
    name, _, where = place.partition("=")
    return find(setting, name, {}), where


class Cache:
    """Base class of all caches. Handles a cache that fails.

    A failure never stops a recording run. The cache logs one warning, sets `usable` to False, and from then on `get`
    and `put` do nothing. If only writing fails (a full disk), the cache logs one warning and `get` goes on. A replay
    has no other source of answers, so a cache with `read_only` raises UserError instead.
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
        """Run the action and return its result; None if the cache cannot be used."""
        if not self.usable:
            return None
        try:
            return action()
        except self.failures as error:
            return self.give_up(error)

    def write(self, action: Callable[[], object]) -> None:
        """Run the action. If the cache cannot be written, log one warning."""

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
        """Return True if the cache can be read after this error of `write`."""
        raise NotImplementedError

    def give_up(self, error: Exception) -> None:
        """Log a warning and go on without the cache. Raises UserError in a replay."""
        if self.read_only:
            raise UserError(f"{self.path}: cannot read the cache ({error}); {self.remedy}") from None
        if self.usable:
            logger.warning("%s: cannot use the cache (%s); the run goes on without it", self.path, error)
        self._use_again_s = math.inf


class CacheFile(Cache):
    """One cache file, for any number of processes and threads. Each thread has its own connection."""

    failures = (sqlite3.Error, DamagedEntry)
    remedy = "save what is intact with `sqlite3 OLD .recover | sqlite3 NEW` (docs/tools.md), or record it anew"

    def __init__(self, path: str | Path, *, read_only: bool = False, setting: str = "tools.search.cache"):
        """Open the file, or create a missing file. A corrupt file is moved aside with a warning and replaced.

        `setting` is the config field, for messages. Raises UserError for a file on a network file system and for a
        file of another program; with `read_only` also for a missing, corrupt or unreadable file.
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
        """Return the answer recorded under `key`, or an imported answer to the query, or None."""
        oldest_negative_s = 0.0 if self.read_only else time.time() - NEGATIVE_TTL_S
        return self._text(
            "SELECT id, value FROM entries WHERE (key = ? OR query = ? AND backend = ?)"
            " AND NOT (negative AND created_s < ?) ORDER BY key != ? LIMIT 1",
            (key, clean_query(query), IMPORTED, oldest_negative_s, key),
        )

    def get_any(self, query: str) -> str | None:
        """Return the first recorded answer to the query, from any backend."""
        return self._text("SELECT id, value FROM entries WHERE query = ? ORDER BY id LIMIT 1", (clean_query(query),))

    def put(self, key: bytes, backend: str, query: str, text: str) -> None:
        """Record an answer. An earlier answer stays, unless it is an expired "no results"."""
        values = (*make_row(key, backend, query, text), time.time() - NEGATIVE_TTL_S)
        self.write(lambda: self.connection().execute(_PUT, values))

    def can_still_read(self, error: Exception) -> bool:
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in BROKEN

    def add(self, rows: Iterable[Row]) -> int:
        """Add all rows with new keys. Return the number of added rows."""
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
            # In a read-only folder SQLite cannot create the index of its log. No process writes there, so
            # `immutable` is safe.
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
            if self.path.suffix not in (".sqlite", ".sqlite3", ".db"):  # a wrong path, perhaps: keep the file
                raise UserError(f"{self.path}: not a cache; name it *.sqlite if it is a broken one") from None
            self._disconnect()
            aside = self._move_aside()
            self._check(thorough=False)
            logger.warning("%s: corrupt cache (%s), kept as %s; a new one is begun, or stop and %s",
                           self.path, error, aside.name, self.remedy)  # fmt: skip
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _take_lock(self) -> bool:
        """Return True for the first user of the file.

        The first user holds the lock alone, and may check and replace the file. All others wait for this check, and
        then share the lock until `close`.
        """
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
        odd = "SELECT count(*) FROM sqlite_master WHERE type IN ('view', 'trigger')"  # a view may be endless
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
        """Close the file. Call this only after all other calls have ended."""
        self._disconnect()
        if self._lock is not None:
            self._lock.close()
