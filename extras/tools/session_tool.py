"""The interface of a tool with state."""

from __future__ import annotations

from arpo.tools.interface import Tool
from extras.tools.session_records import CannotFork, SessionLost
from extras.tools.sessions import ToolSessions

__all__ = ["CannotFork", "SessionLost", "SessionTool"]


class SessionTool(Tool):
    """A tool that keeps a session per trajectory. A subclass has `tag`, `open`, `run`, `close`, and perhaps `fork`.

    A session begins with the trajectory's first call of the tool, and is closed when the trajectory ends, however it
    ends. Calls of a session come one after the other. A branch gets a session in the state at which it left its parent:
    by `fork`, where the tool has that method; else a new session answers the parent's calls again (a replay).

        async def open(self, context: ToolContext) -> Any
            Return a new session. The same context (but for the trajectory and the turn) must give the same state.
        async def run(self, argument: str, context: ToolContext, session: Any) -> ToolResult
        async def fork(self, session: Any, context: ToolContext) -> Any
            Return a copy that shares nothing with the session. Optional. Raises CannotFork for one that must be
            replayed instead. `context` is that of the session's newest call.
        async def close(self, session: Any) -> None
            Release the session, also in the middle of a call that is given up.
    """

    tag: str
    max_sessions = 0
    """Most sessions at a time, copies for branches included; 0 = no limit. Who needs one more waits."""
    may_branch = True
    """False: no trajectory branches while it has such a session."""
    session_name: str
    """Optional. Tools with the same one share a trajectory's session; their `open`, `fork` and `close` are alike."""

    make_sessions = ToolSessions
    """Makes those of all such tools of a runner."""

    async def aclose(self) -> None:
        """Release what outlives the sessions."""
