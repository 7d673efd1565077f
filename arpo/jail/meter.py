"""Measures what the processes of a call use together, from /proc: limits on the sums are enforced by polling it."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
from dataclasses import dataclass

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROLLUP = "/proc/self/smaps_rollup"
"""A file that is there where the kernel tells what processes share."""

with socket.socket(socket.AF_UNIX) as _socket:
    BYTES_PER_SOCKET = _socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@dataclass(frozen=True)
class Process:
    """A process as it was seen last. Times are in clock ticks."""

    started: int
    """Time of its start: a number may be given again to another process."""
    parent: int
    ticks: int
    """CPU time, with `waited_ticks`."""
    waited_ticks: int
    """CPU time of the children that it has waited for, and of theirs."""
    num_tasks: int


class Meter:
    """Sums up memory, CPU time and tasks of one call over its processes, also of those that have ended."""

    def __init__(self, memory_limit: int, host_bytes: int):
        """memory_limit: bytes above which the sum must be right. host_bytes: private memory of the host, which its
        forks share; used where the kernel does not tell what is shared."""
        self.memory_limit, self.host_bytes = memory_limit, host_bytes
        self._last: dict[int, Process] = {}
        self._lost_ticks = 0
        """CPU time of processes that have ended and that nobody has waited for, as with SIGCHLD ignored."""

    def measure(self, pids: list[int]) -> tuple[int, float, int]:
        """Return memory (bytes; up to the limit an upper bound), CPU time (seconds) and number of tasks."""
        now = {pid: process for pid in pids if (process := _look_at(pid)) is not None}
        self._lost_ticks += lost_ticks(self._last, now)
        self._last = now
        ticks = self._lost_ticks + sum(process.ticks for process in now.values())
        return (
            self._memory(list(now)) + _socket_bytes(pids),
            ticks / CLOCK_TICKS_PER_S,
            sum(p.num_tasks for p in now.values()),
        )

    def _memory(self, pids: list[int]) -> int:
        """Forks share memory, and adding it up for each of them is quick but too much. Only where that is over the
        limit the kernel is asked for each one's share, which takes it a millisecond per 100 MB."""
        bounds = {pid: private_bytes(pid) for pid in pids}
        if sum(bounds.values()) <= self.memory_limit:
            return sum(bounds.values())
        shares = {pid: _share_bytes(pid) for pid in pids}
        untold = [bounds[pid] for pid, own in shares.items() if own is None]
        if os.path.exists(ROLLUP):  # code that hides its processes gets the discount once
            untold = [sum(untold)]
        return sum(own or 0 for own in shares.values()) + sum(max(0, bound - self.host_bytes) for bound in untold)


def lost_ticks(before: dict[int, Process], now: dict[int, Process]) -> int:
    """Return the CPU time of processes that have vanished and that is in no other process's sum.

    A parent that waits for a child takes over its time. So what has vanished below a process is lost as far as that
    process's `waited_ticks` have not risen by it.
    """
    stayed = {pid for pid, process in before.items() if pid in now and now[pid].started == process.started}
    vanished: dict[int | None, int] = {}
    """Ticks by the nearest ancestor that is still there; None: there is none."""
    for pid, process in before.items():
        if pid in stayed:
            continue
        heir: int | None = process.parent
        while heir is not None and heir not in stayed:
            heir = before[heir].parent if heir in before else None
        vanished[heir] = vanished.get(heir, 0) + process.ticks
    rises = {pid: now[pid].waited_ticks - before[pid].waited_ticks for pid in stayed}
    return sum(max(0, ticks - (0 if heir is None else rises[heir])) for heir, ticks in vanished.items())


def private_bytes(pid: int | str = "self") -> int:
    """Return the anonymous memory of a process, swapped out or not; 0 for one that is gone or about to be."""
    # its first thread may have ended, and shows no memory any more, while others go on
    return _anonymous(f"/proc/{pid}/status") or max(map(_anonymous, glob.glob(f"/proc/{pid}/task/*/status")), default=0)


def _share_bytes(pid: int) -> int | None:
    """Return the process's share of the anonymous memory that it has, alone or with others; 0 for one that is gone or
    about to be; None if the kernel does not tell."""
    told = os.path.exists(ROLLUP)
    for task in glob.glob(f"/proc/{pid}/task/*"):  # the first thread has none once it has ended
        try:
            return _bytes_of(f"{task}/smaps_rollup", ("Pss_Anon:", "SwapPss:"))
        except PermissionError:
            told = False
        except OSError:
            continue
    return 0 if told else None


def _anonymous(path: str) -> int:
    try:
        return _bytes_of(path, ("RssAnon:", "VmSwap:"))
    except OSError:  # it ended
        return 0


def _socket_bytes(pids: list[int]) -> int:
    """Return the most that the sockets of these processes may hold, which is the kernel's memory and in nobody's."""
    held = set()
    for path in (path for pid in pids for path in glob.glob(f"/proc/{pid}/task/*/fd/*")):
        with contextlib.suppress(OSError):  # closed since it was listed
            held.add(os.readlink(path))
    return BYTES_PER_SOCKET * sum(name.startswith("socket:") for name in held)


def _bytes_of(path: str, names: tuple[str, ...]) -> int:
    """Return the sum of those fields of a file in /proc. Raises OSError."""
    with open(path, errors="replace") as file:  # a process names itself
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(names))


def _look_at(pid: int) -> Process | None:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            fields = [int(field) for field in file.read().rsplit(")", 1)[1].split()[1:20]]
    except OSError:  # it ended since it was listed
        return None
    user, system, waited_user, waited_system = fields[10:14]
    return Process(
        started=fields[18],
        parent=fields[0],
        ticks=user + system + waited_user + waited_system,
        waited_ticks=waited_user + waited_system,
        num_tasks=fields[16],
    )
