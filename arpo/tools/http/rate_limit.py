"""How many calls per second a tool may make: a limit of this process, or of all processes that share a Redis server.

Both are the same token bucket, kept as one number, the time at which the bucket will be full again (GCRA): a caller
takes its token at once, and sleeps until the token is there. So callers are served in order, and nobody polls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from arpo.errors import UserError
from arpo.tools.cache.redis_client import PREFIX, connect, describe

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


class LocalRateLimit:
    """A token bucket in this process: `burst` calls at once, then `calls_per_s`. For one event loop."""

    def __init__(self, calls_per_s: float, burst: int = 1):
        """Raises UserError for numbers with which no call could be made."""
        if not (calls_per_s > 0 and math.isfinite(calls_per_s)):
            raise UserError(f"the rate limit must be above 0 calls per second, not {calls_per_s:g}")
        if burst < 1:
            raise UserError(f"the burst of a rate limit must be at least 1 call, not {burst}")
        self.calls_per_s, self.burst = calls_per_s, burst
        self._full_at = 0.0  # time.monotonic

    def take(self) -> float:
        """Take a token; return the seconds until it is there (0 for one that is there already)."""
        now, interval = time.monotonic(), 1 / self.calls_per_s
        self._full_at = max(self._full_at, now) + interval
        return max(0.0, self._full_at - now - self.burst * interval)

    async def acquire(self) -> None:
        """Return when the next call may start.

        A caller that is cancelled while it waits has used up its token; so let only one of many wait at a time.
        """
        await asyncio.sleep(self.take())

    def close(self) -> None:
        """Nothing to release."""


class RedisRateLimit(LocalRateLimit):
    """A token bucket in a Redis server, shared by all processes that use the same `name` there."""

    def __init__(self, url: str, name: str, calls_per_s: float, burst: int = 1, *, setting: str = "tools"):
        """Raises UserError where the server cannot be reached; `setting` is the config field that it names."""
        super().__init__(calls_per_s, burst)
        self.name, self.url = name, url
        self._client = connect(url, setting)
        self._script = self._client.register_script(_TAKE)
        self._is_lost = False

    def take(self) -> float:
        """Take a token; return the seconds until it is there. Raises redis.RedisError."""
        return float(self._script(keys=[f"{PREFIX}rate:{self.name}"], args=[repr(self.calls_per_s), self.burst]))

    async def acquire(self) -> None:
        """Return when the next call may start. A process that loses the server warns once, and limits itself alone."""
        import redis

        if not self._is_lost:
            try:
                return await asyncio.sleep(await asyncio.to_thread(self.take))
            except redis.RedisError as error:
                logger.warning("%s: rate limit lost (%s); this process limits itself alone", describe(self.url), error)
                self._is_lost = True
        await asyncio.sleep(super().take())

    def close(self) -> None:
        self._client.close()
