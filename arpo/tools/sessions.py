"""The sessions of tools that keep a state for each trajectory, as the rollout drives them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arpo.tools.interface import Tool, ToolContext, ToolResult

Owner = tuple[str, str]
"""A trajectory: (prompt_id, trajectory_id)."""


@dataclass(frozen=True)
class RecordedCall:
    """A call that a session has answered."""

    turn: int
    tag: str
    argument: str
    answer: tuple[str, bool]
    """(text, ok) of the result."""
    history: str
    """Digest of the session's calls up to this one; see ToolContext.history."""


class Sessions:
    """What the rollout tells of its trajectories. A subclass keeps a session for each; here every method does nothing.

    All methods but `call` may be called from any thread, and take effect in the order of the calls.
    """

    tools: Mapping[str, Tool] = {}
    """Tools whose calls `call` answers, by tag."""

    async def call(self, tag: str, argument: str, context: ToolContext | None) -> ToolResult:
        """Answer a call in the session of its trajectory."""
        raise KeyError(tag)

    def refusal(self, tags: Iterable[str]) -> str:
        """Return the first of these tools whose session must not branch; "" for none. `tags`: tools of a trajectory."""
        return ""

    def name_of(self, tag: str) -> str:
        """Return the name of the sessions that answer a tool's calls."""
        return tag

    def mark(self, owner: Owner, turn: int) -> None:
        """Keep a copy of the current state, before the trajectory's next call: a branch may begin at this turn."""

    def fork(self, owner: Owner, turn: int, child: Owner) -> None:
        """Note that `child` has branched from `owner`, and shares all turns before this one."""

    def retain(self, prompt_id: str, places: Iterable[tuple[int, str]]) -> None:
        """Drop all copies but those at these (turn, trajectory_id): only there can branches still begin."""

    def end(self, owner: Owner) -> None:
        """Close the sessions of a trajectory that has ended."""

    def forget(self, prompt_id: str) -> None:
        """Drop all copies of a prompt: its trajectories have ended, and none can branch any more."""

    def end_all(self) -> None:
        """Cancel running calls, and close all sessions. Blocks until that is done."""

    def park(self) -> None:
        """Set all sessions aside until `unpark`. Their calls continue."""

    def unpark(self) -> None:
        """Take up the sessions that `park` has set aside, if any."""

    def records(self) -> list[tuple[Owner, str, list[RecordedCall]]]:
        """Return (trajectory, name, answered calls) of all sessions; of the parked ones, if any are parked."""
        return []

    def restore(self, owner: Owner, name: str, calls: list[RecordedCall]) -> None:
        """Give a trajectory a session. It starts with a replay of these calls."""


class NoSessions(Sessions):
    """Used when no tool keeps a state."""


def make_sessions(
    tools: Mapping[str, Tool], loop: asyncio.AbstractEventLoop | None, prices: Mapping[str, float]
) -> Sessions:
    """Return the sessions that a tool with state brings (its `make_sessions`), or NoSessions.

    `loop` runs the calls. None: another process has the sessions, and these only answer `refusal`.
    """
    makers = [tool.make_sessions for tool in tools.values() if tool.make_sessions]
    return makers[0](tools, loop, prices) if makers else NoSessions()
