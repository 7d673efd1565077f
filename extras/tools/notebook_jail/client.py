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
    """A process in the jail that keeps its variables from call to call. Not thread-safe, but for `close`.

    Its methods raise OSError or EOFError where the session is lost: it is of no use any more.
    """

    def __init__(self, conn: socket.socket, wall_s: float, grace_s: float):
        self._conn, self._wall_s, self._grace_s = conn, wall_s, grace_s

    def greet(self) -> None:
        """Wait until the session is there."""
        wire.send_block(self._conn, GREET)
        wire.receive_exactly(self._conn, len(wire.HELLO))

    def run(self, code: str) -> wire.Reply:
        """Run code, and wait for its end; the clock starts when the calls of sessions forked from it let it."""
        self._conn.settimeout(MAX_FAMILY * (self._wall_s + self._grace_s))
        return wire.call(self._conn, code, self._wall_s + self._grace_s)

    def fork(self) -> SessionClient | None:
        """Return an exact copy; None for a session of which there can be none."""
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
        """End the session, also from another thread that does not wait for a call of it."""
        with contextlib.suppress(OSError):
            self._conn.shutdown(socket.SHUT_RDWR)
        self._conn.close()
