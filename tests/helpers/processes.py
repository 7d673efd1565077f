"""Processes, seen from outside."""

import socket
from pathlib import Path


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended. A zombie has, though nobody may have reaped it yet."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
