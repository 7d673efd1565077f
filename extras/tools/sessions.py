"""The sessions of tools with state: one per trajectory and tool, and how a branch gets a session in its parent's state.

A session's name is the tag of its tool. Tools that share a session (those of a ToolSet) give it a common name.

A branch begins at the end of a tool result, but it is started later. By then its parent has decoded more, and may have
called the tool again: a rule of `branching.RULES` sees the first tokens of the next turn, the budget may delay a claim,
and AEPO's pilot ends first. So if a branching decision can follow and the tool can `fork`, a copy is made at the
result, before the parent's next call. It is kept until no branch can need it, and a branch takes it. Without a copy,
the branch opens a session at its first call and replays its parent's calls before the fork. This happens for tools
without `fork`, if a copy found no free place, and for retrospective selectors (they fork after all trajectories have
ended).

Limits (`max_sessions`) cannot cause a deadlock. A copy never waits: without a free place there is no copy. So at most
max_sessions - 1 copies exist. The remaining session belongs to a trajectory that grows and ends, and frees its place. A
trajectory with a session of another tool does not wait either: it exceeds the limit, and is not copied. The sessions of
a trajectory take their places one after the other, so none waits while another one gets a place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

from arpo.tools.base import CLOSE_TIMEOUT_S
from arpo.tools.interface import Tool, ToolContext, ToolResult, answer
from arpo.tools.sessions import Owner, RecordedCall, Sessions
from extras.tools.session_records import (
    Copy,
    Own,
    Session,
    SessionLost,
    StatefulTool,
    close_handle,
    recorded,
    replay,
    session_name,
    try_to_fork,
)

NUM_TRIES = 2
"""Tries of a call if its session is lost during the call."""
logger = logging.getLogger(__name__)


class ToolSessions(Sessions):
    """All sessions of a runner. Methods without a result return at once (except `end_all`)."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        loop: asyncio.AbstractEventLoop | None,
        prices: Mapping[str, float] | None = None,
    ):
        stateful = {tag: tool for tag, tool in tools.items() if tool.make_sessions}
        self._prices = prices or {}
        self.tools: dict[str, StatefulTool] = stateful if loop else {}
        self._by_name = {session_name(tool): tool for tool in self.tools.values()}
        """Session's name -> the tool that opens, copies and closes it."""
        self._unbranchable = {tag for tag, tool in stateful.items() if not getattr(tool, "may_branch", True)}
        self._loop = loop
        limits = {name: getattr(tool, "max_sessions", 0) for name, tool in self._by_name.items()}
        self._places = {name: asyncio.Semaphore(limit) for name, limit in limits.items() if limit}
        self._sessions: dict[Owner, Own] = {}
        self._copies: dict[str, dict[tuple[int, str], dict[str, Copy]]] = {}
        """prompt_id -> (turn, trajectory_id) -> session's name -> copy of the state before that turn."""
        self._calls: set[asyncio.Task] = set()
        self._tasks: set[asyncio.Task] = set()
        self._told: set[tuple[str, type]] = set()
        self._parked: tuple[dict, dict, set, set] | None = None

    def refusal(self, tags: Iterable[str]) -> str:
        """Return the first of these called tools whose session forbids branching; "" for none."""
        return next((tag for tag in tags if tag in self._unbranchable), "") if self._unbranchable else ""

    def name_of(self, tag: str) -> str:
        return session_name(self.tools[tag]) if tag in self.tools else tag

    # ---- calls from the rollout's thread

    def mark(self, owner: Owner, turn: int) -> None:
        self._post(self._mark, owner, turn)

    def fork(self, owner: Owner, turn: int, child: Owner) -> None:
        self._post(self._fork, owner, turn, child)

    def retain(self, prompt_id: str, places: Iterable[tuple[int, str]]) -> None:
        if self.tools:
            self._post(self._retain, prompt_id, set(places))

    def end(self, owner: Owner) -> None:
        self._post(self._end, owner)

    def forget(self, prompt_id: str) -> None:
        self._post(self._forget, prompt_id)

    def end_all(self) -> None:
        if self.tools and self._loop.is_running():
            try:
                asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result(timeout=CLOSE_TIMEOUT_S)
            except TimeoutError:
                logger.warning("sessions of %s are still open after %g s", ", ".join(self.tools), CLOSE_TIMEOUT_S)

    def park(self) -> None:
        self._run(self._park)

    def unpark(self) -> None:
        self._run(self._unpark)

    def records(self) -> list[tuple[Owner, str, list[RecordedCall]]]:
        return self._run(self._records) or []

    def restore(self, owner: Owner, name: str, calls: list[RecordedCall]) -> None:
        self._post(self._restore, owner, name, calls)

    def _run(self, work: Callable[[], Coroutine]) -> Any:
        """Run short work on the loop, and return its result; None without a stateful tool."""
        if self.tools and self._loop.is_running():
            return asyncio.run_coroutine_threadsafe(work(), self._loop).result()
        return None

    def _post(self, action: Any, *arguments: Any) -> None:
        if self.tools:
            self._loop.call_soon_threadsafe(action, *arguments)

    # ---- on the loop: a call

    async def call(self, tag: str, argument: str, context: ToolContext | None) -> ToolResult:
        """Answer a call in its trajectory's session. Calls of a session are answered in the order of their start."""
        assert context is not None, f"the {tag} tool has sessions, and this call belongs to no trajectory"
        tool = self.tools[tag]
        name = session_name(tool)
        own = self._sessions.setdefault(context.owner, Own())
        session = own.setdefault(name, Session())
        task = asyncio.current_task()
        self._calls.add(task)
        try:
            async with session.lock:
                try:
                    return await self._answer(tool, own, argument, context)
                finally:
                    # parked during the call: give the place to a trajectory that waits
                    is_parked = self._parked is not None and any(own is parked for parked in self._parked[0].values())
                    if is_parked and self._is_wanted(name):
                        await self._close(tool, session)
        finally:
            self._calls.discard(task)

    async def _answer(self, tool: StatefulTool, own: Own, argument: str, context: ToolContext) -> ToolResult:
        session = own[session_name(tool)]
        before = ToolResult("", ok=True)
        for tries_left in reversed(range(NUM_TRIES)):
            try:
                if not session.is_open:
                    before = await self._begin(tool, own, context)
                    if before.infra_error:
                        return before
                session.context = replace(context, history=session.history)
                result = await answer(
                    tool,
                    argument,
                    session.context,
                    session=session.handle,
                    price=self._prices.get(tool.tag, 0.0),
                )
                break
            except SessionLost:
                await self._close(tool, session)
                if not tries_left:
                    raise
        if not result.infra_error:
            session.calls.append(recorded(tool, session, context.turn, argument, result))
        return replace(
            result, replayed=before.replayed, replay_mismatches=before.replay_mismatches, cost=result.cost + before.cost
        )

    async def _begin(self, tool: StatefulTool, own: Own, context: ToolContext) -> ToolResult:
        """Give a session its state: from its copy, or from a new session that replays its calls."""
        session = own[session_name(tool)]
        source = session.source
        handle = await asyncio.shield(source.task) if source else None
        session.source = None
        if handle is not None and source.claims == 1:
            # no other branch needs the copy: take it as it is, with its place
            source.claims = 0
            session.handle = handle
            session.has_place = source.has_place
            session.is_open = True
            return ToolResult("", ok=True)
        try:
            session.has_place = await self._take_place(session_name(tool), own)
            if handle is not None:
                session.handle = await self._finished(tool, try_to_fork(tool, handle, context, self._told))
                session.is_open = session.handle is not None
        finally:
            self._release(source)
        if session.is_open:
            return ToolResult("", ok=True)
        session.handle = await self._finished(tool, tool.open(replace(context, history="")))
        session.is_open = True
        return await replay(self.tools, session, context, self._prices)

    async def _finished(self, tool: StatefulTool, making: Coroutine) -> Any | None:
        """Return the new handle. If the call is cancelled meanwhile, the handle is closed as soon as it exists."""
        task = self._spawn(making)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._spawn(self._close_made(tool, task))
            raise

    async def _close_made(self, tool: StatefulTool, task: asyncio.Task) -> None:
        [handle] = await asyncio.gather(task, return_exceptions=True)
        if handle is not None and not isinstance(handle, BaseException):
            await close_handle(tool, handle)

    # ---- on the loop: places, copies, ends

    async def _take_place(self, name: str, own: Own) -> bool:
        """Wait for a place under the tool's limit. Return True if one was taken; it must be given back."""
        places = self._places.get(name)
        if places is None:
            return False
        async with own.taking:
            if places.locked() and any(s.has_place or s.source for other, s in own.items() if other != name):
                return False
            if self._is_wanted(name):
                for session in [s[name] for s in self._parked[0].values() if name in s and s[name].has_place]:
                    # its next call replays
                    self._spawn(self._finish(self._by_name[name], session))
            await places.acquire()
            return True

    def _is_wanted(self, name: str) -> bool:
        """True if parked sessions must give up their places: their trajectories are paused while others wait."""
        return self._parked is not None and name in self._places and self._places[name].locked()

    def _give_place_back(self, name: str, holder: Session | Copy) -> None:
        if holder.has_place:
            holder.has_place = False
            self._places[name].release()

    async def _make_copy(self, copy: Copy, session: Session) -> Any | None:
        name = session_name(copy.tool)
        places = self._places.get(name)
        async with session.lock:
            if not session.is_open or (places and (places.locked() or not session.has_place)):
                return None
            if places:
                # does not wait: a place is free
                copy.has_place = await places.acquire()
            handle = await try_to_fork(copy.tool, session.handle, session.context, self._told)
            if handle is None:
                self._give_place_back(name, copy)
            return handle

    def _mark(self, owner: Owner, turn: int) -> None:
        copies = {}
        for name, session in self._sessions.get(owner, {}).items():
            tool = self._by_name[name]
            if tool.tag in self._unbranchable or not hasattr(tool, "fork") or not session.calls:
                continue
            copy = session.source or session.newest_copy
            if copy is None or not copy.claims or copy.num_calls != len(session.calls):
                copy = session.newest_copy = Copy(tool, len(session.calls))
                copy.task = self._spawn(self._make_copy(copy, session))
            copy.claims += 1
            copies[name] = copy
        self._copies.setdefault(owner[0], {})[turn, owner[1]] = copies

    def _fork(self, owner: Owner, turn: int, child: Owner) -> None:
        copies = self._copies.get(owner[0], {}).get((turn, owner[1]), {})
        for name, session in self._sessions.get(owner, {}).items():
            if calls := [call for call in session.calls if call.turn < turn]:
                source = copies.get(name)
                if source:
                    source.claims += 1
                self._sessions.setdefault(child, Own())[name] = Session(calls, source)

    def _retain(self, prompt_id: str, places: set[tuple[int, str]]) -> None:
        copies = self._copies.get(prompt_id, {})
        for place in copies.keys() - places:
            for copy in copies.pop(place).values():
                self._release(copy)

    def _release(self, copy: Copy | None) -> None:
        if copy:
            copy.claims -= 1
            if not copy.claims:
                self._spawn(self._drop(copy))

    def _end(self, owner: Owner) -> None:
        for name, session in self._sessions.get(owner, {}).items():
            self._spawn(self._finish(self._by_name[name], session))

    def _forget(self, prompt_id: str) -> None:
        self._retain(prompt_id, set())
        self._copies.pop(prompt_id, None)
        for owner in [owner for owner in self._sessions if owner[0] == prompt_id]:
            self._end(owner)
            del self._sessions[owner]

    async def _drop(self, copy: Copy) -> None:
        handle = await copy.task
        if handle is not None:
            await close_handle(copy.tool, handle)
            self._give_place_back(session_name(copy.tool), copy)

    async def _finish(self, tool: StatefulTool, session: Session) -> None:
        async with session.lock:
            source = session.source
            session.source = None
            self._release(source)
            await self._close(tool, session)

    async def _close(self, tool: StatefulTool, session: Session) -> None:
        if session.is_open:
            session.is_open = False
            await close_handle(tool, session.handle)
        session.handle = None
        self._give_place_back(session_name(tool), session)

    async def _park(self) -> None:
        self._parked = (self._sessions, self._copies, self._calls, self._tasks)
        self._sessions = {}
        self._copies = {}
        self._calls = set()
        self._tasks = set()

    async def _unpark(self) -> None:
        if self._parked:
            closing = self._tasks
            self._sessions, self._copies, calls, self._tasks = self._parked
            self._parked = None
            self._calls = {call for call in calls if not call.done()}
            # tasks that still close sessions of the rollout in between
            if closing:
                self._spawn(asyncio.wait(closing))

    async def _records(self) -> list[tuple[Owner, str, list[RecordedCall]]]:
        sessions = self._parked[0] if self._parked else self._sessions
        return [(owner, name, list(s.calls)) for owner, own in sessions.items() for name, s in own.items()]

    def _restore(self, owner: Owner, name: str, calls: list[RecordedCall]) -> None:
        if name in self._by_name:
            self._sessions.setdefault(owner, Own())[name] = Session(calls)

    def _spawn(self, work: Coroutine) -> asyncio.Task:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _end_all(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for prompt_id in {owner[0] for owner in self._sessions} | self._copies.keys():
            self._forget(prompt_id)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
