"""When to send a request, when to repeat it, and when to leave a service alone. No network here.

Time and chance are arguments, so that a test of a minute's back-off takes a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from arpo.tools.http.rate_limit import RateLimit

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Time:
    """The clock of waits. Tests bring one whose sleep costs nothing."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True)
class HttpPolicy:
    """What a service may cost."""

    deadline_s: float = 30.0
    """Longest time of one call: waiting for its turn, all tries and the pauses between them."""
    max_concurrent: int = 32
    """Requests on their way at the same time, of this process."""
    max_tries: int = 4
    backoff_base_s: float = 0.5
    backoff_cap_s: float = 20.0
    retry_after_cap_s: float = 60.0
    """A service that asks for more patience than this gets this much."""
    max_body_bytes: int = 5_000_000
    """Of an answer, decompressed."""

    @property
    def try_s(self) -> float:
        """Longest time of one try: half of the deadline, so that a service that hangs once gets a second chance."""
        return self.deadline_s / 2

    def backoff_s(self, num_tries: int, rng: random.Random) -> float:
        """Pause after `num_tries` tries: full jitter, so that the calls that failed together do not return together."""
        return rng.uniform(0.0, min(self.backoff_cap_s, self.backoff_base_s * 2 ** (num_tries - 1)))

    def retry_after_s(self, header: str | None, wall_clock_s: float) -> float | None:
        """Seconds that a Retry-After header asks for, capped; None where there is none that makes sense.

        >>> HttpPolicy().retry_after_s("7", 0.0), HttpPolicy().retry_after_s("Thu, 01 Jan 1970 00:00:09 GMT", 5.0)
        (7.0, 4.0)
        """
        if header is None:
            return None
        try:
            seconds = float(header)
        except ValueError:
            try:
                seconds = parsedate_to_datetime(header).timestamp() - wall_clock_s
            except (ValueError, OverflowError):
                return None
        return None if math.isnan(seconds) else min(max(seconds, 0.0), self.retry_after_cap_s)


class Throttle:
    """When the next request may go: a rate limit, and what the service itself has asked for.

    A service that says "too many" gets the pause that it wants, and then half of the rate (at least an eighth), which
    recovers within a minute: a request takes two tokens, or up to eight, so that a shared limit slows down as well.
    """

    LOWEST_SHARE = 0.125
    RECOVERY_S = 60.0

    def __init__(self, limit: RateLimit | None, time_source: Time):
        self._limit, self._time = limit, time_source
        # One caller at a time waits for a token. So they come in order, and those who reach their deadline in the queue
        # have taken none: else a burst would use up the tokens of all calls after it.
        self._turn = asyncio.Lock()
        self._paused_until_s = -math.inf
        self._share, self._slowed_at_s = 1.0, -math.inf

    def share(self) -> float:
        """The current rate as a share of the limit."""
        waited_s = max(0.0, self._time.now() - self._slowed_at_s)
        return min(1.0, self._share + waited_s / self.RECOVERY_S)

    async def acquire(self) -> None:
        """Returns when one request may be sent."""
        async with self._turn:
            if self._limit is not None:
                for _ in range(round(1 / self.share())):
                    await self._limit.acquire()
            while (wait_s := self._paused_until_s - self._time.now()) > 0:
                await self._time.sleep(wait_s)

    def slow_down(self, pause_s: float) -> None:
        """The service had too much: no request for `pause_s`, fewer after that."""
        now_s = self._time.now()
        if now_s >= self._paused_until_s:  # once per pause: thirty answers "too many" at once are one message
            self._share, self._slowed_at_s = max(self.LOWEST_SHARE, self.share() / 2), now_s + pause_s
        self._paused_until_s = max(self._paused_until_s, now_s + pause_s)


class BreakerOpen(ConnectionError):
    """The service has failed too often; it is left alone for now, and this call was not sent."""


class CircuitBreaker:
    """Open after many failures; then one call at a time tries whether the service is back.

    closed -> open: at least `min_calls` calls in `window_s`, more than half of them failed
    open -> half-open: after `first_pause_s`; one call is let through
    half-open -> closed: it succeeded; -> open: it failed, and the pause doubles, up to `longest_pause_s`
    """

    def __init__(
        self,
        name: str,
        time_source: Time,
        *,
        min_calls: int = 20,
        window_s: float = 30.0,
        first_pause_s: float = 15.0,
        longest_pause_s: float = 300.0,
    ):
        self._name, self._time = name, time_source
        self._min_calls, self._window_s = min_calls, window_s
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._calls: deque[tuple[float, bool]] = deque()  # (when, did it succeed), oldest first
        self._pause_s = first_pause_s
        self._open_until_s: float | None = None
        self._is_probed = False

    @property
    def is_open(self) -> bool:
        """Half-open counts as open: only the probe may pass."""
        return self._open_until_s is not None

    def admit(self) -> bool:
        """Let a call begin; True where it is the probe of a half-open breaker. Raises BreakerOpen."""
        if not self.is_open:
            return False
        if self._is_probed or self._time.now() < self._open_until_s:
            self.refuse()
        self._is_probed = True
        return True

    def refuse(self) -> None:
        raise BreakerOpen(f"{self._name}: left alone after many failures")

    def record(self, succeeded: bool, *, is_probe: bool) -> None:
        """A call has ended. Calls that began before the breaker opened say nothing new about the service."""
        if is_probe:
            self._after_probe(succeeded)
        elif not self.is_open:
            now_s = self._time.now()
            self._calls.append((now_s, succeeded))
            while self._calls[0][0] < now_s - self._window_s:
                self._calls.popleft()
            num_failed = sum(not ok for _, ok in self._calls)
            if len(self._calls) >= self._min_calls and num_failed > len(self._calls) / 2:
                self._open(f"{num_failed} of {len(self._calls)} calls failed")

    def forget(self, *, is_probe: bool) -> None:
        """A call ended through no doing of the service (it was cancelled, or never sent)."""
        if is_probe:
            self._is_probed = False

    def _after_probe(self, succeeded: bool) -> None:
        self._is_probed = False
        if succeeded:
            self._calls.clear()
            self._pause_s, self._open_until_s = self._first_pause_s, None
            logger.warning("%s: is back", self._name)
        else:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
            self._open("still down")

    def _open(self, reason: str) -> None:
        self._calls.clear()
        self._open_until_s = self._time.now() + self._pause_s
        logger.warning("%s: %s; no calls for %g s", self._name, reason, self._pause_s)
