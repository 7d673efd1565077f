"""How many calls per second a tool may make: in this process, or over all processes that share a Redis server.

The interface is `RateLimit`: `await limit.acquire()` returns when the next call may start. `LocalRateLimit` counts for
one process; `RedisRateLimit` for all ranks of all nodes. A client of an API (arpo/tools/http_client.py) takes either.

Both are the same token bucket, kept as one number, the time at which the bucket will be full again (GCRA): a caller
takes its token at once, and sleeps until the token is there. So callers are served in order, and nobody polls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Protocol

from arpo.errors import UserError
from arpo.tools.cache.redis_client import PREFIX, connect, describe

if TYPE_CHECKING:
    import redis

logger = logging.getLogger(__name__)

# The server's clock, so that nodes need not agree on the time. The key goes when the bucket is full: a full bucket and
# no bucket are the same.
_TAKE = """
local parts = redis.call('TIME')
local now = tonumber(parts[1]) + tonumber(parts[2]) / 1e6
local interval, burst = 1 / tonumber(ARGV[1]), tonumber(ARGV[2])
local full_at = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), now) + interval
redis.call('SET', KEYS[1], string.format('%.6f', full_at), 'PX', math.ceil((full_at - now) * 1000) + 1000)
return tostring(math.max(0, full_at - now - burst * interval))
"""


class RateLimit(Protocol):
    async def acquire(self) -> None:
        """Returns when the next call may start. Never raises for a limit that cannot be shared just now.

        A caller that is cancelled while it waits has used up its token; so let only one of many wait at a time.
        """
        ...


class LocalRateLimit:
    """A token bucket in this process: `burst` calls at once, then `calls_per_s`. No threads; one event loop."""

    def __init__(self, calls_per_s: float, burst: int = 1):
        _check(calls_per_s, burst)
        self.calls_per_s, self.burst = calls_per_s, burst
        self._full_at = 0.0  # time.monotonic

    def take(self) -> float:
        """Take a token; the seconds until it is there (0 for one that is there already)."""
        now, interval = time.monotonic(), 1 / self.calls_per_s
        self._full_at = max(self._full_at, now) + interval
        return max(0.0, self._full_at - now - self.burst * interval)

    async def acquire(self) -> None:
        await asyncio.sleep(self.take())


class RedisRateLimit:
    """The same bucket in a Redis server, shared by all who use the same `name` there."""

    def __init__(self, url: str, name: str, calls_per_s: float, burst: int = 1, *, setting: str = "tools"):
        """Raises UserError where the server cannot be reached; `setting` is the config field that it names."""
        _check(calls_per_s, burst)
        self.name, self.calls_per_s, self.burst, self.url = name, calls_per_s, burst, url
        self._client: redis.Redis = connect(url, setting)
        self._script = self._client.register_script(_TAKE)
        self._fallback: LocalRateLimit | None = None

    def take(self) -> float:
        """Take a token; the seconds until it is there. Raises redis.RedisError."""
        return float(self._script(keys=[f"{PREFIX}rate:{self.name}"], args=[repr(self.calls_per_s), self.burst]))

    async def acquire(self) -> None:
        """Where the server is lost, this process goes on by itself at the full rate, with one warning."""
        import redis

        if self._fallback is None:
            try:
                wait_s = await asyncio.to_thread(self.take)
            except redis.RedisError as error:
                logger.warning("%s: rate limit lost (%s); this process limits itself alone", describe(self.url), error)
                self._fallback = LocalRateLimit(self.calls_per_s, self.burst)
            else:
                await asyncio.sleep(wait_s)
                return
        await self._fallback.acquire()

    def close(self) -> None:
        self._client.close()


def _check(calls_per_s: float, burst: int) -> None:
    if not (calls_per_s > 0 and math.isfinite(calls_per_s)):
        raise UserError(f"the rate limit must be above 0 calls per second, not {calls_per_s:g}")
    if burst < 1:
        raise UserError(f"the burst of a rate limit must be at least 1 call, not {burst}")
