"""The trainer's handle on one host process: starts, calls and ends the host."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from dataclasses import asdict
from typing import Literal

from . import wire
from .cgroup import HostFolder
from .host import ENVIRONMENT
from .interpreter import PACKAGE_PARENT, Interpreter, own_interpreter
from .limits import CallLimits
from .trees import remove_tree

Tier = Literal["namespaces", "landlock", "none"]
BOOT = "import sys; sys.path[0] = sys.argv[1]; import jail.host; del sys.path[0]; jail.host.main(int(sys.argv[2]))"
"""First code of the host. Replaces the current folder in sys.path, since Python 3.9 has no option -P."""
START_TIMEOUT_S = 120.0
"""Seconds for a start: numpy and sympy may come from a cold network file system."""


class SandboxUnavailable(Exception):
    """Raised if no host can be started. The message is the reason."""


class HostProcess:
    """One jailed host. The host is spawned, since a fork would copy the trainer's memory, threads and files."""

    def __init__(
        self,
        tier: Tier,
        limits: CallLimits,
        interpreter: Interpreter | None = None,
        cgroup: HostFolder | None = None,
    ):
        """Start on `interpreter` (None: this Python). Raises SandboxUnavailable if the machine does not allow the tier.

        `cgroup`: the host's cgroup, which is removed with the host's files.
        """
        interpreter = interpreter or own_interpreter()
        self.base: str | None = None
        self._cgroup = cgroup
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No -E, which would ignore PYTHONHASHSEED. -S: otherwise a .pth file (of an editable install, for example)
        # could run code and show the repository. -s: no user site. -B: write no bytecode.
        command = [interpreter.executable, "-s", "-S", "-B", "-c", BOOT, PACKAGE_PARENT, str(theirs.fileno())]
        with tempfile.TemporaryFile() as stderr:
            self._process = subprocess.Popen(
                command,
                env=ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[theirs.fileno()] + ([cgroup.fd] if cgroup else []),
                start_new_session=True,
            )
            theirs.close()
            answer = self._introduce(tier, limits, interpreter)
            stderr.seek(0)
            last_words = stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        self.base = answer.get("base")
        if "has_proc" not in answer:
            self.kill()
            self.remove_files()
            raise SandboxUnavailable(str(answer.get("refused") or " ".join(last_words) or "the host died at its start"))
        self.has_proc: bool = answer["has_proc"]
        """True if the jail has a /proc. Without /proc, code may not start processes."""

    def _introduce(self, tier: Tier, limits: CallLimits, interpreter: Interpreter) -> dict:
        settings = {"tier": tier, "limits": asdict(limits), "trainer_pid": os.getpid(), **asdict(interpreter)}
        settings["cgroup_fd"] = self._cgroup.fd if self._cgroup else None
        self._control.settimeout(START_TIMEOUT_S)
        try:
            self._control.send(json.dumps(settings).encode())
            return json.loads(self._control.recv(1 << 16) or b"{}")
        except ConnectionError:
            return {}
        except TimeoutError:
            return {"refused": f"the host did not start within {START_TIMEOUT_S:g} s"}

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, code: str, wall_s: float, grace_s: float) -> wire.Reply:
        """Run code in a new fork of the host.

        Raises OSError (TimeoutError: the host or the call is stuck), EOFError if the fork was lost, and ValueError for
        an unreadable reply.
        """
        with self.connect(grace_s) as conn:
            return wire.call(conn, code, wall_s + grace_s)  # normally the supervisor answers earlier

    def connect(self, grace_s: float) -> socket.socket:
        """Return a connection to a waiting supervisor. Raises OSError."""
        ours, theirs = socket.socketpair()
        ours.settimeout(grace_s)
        try:
            with theirs:
                self._control.settimeout(grace_s)
                socket.send_fds(self._control, [b"call"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def is_gone(self, patience_s: float = 0.0) -> bool:
        """Return True if the process ends or closes its connection within `patience_s`."""
        if self._process.poll() is not None or self._control.fileno() < 0:
            return True
        poller = select.poll()
        poller.register(self._control, 0)
        return bool(poller.poll(1000 * patience_s))

    def kill(self) -> None:
        """End the process and all calls. The files of the calls stay until `remove_files`."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def remove_files(self) -> None:
        """Remove folder and cgroup of a killed host. Never raises. Many folders of calls can make this slow."""
        if self._cgroup:
            self._cgroup.remove()
        if self.base:
            remove_tree(self.base)
