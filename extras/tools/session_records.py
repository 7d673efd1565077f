"""The records of a trajectory's session in `ToolSessions`: the calls, and the copies waiting for branches."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from arpo.tools.interface import ToolContext, ToolResult, answer
from arpo.tools.sessions import RecordedCall

logger = logging.getLogger(__name__)


class CannotFork(Exception):
    """Raised by `fork` if the session cannot be copied exactly: the branch replays its calls."""


class SessionLost(Exception):
    """Raised by `run` if an infrastructure error destroyed the session: a new session replays the calls."""


class StatefulTool(Protocol):
    """The methods of a `SessionTool` (session_tool.py) for `ToolSessions`. `fork` is optional."""

    tag: str

    async def open(self, context: ToolContext) -> Any: ...
    async def run(self, argument: str, context: ToolContext, session: Any) -> ToolResult: ...
    async def fork(self, session: Any, context: ToolContext) -> Any: ...
    async def close(self, session: Any) -> None: ...


def session_name(tool: StatefulTool) -> str:
    """Return the name of the tool's sessions: its tag, unless it shares them with other tools."""
    return getattr(tool, "session_name", tool.tag)


@dataclass
class Copy:
    """A session's copy, in the state after some call."""

    tool: StatefulTool
    num_calls: int
    task: asyncio.Task | None = None
    """Returns the handle, or None if no copy could be made."""
    claims: int = 0
    """Number of possible users of the copy: branches without a call so far, and an open branching decision."""
    has_place: bool = False


@dataclass
class Session:
    """A trajectory's session of one tool, or of several tools with a common session."""

    calls: list[RecordedCall] = field(default_factory=list)
    """All calls leading to the session's state, including the parent's calls before the fork."""
    source: Copy | None = None
    """The copy to start from; None if the session has started, or starts with `open`."""
    handle: Any = None
    is_open: bool = False
    has_place: bool = False
    context: ToolContext | None = None
    """Of the newest call."""
    newest_copy: Copy | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def history(self) -> str:
        return self.calls[-1].history if self.calls else ""


class Own(dict[str, Session]):
    """The sessions of a trajectory, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.taking = asyncio.Lock()
        """Held by the session that takes a place."""


async def close_handle(tool: StatefulTool, handle: Any) -> None:
    """Close a session of the tool. An error is logged, not raised."""
    try:
        await tool.close(handle)
    except Exception:
        logger.warning("a session of the %s tool could not be closed", tool.tag, exc_info=True)


async def try_to_fork(tool: StatefulTool, handle: Any, context: ToolContext, told: set) -> Any | None:
    """Return a copy of a session, or None if it must be replayed. Logs the first error of each kind (`told`)."""
    try:
        return await tool.fork(handle, context)
    except CannotFork:
        return None
    except Exception as error:  # a branch can still replay
        if (tool.tag, type(error)) not in told:
            told.add((tool.tag, type(error)))
            text = "a session of the %s tool could not be copied; branches replay it"
            logger.warning(text, tool.tag, exc_info=error)
        return None


def recorded(tool: StatefulTool, session: Session, turn: int, argument: str, result: ToolResult) -> RecordedCall:
    """Return the record of the session's next call."""
    call = argument if session_name(tool) == tool.tag else f"{tool.tag} {argument}"
    data = f"{session.history} {call}".encode("utf-8", "surrogatepass")
    history = hashlib.blake2b(data, digest_size=16).hexdigest()
    return RecordedCall(turn, tool.tag, argument, (result.text, result.ok), history)


async def replay(
    tools: Mapping[str, StatefulTool], session: Session, context: ToolContext, prices: Mapping[str, float]
) -> ToolResult:
    """Run the session's recorded calls again.

    Returns their number, the number of different answers, and the cost; or the result of an infrastructure error.
    """
    calls = session.calls
    session.calls = []
    mismatches = 0
    cost = 0.0
    try:
        for call in calls:
            at = replace(context, turn=call.turn, history=session.history)
            price = prices.get(call.tag, 0.0)
            result = await answer(tools[call.tag], call.argument, at, session=session.handle, price=price)
            if result.infra_error:
                return result
            mismatches += (result.text, result.ok) != call.answer
            cost += result.cost
            session.calls.append(call)
    finally:
        session.calls = calls  # also for another try
    return ToolResult("", ok=True, cost=cost, replayed=len(calls), replay_mismatches=mismatches)
