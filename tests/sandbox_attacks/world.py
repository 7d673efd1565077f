"""What the attacks are after: a secret in a file and in the environment, listeners, a process of the same user."""

import os
import platform
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from arpo.jail import syscall_table
from sandbox_attacks.attack import MARKER, REPO


class World:
    def __init__(self) -> None:
        self.secret = secrets.token_hex(16)
        os.environ["ARPO_TEST_SECRET"] = self.secret
        # not below /tmp: in tier A a call has a /tmp of its own, and what it does there would look like harm
        self.folder = Path(tempfile.mkdtemp(prefix="arpo-world-", dir="/var/tmp"))
        self.folder.chmod(0o777)
        self.file = self.folder / "answers.txt"
        self.file.write_text(self.secret)
        self.file.chmod(0o666)
        self.victim = subprocess.Popen(["sleep", "86400"])
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.abstract = f"\0arpo-{self.secret[:8]}"
        self.inboxes = []
        for address in (str(self.folder / "socket"), self.abstract):
            inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            inbox.bind(address)
            self.inboxes.append(inbox)
        (self.folder / "socket").chmod(0o777)
        for sock in (self.tcp, *self.inboxes):
            sock.setblocking(False)
        self.initial_state = self._state()

    def _state(self) -> list[tuple[str, int, int, float]]:
        """Path, mode, owner and modification time of the folder and all in it."""
        found = [(path, path.lstat()) for path in (self.folder, *self.folder.iterdir())]
        return sorted((str(path), status.st_mode, status.st_uid, status.st_mtime) for path, status in found)

    def as_code(self) -> str:
        """The line that tells an attack where everything is."""
        machine = platform.machine()
        calls = syscall_table.numbers(syscall_table.ADMINISTRATION, machine)
        calls |= syscall_table.numbers(syscall_table.OUTSIDE_THE_LIMITS, machine)
        world = {
            "secret": str(self.file),
            "folder": str(self.folder),
            "repo": str(REPO),
            "victim": self.victim.pid,
            "port": self.tcp.getsockname()[1],
            "unix": str(self.folder / "socket"),
            "abstract": self.abstract,
            "syscalls": calls,
            "exit": {"x86_64": 60, "aarch64": 93}[machine],
            **{name: syscall_table.numbers(syscall_table.SINGLE, machine)[name] for name in ("clone", "setrlimit")},
        }
        return f"WORLD = {world!r}\n"

    def harm(self) -> list[str]:
        """What has happened to it."""
        harm = []
        if self.victim.poll() is not None:
            harm.append("the user's other process was killed")
        if self.file.read_text() != self.secret or self._state() != self.initial_state:
            harm.append(f"files were changed: {self._state()}")
        for sock in (self.tcp, *self.inboxes):
            try:
                message = sock.accept()[1] if sock is self.tcp else sock.recv(9)
            except BlockingIOError:
                continue
            harm.append(f"somebody got through to {sock.getsockname()}: {message!r}")
        return harm

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for sock in (self.tcp, *self.inboxes):
            sock.close()
        shutil.rmtree(self.folder)


def survivors() -> list[str]:
    """Command lines of daemons that an attack started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it ended since it was listed
            continue
        if MARKER.encode() in command:
            found.append(command.decode(errors="replace"))
    return found
