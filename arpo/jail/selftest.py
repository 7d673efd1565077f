"""The self-test of a host before its first call: a jailed probe tries to reach a few things of the trainer."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable

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


def leaks_of(run: Callable[[str], Reply]) -> list[str]:
    """Run the probe. Return a message per success of the probe; [] for a tight jail. Raises the errors of `run`.

    The probe tries to read the trainer's environment variables, to read and overwrite a world-writable file, to
    connect to an open port, and to signal other processes.
    """
    secret = secrets.token_hex(16)
    with (
        tempfile.NamedTemporaryFile("w+", prefix="arpo-canary-") as canary,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        canary.write(secret)
        canary.flush()
        os.fchmod(canary.fileno(), 0o666)
        reply = run(f"PATH = {canary.name!r}\nPORT = {listener.getsockname()[1]}\n{PROBE}")
        canary.seek(0)
        was_changed = canary.read() != secret
    if reply.status != "ok":
        return [f"{reply.status} {reply.stderr.strip()}"]
    found = json.loads(reply.stdout)
    foreign = set(found["environment"]) - set(ENVIRONMENT) - ADDED_BY_PYTHON
    leaks = [f"environment variable {name} is visible" for name in sorted(foreign)]
    leaks += [f"{what} of the trainer is possible" for what in ("read", "network", "signal") if found[what]]
    return leaks + ["a file of the trainer was changed"] * was_changed
