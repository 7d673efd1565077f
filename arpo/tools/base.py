"""ToolRunner: runs tool calls in a background thread while the engine decodes. Tools are defined in interface.py."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from arpo.config.exits import wait_or_end
from arpo.errors import UserError, innermost
from arpo.tools.interface import Tool, ToolContext, ToolResult, answer
from arpo.tools.sessions import make_sessions

__all__ = ["MutedTool", "Tool", "ToolContext", "ToolResult", "ToolRunner"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
INTERNAL_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(asyncio.__file__).parent))
"""Code in these folders (arpo, asyncio) is not the user's, so an error names none of it."""
TELL_AFTER_S = 600.0
"""Seconds without the result of any call, after which a line of the log names the calls under way."""


@dataclass(frozen=True)
class MutedTool(Tool):
    """Answers every call with the same refusal. A control experiment: does the agent need the tool?"""

    tag: str

    async def run(self, argument: str) -> ToolResult:
        return ToolResult(f"Error: the {self.tag} tool is not available.", ok=False, error_kind="muted")


class ToolRunner:
    """Runs tool calls on an asyncio loop in a thread. `collect` returns finished calls without blocking.

    An exception of a tool, its SystemExit or CancelledError becomes a result of the kind `exception`, and counts as an
    infrastructure error. One exception costs its trajectory; many exceptions end a training (sampling/health.py).
    `collect` raises only UserError (the run cannot go on, for example after a refused key), KeyboardInterrupt, and the
    CancelledError of a call that was cancelled from outside.
    """

    def __init__(self, tools: dict[str, Tool], prices: Mapping[str, float] | None = None):
        """`prices`: price of a call, by tag, in the currency of tools.price_per_call."""
        self.tools = tools
        self.prices = prices or {}
        self._done: queue.SimpleQueue[tuple[object, str, ToolResult | BaseException]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="arpo-tools", daemon=True)
        self._thread.start()
        self._closing = threading.Event()
        self._pulse = threading.Event()
        threading.Thread(target=self._watch, name="arpo-tools-watch", daemon=True).start()
        self._logged: set[tuple[str, type]] = set()
        """(tool, type of exception) already logged."""
        self._running: Counter[str] = Counter()
        """Number of running calls, by tool."""
        self.num_pending = 0
        self._hear()
        # Identifies the rollout whose calls run. Results for another rollout are not returned by `collect`.
        self._rollout = object()
        self._parked: tuple[object, int, list] | None = None
        """Set by `park`: rollout, number of calls without a result, results received since."""
        self.sessions = make_sessions(tools, self._loop, self.prices)
        """Sessions of the trajectories, for tools with state."""

    def _serve(self) -> None:
        """Run the loop until `close` stops it."""
        while True:
            try:
                return self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # raised by a task that a tool started; `_run` reports it
                continue

    def _watch(self) -> None:
        """End the run if a tool blocks the loop for too long, since this blocks all other calls."""
        while not self._closing.wait(1.0):
            self._pulse = pulse = threading.Event()
            with contextlib.suppress(RuntimeError):  # raised once the loop is closed
                self._loop.call_soon_threadsafe(pulse.set)
                wait_or_end(pulse, self._blocker)

    def _blocker(self) -> str:
        """Return the function now blocking the loop, as the subject of the sentence in `wait_or_end`."""
        frame = sys._current_frames().get(self._thread.ident)
        blocking = None  # from the innermost frame outwards, to the outermost one of the user's code
        while frame is not None and not frame.f_code.co_filename.startswith(INTERNAL_FOLDERS):
            blocking = frame
            frame = frame.f_back
        code = blocking and blocking.f_code
        name = f"{Path(code.co_filename).name}:{blocking.f_lineno} {code.co_name}" if code else "a tool"
        return f"{name}, which blocks the loop of the tools (asyncio.to_thread would not),"

    def start(self, call_id: str, tag: str, argument: str, context: ToolContext | None = None) -> None:
        """Start a call. `collect` returns its result under `call_id`. A tool with sessions needs the context."""
        if not self.num_pending:
            self._hear()
        self.num_pending += 1
        call = self._run(self._rollout, call_id, self.tools[tag], argument, context)
        asyncio.run_coroutine_threadsafe(call, self._loop)

    async def _run(self, rollout: object, call_id: str, tool: Tool, argument: str, context: ToolContext | None) -> None:
        started = time.perf_counter()
        self._running[tool.tag] += 1
        try:
            if tool.tag in self.sessions.tools:
                result = await self.sessions.call(tool.tag, argument, context)
            else:
                result = await answer(tool, argument, context, price=self.prices.get(tool.tag, 0.0))
            if not result.seconds:
                result = replace(result, seconds=time.perf_counter() - started)
            self._done.put((rollout, call_id, result))
        except BaseException as raised:
            error = innermost(raised)
            is_of_tool = isinstance(error, Exception | SystemExit) and not isinstance(error, UserError)
            if isinstance(error, asyncio.CancelledError):
                is_of_tool = not asyncio.current_task().cancelling()
            if not is_of_tool:  # handed to the caller's thread
                self._done.put((rollout, call_id, error))
                return
            # One failed call must not end hours of work. A CancelledError of the tool's own library is a failure, too.
            if (tool.tag, type(error)) not in self._logged:  # a metric counts the others
                self._logged.add((tool.tag, type(error)))
                logger.warning("the %s tool raised an exception; its trajectory ends", tool.tag, exc_info=raised)
            text = f"Error: the {tool.tag} tool failed."
            seconds = time.perf_counter() - started
            failure = ToolResult(text, ok=False, seconds=seconds, error_kind="exception", infra_error=True)
            self._done.put((rollout, call_id, failure))
        finally:
            self._running[tool.tag] -= 1

    def collect(self, *, block: bool) -> list[tuple[str, ToolResult]]:
        """Return (call id, result) of all finished calls. `block`: wait for at least one, if any is pending."""
        finished: list[tuple[str, ToolResult]] = []
        while self.num_pending:
            try:
                rollout, call_id, result = self._done.get(block and not finished, timeout=TELL_AFTER_S)
            except queue.Empty:
                self._tell_if_silent()
                if not block or finished:
                    break
                continue
            if rollout is not self._rollout:
                if self._parked and rollout is self._parked[0]:
                    self._parked[2].append((rollout, call_id, result))
                continue
            self.num_pending -= 1
            self._hear()
            if isinstance(result, BaseException):
                raise result
            finished.append((call_id, result))
        return finished

    def _hear(self) -> None:
        self._heard_at = time.monotonic()
        self._num_told = 0

    def _tell_if_silent(self) -> None:
        # by the clock: a rank that hears others asks often, and never waits
        silence = time.monotonic() - self._heard_at
        num_due = int(silence / TELL_AFTER_S)
        if num_due > self._num_told:
            self._num_told = num_due
            logger.warning("no tool call has ended for %d min; under way: %s", silence / 60, dict(+self._running))

    def park(self) -> None:
        """Set running calls and sessions aside until `unpark`. They continue, separate from all new calls."""
        assert self._parked is None
        self._parked = self._rollout, self.num_pending, []
        self._rollout = object()
        self.num_pending = 0
        self.sessions.park()

    def unpark(self) -> None:
        """Return to the calls and sessions set aside by `park`, if any."""
        if self._parked is None:
            return
        assert not self.num_pending
        self.sessions.unpark()
        self._rollout, self.num_pending, kept = self._parked
        self._parked = None
        self._hear()
        for result in kept:
            self._done.put(result)

    def abandon(self) -> None:
        """Close all sessions, and forget running calls. Forgotten calls run to the end, but `collect` ignores them."""
        self._rollout = object()
        self.num_pending = 0
        self.sessions.end_all()

    def close(self) -> None:
        """Close the tools, then the loop. A failure to close a tool is only logged, since the work is done."""
        self.sessions.unpark()
        self.sessions.end_all()
        for tool in self.tools.values():
            try:
                asyncio.run_coroutine_threadsafe(tool.aclose(), self._loop).result(timeout=CLOSE_TIMEOUT_S)
            except Exception:
                logger.warning("the %s tool could not be closed", tool.tag, exc_info=True)
        self._closing.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():  # a loop that a tool still blocks cannot be closed
            self._loop.close()
        self._pulse.set()  # `_watch` may wait for the last pulse, and a stopped loop cannot set it
