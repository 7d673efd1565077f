"""Processes, seen from outside, and waiting for what others do."""

import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

LEAST_PORT = 10_000
WAIT_S = 120


def free_port() -> int:
    """A port that nobody uses, for a server that starts later.

    It is below those that the kernel gives to connections: one of thousands on a busy machine would have it by then.
    """
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(LEAST_PORT, max(first_of_connections, 2 * LEAST_PORT))
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # somebody does
            continue


def is_running(pid: int) -> bool:
    """Return whether there is such a process that has not ended. A zombie has, though nobody may have reaped it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:  # it is gone, maybe since the file was opened
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
