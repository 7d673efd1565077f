"""The cache in a Redis server, for the ranks of several nodes: the same rows, keys and modes as a cache file.

    tools.search.cache: extras/redis/cache.py:RedisCache=redis://host:port/db

The keys in the server are

    arpo:cache:1:entry:<key>     hash {id, backend, query, value, negative, created_s}, as a row of the file
    arpo:cache:1:query:<sha256>  list of the entries of a query, in the order of recording

If the server is lost during a run, a recording run continues without cache until the server is back. A replay ends with
a UserError.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from arpo.tools.cache.rows import DamagedEntry, Row, clean_query, make_row, unpack
from arpo.tools.cache.store import IMPORTED, NEGATIVE_TTL_S, Cache
from extras.redis.client import PREFIX, connect, describe
from extras.redis.rate_limit import RedisRateLimit

_ROOT = f"{PREFIX}cache:1:"
_ENTRY, _QUERY, _LAST_ID = (f"{_ROOT}{name}" for name in ("entry:", "query:", "last_id"))
MAX_PAUSE_S = 60.0
_BATCH = 1000
"""Most commands of one round trip."""

# One atomic step of the server: the first answer of all nodes wins, and no writer leaves half an entry.
_PUT = """
local old = redis.call('HMGET', KEYS[1], 'negative', 'created_s')
if old[1] and not (old[1] == '1' and tonumber(old[2]) < tonumber(ARGV[1])) then return 0 end
redis.call('HSET', KEYS[1], 'backend', ARGV[2], 'query', ARGV[3], 'value', ARGV[4], 'negative', ARGV[5],
           'created_s', ARGV[6])
if not old[1] then
    redis.call('HSET', KEYS[1], 'id', redis.call('INCR', KEYS[3]))
    redis.call('RPUSH', KEYS[2], KEYS[1])
end
return 1
"""
_FIELDS = ("backend", "query", "value", "negative", "created_s")


class RedisCache(Cache):
    """A cache in one Redis database. Thread-safe, and usable after a fork. The methods are those of `CacheFile`."""

    remedy = "see that the server runs"
    rate_limit = RedisRateLimit
    """The rate limit shared by the searches of all ranks, in the same server."""

    def __init__(self, url: str, *, read_only: bool = False, setting: str = "tools.search.cache"):
        """Raises UserError if no server answers, or if redis-py is not installed."""
        super().__init__(describe(url), read_only=read_only)
        self._pause_s = 0.0
        self._client = connect(url, setting)
        import redis

        self.failures = (redis.RedisError, DamagedEntry)
        self._refusals = redis.ResponseError  # out of memory, a full disk, a replica: the server answers, and reads
        self._put = self._client.register_script(_PUT)

    def get(self, key: bytes, query: str) -> str | None:
        """Return the answer recorded under `key`. If there is none, return an imported answer to the query."""
        oldest_negative_s = 0.0 if self.read_only else time.time() - NEGATIVE_TTL_S

        def find() -> str | None:
            row = self._row(_entry(key))
            if not row or (row[4] and row[5] < oldest_negative_s):
                row = next((row for row in self._rows_of(query) if row[1] == IMPORTED), None)
            return row and unpack(row[3])[1]

        return self.guarded(find)

    def get_any(self, query: str) -> str | None:
        """Return the first recorded answer to the query, from any backend."""
        return self.guarded(lambda: next((unpack(row[3])[1] for row in self._rows_of(query)), None))

    def put(self, key: bytes, backend: str, query: str, text: str) -> None:
        """Record an answer, unless the key already has an answer. An expired "no results" is replaced."""
        self.write(lambda: self.add([make_row(key, backend, query, text)], replace_older_s=NEGATIVE_TTL_S))

    def give_up(self, error: Exception) -> None:
        """Continue without the server for one second. Double the time with each failed attempt, up to one minute.
        Raises UserError in a replay."""
        before_s = self._use_again_s
        super().give_up(error)
        now_s = time.monotonic()
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S) if now_s - before_s < MAX_PAUSE_S else 1.0
        self._use_again_s = now_s + self._pause_s

    def can_still_read(self, error: Exception) -> bool:
        return isinstance(error, self._refusals)

    def add(self, rows: Iterable[Row], *, replace_older_s: float = float("inf")) -> int:
        """Add a row if its key is new, or has a "no results" older than `replace_older_s`. Return the number added."""
        oldest_s = time.time() - replace_older_s
        num_new = 0
        for batch in _batches(rows):
            with self._client.pipeline(transaction=False) as pipeline:
                for key, backend, query, value, negative, created_s in batch:
                    values = [repr(oldest_s), backend, query, value, int(negative), repr(created_s)]
                    self._put(keys=[_entry(key), _list_of(query), _LAST_ID], args=values, client=pipeline)
                num_new += sum(pipeline.execute())
        return num_new

    def rows(self) -> Iterator[Row]:
        """Yield all rows, in the order of recording."""
        numbered = []
        for batch in _batches(sorted(set(self._client.scan_iter(f"{_ENTRY}*", count=_BATCH)))):
            ids = self._each(batch, lambda pipeline, name: pipeline.hget(name, "id"))
            numbered += [(int(number), name) for number, name in zip(ids, batch, strict=True) if number]
        for batch in _batches(name for _, name in sorted(numbered)):
            found = self._each(batch, lambda pipeline, name: pipeline.hmget(name, _FIELDS))
            yield from (_parse(name, values) for name, values in zip(batch, found, strict=True) if values[2])

    def close(self) -> None:
        self._client.close()

    def _row(self, name: bytes) -> Row | None:
        values = self._client.hmget(name, _FIELDS)
        return _parse(name, values) if values[2] else None

    def _rows_of(self, query: str) -> Iterator[Row]:
        return filter(None, map(self._row, self._client.lrange(_list_of(clean_query(query)), 0, -1)))

    def _each(self, items: list, command: Callable) -> list:
        with self._client.pipeline(transaction=False) as pipeline:
            for item in items:
                command(pipeline, item)
            return pipeline.execute()


def _entry(key: bytes) -> bytes:
    return f"{_ENTRY}{key.hex()}".encode()


def _list_of(cleaned_query: str) -> str:
    return f"{_QUERY}{hashlib.sha256(cleaned_query.encode()).hexdigest()}"


def _parse(name: bytes, values: list[bytes]) -> Row:
    backend, query, value, negative, created_s = values
    key = bytes.fromhex(name.decode().removeprefix(_ENTRY))
    return key, backend.decode(), query.decode(), value, negative == b"1", float(created_s)


def _batches(items: Iterable) -> Iterator[list]:
    remaining = iter(items)
    return iter(lambda: list(islice(remaining, _BATCH)), [])
