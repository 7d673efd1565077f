"""A rate limit in a Redis server, shared by the processes of several nodes."""

from __future__ import annotations

import asyncio
import logging
import time

from arpo.tools.http.policy import LocalRateLimit
from extras.redis.client import PREFIX, connect, describe

logger = logging.getLogger(__name__)

AGAIN_S = 60.0
# Uses the server's clock, so the clocks of the nodes may differ. The key expires after the reserved time.
_TAKE = """
local parts = redis.call('TIME')
local now = tonumber(parts[1]) + tonumber(parts[2]) / 1e6
local mine = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), now)
local after = mine + 1 / tonumber(ARGV[1])
redis.call('SET', KEYS[1], string.format('%.6f', after), 'PX', math.ceil((after - now) * 1000) + 1000)
return tostring(mine - now)
"""


class RedisRateLimit(LocalRateLimit):
    """A limit in a Redis server, shared by all processes with the same `name`."""

    def __init__(self, url: str, name: str, calls_per_s: float, *, setting: str = "tools"):
        """Raises UserError if the server cannot be reached; the message names `setting`, the config field."""
        super().__init__(calls_per_s)
        self.name, self.url = name, url
        self._client = connect(url, setting)
        self._script = self._client.register_script(_TAKE)
        self._again_s = 0.0  # by time.monotonic()

    def take(self) -> float:
        """Take the next turn; return the seconds until this turn. Raises redis.RedisError."""
        return float(self._script(keys=[f"{PREFIX}rate:{self.name}"], args=[repr(self.calls_per_s)]))

    async def acquire(self) -> None:
        """Wait until the next call may start. If the server is lost, the process uses a local limit for a minute."""
        import redis

        if time.monotonic() >= self._again_s:
            try:
                return await asyncio.sleep(await asyncio.to_thread(self.take))
            except redis.RedisError as error:
                logger.warning("%s: rate limit lost (%s); this process limits itself alone", describe(self.url), error)
                self._again_s = time.monotonic() + AGAIN_S
        await asyncio.sleep(super().take())
