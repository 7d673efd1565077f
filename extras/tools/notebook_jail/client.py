"""The trainer's end of one session in the jail."""

from __future__ import annotations

import contextlib
import socket

from arpo.jail import wire
from arpo.jail.client import Sandbox
from arpo.jail.host_process import HostProcess
from arpo.jail.limits import MAX_FAMILY
from extras.tools.notebook_jail import COPY, GREET


def open_session(sandbox: Sandbox) -> SessionClient | wire.Reply:
    """Return a new session, or a sandbox_error. Never raises."""

    def opened(host: HostProcess) -> SessionClient:
        session = SessionClient(host.connect(sandbox.grace_s), sandbox.limits.wall_s, sandbox.grace_s)
        try:
            session.greet()
        except BaseException:
            session.close()
            raise
        return session

    return sandbox.attempt(opened)


class SessionClient:
    """A process in the jail. Variables stay from call to call. Only `close` is thread-safe.

    The methods raise OSError or EOFError if the session is lost. A lost session cannot be used again.
    """

    def __init__(self, conn: socket.socket, wall_s: float, grace_s: float):
        self._conn, self._wall_s, self._grace_s = conn, wall_s, grace_s

    def greet(self) -> None:
        """Wait until the session is ready."""
        wire.send_block(self._conn, GREET)
        wire.receive_exactly(self._conn, len(wire.HELLO))

    def run(self, code: str) -> wire.Reply:
        """Run code, and wait for the end. A family runs one cell at a time, so the clock starts after earlier calls."""
        self._conn.settimeout(MAX_FAMILY * (self._wall_s + self._grace_s))
        return wire.call(self._conn, code, self._wall_s + self._grace_s)

    def fork(self) -> SessionClient | None:
        """Return an exact copy, or None if the session cannot be copied."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._conn.settimeout(MAX_FAMILY * (self._wall_s + self._grace_s))
                wire.send_block(self._conn, COPY)
                socket.send_fds(self._conn, [b"1"], [theirs.fileno()])
            made = wire.receive_reply(self._conn).status == "ok"
        except BaseException:
            ours.close()
            raise
        if made:
            return SessionClient(ours, self._wall_s, self._grace_s)
        ours.close()
        return None

    def close(self) -> None:
        """End the session. Another thread may do so without waiting for a running call."""
        with contextlib.suppress(OSError):
            self._conn.shutdown(socket.SHUT_RDWR)
        self._conn.close()
