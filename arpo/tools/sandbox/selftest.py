"""The self-test of a host before its first call: jailed code tries to reach things of the trainer, the canaries."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile

from .host import ENVIRONMENT
from .wire import Reply

ADDED_BY_PYTHON = {"LC_CTYPE"}
PROBE = """
import glob, json, os, socket

def works(action):
    try:
        action()
    except OSError:
        return False
    return True

def overwrite(path):
    with open(path, "w") as file:
        file.write("overwritten")

names = set(os.environ)
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        with open(path, "rb") as file:
            names |= {entry.split(b"=")[0].decode() for entry in file.read().split(b"\\0") if entry}
    except OSError:
        pass
print(json.dumps({
    "environment": sorted(names),
    "read": works(lambda: open(PATH).close()),
    "network": works(lambda: socket.create_connection(("127.0.0.1", PORT), timeout=1)),
    "signal": works(lambda: os.kill(-1, 0)),
}))
_ = works(lambda: overwrite(PATH))  # may work on a file of that name in a private /tmp
"""


class Canaries:
    """A file that anybody may write and a port that anybody may call; they exist within a `with` block."""

    def __enter__(self) -> Canaries:
        self._secret = secrets.token_hex(16)
        fd, self._path = tempfile.mkstemp(prefix="arpo-canary-")
        with os.fdopen(fd, "w") as file:
            file.write(self._secret)
            os.fchmod(fd, 0o666)
        self._listener = socket.create_server(("127.0.0.1", 0))
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        os.unlink(self._path)

    @property
    def probe(self) -> str:
        """Code that tries to reach the canaries."""
        port = self._listener.getsockname()[1]
        return f"PATH = {self._path!r}\nPORT = {port}\n{PROBE}"

    def leaks(self, reply: Reply) -> list[str]:
        """Return what the probe's reply says it reached; empty for a tight jail."""
        if reply.status != "ok":
            return [f"{reply.status} {reply.stderr.strip()}"]
        found = json.loads(reply.stdout)
        foreign = set(found["environment"]) - set(ENVIRONMENT) - ADDED_BY_PYTHON
        leaks = [f"environment variable {name} is visible" for name in sorted(foreign)]
        leaks += [f"{what} of the trainer is possible" for what in ("read", "network", "signal") if found[what]]
        with open(self._path) as file:
            if file.read() != self._secret:
                leaks.append("a file of the trainer was changed")
        return leaks
