"""Watching processes from outside."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended. A zombie has, though nobody may have reaped it yet."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
