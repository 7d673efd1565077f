"""The interface of a tool with state."""

from __future__ import annotations

from arpo.tools.interface import Tool
from extras.tools.session_records import CannotFork, SessionLost
from extras.tools.sessions import ToolSessions

__all__ = ["CannotFork", "SessionLost", "SessionTool"]


class SessionTool(Tool):
    """A tool that keeps a session per trajectory. A subclass has `tag`, `open`, `run`, `close`, and perhaps `fork`.

    A session begins with the trajectory's first call of the tool, and is closed when the trajectory ends, for whatever
    reason. Calls of a session come one after the other. A branch gets a session in its parent's state at the fork: by
    `fork`, if the tool has this method; else a new session answers the parent's calls again (a replay).

        async def open(self, context: ToolContext) -> Any
            Return a new session. The same context (but for the trajectory and the turn) must give the same state.
        async def run(self, argument: str, context: ToolContext, session: Any) -> ToolResult
        async def fork(self, session: Any, context: ToolContext) -> Any
            Return a copy that shares nothing with the session. Optional. Raises CannotFork if the session must be
            replayed instead. `context`: of the session's newest call.
        async def close(self, session: Any) -> None
            Release the session, also in the middle of a cancelled call.
    """

    tag: str
    max_sessions = 0
    """Largest number of sessions at a time, with the copies for branches; 0 = no limit. Further sessions wait."""
    may_branch = True
    """False: a trajectory with such a session does not branch."""
    session_name: str
    """Optional. Tools with the same name share a trajectory's session. Their `open`, `fork` and `close` are alike."""

    make_sessions = ToolSessions
    """Makes the sessions of all stateful tools of a runner."""

    async def aclose(self) -> None:
        """Release resources that outlive the sessions."""
