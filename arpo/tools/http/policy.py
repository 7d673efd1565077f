"""Decides when to send a request, when to repeat a request, and when to leave a service alone.

A rate limit is one number: the time at which the next call may start. A caller reserves this time at once, moves the
number on for the next caller, and sleeps. So callers are served in order, and none polls.
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Time:
    """The clock for all waiting. Tests use a clock with an instant sleep."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True)
class HttpPolicy:
    """Limits on waiting for one service and on requests to the service."""

    deadline_s: float = 30.0
    """Longest time of one call: waiting for its turn, all tries and the pauses between them."""
    max_concurrent: int = 32
    """Most simultaneous requests of this process."""
    max_tries: int = 4
    """Most requests per call."""
    backoff_base_s: float = 0.5
    backoff_cap_s: float = 20.0
    retry_after_cap_s: float = 60.0
    """Longest pause accepted from a Retry-After header."""
    max_body_bytes: int = 5_000_000
    """Largest accepted answer, decompressed."""

    @property
    def try_s(self) -> float:
        """Longest time of one try: half of the deadline. If the service hangs once, a second try still fits."""
        return self.deadline_s / 2

    def backoff_s(self, num_tries: int, rng: random.Random) -> float:
        """Return the pause after `num_tries` tries. Random, so that calls do not all return at the same time."""
        return rng.uniform(0.0, min(self.backoff_cap_s, self.backoff_base_s * 2 ** (num_tries - 1)))

    def retry_after_s(self, header: str | None, wall_clock_s: float) -> float | None:
        """Return the seconds in a Retry-After header, capped. Return None for a missing or unreadable header.

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


class LocalRateLimit:
    """A limit on the calls per second of this process. Works on one event loop."""

    def __init__(self, calls_per_s: float):
        self.calls_per_s = calls_per_s
        self._next_s = 0.0  # time.monotonic

    def take(self) -> float:
        """Reserve the next turn. Return the seconds until this turn comes."""
        now = time.monotonic()
        mine = max(self._next_s, now)
        self._next_s = mine + 1 / self.calls_per_s
        return mine - now

    async def acquire(self) -> None:
        """Return when the next call may start. A caller cancelled while waiting has used up its turn."""
        await asyncio.sleep(self.take())


class Throttle:
    """Decides when the next request may start, from a rate limit and from the service's own requests for a pause.

    After "too many requests" no request is sent for the pause named by the service. Then the rate is halved (at least
    1/8 of the limit stays), and recovers within a minute. At half the rate a request takes two tokens of the limit, at
    an eighth eight tokens; this also works for a limit shared by many processes.
    """

    LOWEST_SHARE, RECOVERY_S = 0.125, 60.0

    def __init__(self, limit: LocalRateLimit | None, time_source: Time):
        self._limit, self._time = limit, time_source
        # One caller at a time waits for a token. Callers that reach their deadline in the queue have then taken no
        # token. Without this lock a burst would use up the tokens of all later calls.
        self._turn = asyncio.Lock()
        self._paused_until_s = -math.inf
        self._share, self._slowed_at_s = 1.0, -math.inf

    def share(self) -> float:
        """Return the current rate as a share of the limit, from LOWEST_SHARE to 1."""
        waited_s = max(0.0, self._time.now() - self._slowed_at_s)
        return min(1.0, self._share + waited_s / self.RECOVERY_S)

    async def acquire(self) -> None:
        """Return when one request may be sent."""
        async with self._turn:
            if self._limit is not None:
                for _ in range(round(1 / self.share())):
                    await self._limit.acquire()
            while (wait_s := self._paused_until_s - self._time.now()) > 0:
                await self._time.sleep(wait_s)

    def slow_down(self, pause_s: float) -> None:
        """Send no request for `pause_s`, then fewer than before: the service said "too many requests"."""
        now_s = self._time.now()
        if now_s >= self._paused_until_s:  # once per pause: thirty "too many" answers to a burst halve the rate once
            self._share, self._slowed_at_s = max(self.LOWEST_SHARE, self.share() / 2), now_s + pause_s
        self._paused_until_s = max(self._paused_until_s, now_s + pause_s)


class BreakerOpen(ConnectionError):
    """The service has failed too often and gets no calls for now. This call was not sent."""


class CircuitBreaker:
    """Stops all calls after many failures (state "open"). Later, one call at a time tests whether the service is back.

    closed -> open: at least MIN_CALLS calls in WINDOW_S, more than half of them failed
    open -> half-open: after FIRST_PAUSE_S; one call, the probe, is let through
    half-open -> closed: the probe succeeded
    half-open -> open: the probe failed; the pause doubles, up to LONGEST_PAUSE_S
    """

    MIN_CALLS, WINDOW_S = 20, 30.0
    FIRST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 300.0

    def __init__(self, name: str, time_source: Time):
        self._name, self._time = name, time_source
        self._calls: deque[tuple[float, bool]] = deque()  # (when, did it succeed), oldest first
        self._pause_s = self.FIRST_PAUSE_S
        self._open_until_s: float | None = None
        self._is_probed = False

    @property
    def is_open(self) -> bool:
        """True while only a probe may pass."""
        return self._open_until_s is not None

    def admit(self) -> bool:
        """Let a call begin. Return True if the call is the probe. Raises BreakerOpen."""
        if not self.is_open:
            return False
        if self._is_probed or self._time.now() < self._open_until_s:
            self.refuse()
        self._is_probed = True
        return True

    def refuse(self) -> None:
        """Raises BreakerOpen."""
        raise BreakerOpen(f"{self._name}: left alone after many failures")

    def record(self, succeeded: bool, *, is_probe: bool) -> None:
        """Count a finished call. A call begun before the breaker opened is ignored: no new information."""
        self.forget(is_probe=is_probe)
        if is_probe and succeeded:
            self._calls.clear()
            self._pause_s, self._open_until_s = self.FIRST_PAUSE_S, None
            logger.warning("%s: is back", self._name)
        elif is_probe:
            self._pause_s = min(2 * self._pause_s, self.LONGEST_PAUSE_S)
            self._open("still down")
        elif not self.is_open:
            now_s = self._time.now()
            self._calls.append((now_s, succeeded))
            while self._calls[0][0] < now_s - self.WINDOW_S:
                self._calls.popleft()
            num_failed = sum(not ok for _, ok in self._calls)
            if len(self._calls) >= self.MIN_CALLS and num_failed > len(self._calls) / 2:
                self._open(f"{num_failed} of {len(self._calls)} calls failed")

    def forget(self, *, is_probe: bool) -> None:
        """End a call without counting: it was cancelled or never sent, and says nothing about the service."""
        if is_probe:
            self._is_probed = False

    def _open(self, reason: str) -> None:
        self._calls.clear()
        self._open_until_s = self._time.now() + self._pause_s
        logger.warning("%s: %s; no calls for %g s", self._name, reason, self._pause_s)
