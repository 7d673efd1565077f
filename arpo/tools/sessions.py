"""The interface between the rollout and the sessions of tools with state. A session is the state of one trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arpo.tools.interface import Tool, ToolContext, ToolResult

Owner = tuple[str, str]
"""A trajectory: (prompt_id, trajectory_id)."""


@dataclass(frozen=True)
class RecordedCall:
    """A call answered by a session."""

    turn: int
    tag: str
    argument: str
    answer: tuple[str, bool]
    """(text, ok) of the result."""
    history: str
    """Digest of the session's calls up to this one; see ToolContext.history."""


class Sessions:
    """The rollout calls these methods for its trajectories. A subclass keeps one session per trajectory.

    In this base class every method does nothing. All methods except `call` may be called from any thread, and take
    effect in the order of the calls.
    """

    tools: Mapping[str, Tool] = {}
    """Tools answered by `call`, by tag."""

    async def call(self, tag: str, argument: str, context: ToolContext | None) -> ToolResult:
        """Answer a call in the session of its trajectory."""
        raise KeyError(tag)

    def refusal(self, tags: Iterable[str]) -> str:
        """Return the first tool with a session that must not branch, or "". `tags`: tools of a trajectory."""
        return ""

    def name_of(self, tag: str) -> str:
        """Return the name of the sessions for a tool's calls."""
        return tag

    def mark(self, owner: Owner, turn: int) -> None:
        """Copy the current state, before the trajectory's next call. A branch may begin at this turn."""

    def fork(self, owner: Owner, turn: int, child: Owner) -> None:
        """Note a branch: `child` branched from `owner`, and shares all turns before `turn`."""

    def retain(self, prompt_id: str, places: Iterable[tuple[int, str]]) -> None:
        """Keep only the copies at these (turn, trajectory_id). Later branches begin only there."""

    def end(self, owner: Owner) -> None:
        """Close the sessions of an ended trajectory."""

    def forget(self, prompt_id: str) -> None:
        """Drop all copies of a prompt. All its trajectories have ended, so no branch can begin."""

    def end_all(self) -> None:
        """Cancel running calls, and close all sessions. Returns when all are closed."""

    def park(self) -> None:
        """Set all sessions aside until `unpark`. Their calls continue."""

    def unpark(self) -> None:
        """Return to the sessions set aside by `park`, if any."""

    def records(self) -> list[tuple[Owner, str, list[RecordedCall]]]:
        """Return (trajectory, name, answered calls) of all sessions. If sessions are parked, return only the parked."""
        return []

    def restore(self, owner: Owner, name: str, calls: list[RecordedCall]) -> None:
        """Give a trajectory a session. The session starts with a replay of these calls."""


class NoSessions(Sessions):
    """Used when no tool keeps a state."""


def make_sessions(
    tools: Mapping[str, Tool], loop: asyncio.AbstractEventLoop | None, prices: Mapping[str, float]
) -> Sessions:
    """Return the sessions made by the first tool with `make_sessions`; NoSessions if no tool has state.

    `loop` runs the calls. None: another process runs the sessions, and only `refusal` is used here.
    """
    makers = [tool.make_sessions for tool in tools.values() if tool.make_sessions]
    return makers[0](tools, loop, prices) if makers else NoSessions()
