"""A rate limit in a Redis server, which the processes of several nodes share."""

from __future__ import annotations

import asyncio
import logging
import time

from arpo.tools.http.policy import LocalRateLimit
from extras.redis.client import PREFIX, connect, describe

logger = logging.getLogger(__name__)

AGAIN_S = 60.0
# The server's clock, so that nodes need not agree on the time. The key goes when that time has passed.
_TAKE = """
local parts = redis.call('TIME')
local now = tonumber(parts[1]) + tonumber(parts[2]) / 1e6
local mine = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), now)
local after = mine + 1 / tonumber(ARGV[1])
redis.call('SET', KEYS[1], string.format('%.6f', after), 'PX', math.ceil((after - now) * 1000) + 1000)
return tostring(mine - now)
"""


class RedisRateLimit(LocalRateLimit):
    """A limit in a Redis server, shared by all processes that use the same `name` there."""

    def __init__(self, url: str, name: str, calls_per_s: float, *, setting: str = "tools"):
        """Raises UserError where the server cannot be reached; `setting` is the config field that it names."""
        super().__init__(calls_per_s)
        self.name, self.url = name, url
        self._client = connect(url, setting)
        self._script = self._client.register_script(_TAKE)
        self._again_s = 0.0  # by time.monotonic()

    def take(self) -> float:
        """Take the next turn; return the seconds until it comes. Raises redis.RedisError."""
        return float(self._script(keys=[f"{PREFIX}rate:{self.name}"], args=[repr(self.calls_per_s)]))

    async def acquire(self) -> None:
        """Return when the next call may start. A process that loses the server limits itself alone for a minute."""
        import redis

        if time.monotonic() >= self._again_s:
            try:
                return await asyncio.sleep(await asyncio.to_thread(self.take))
            except redis.RedisError as error:
                logger.warning("%s: rate limit lost (%s); this process limits itself alone", describe(self.url), error)
                self._again_s = time.monotonic() + AGAIN_S
        await asyncio.sleep(super().take())
