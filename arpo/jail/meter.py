"""Measures the total use of a call's processes, from /proc. The supervisor polls these sums to enforce limits."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
from dataclasses import dataclass

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
ROLLUP = "/proc/self/smaps_rollup"
"""File present on kernels that report shared memory."""

with socket.socket(socket.AF_UNIX) as _socket:
    BYTES_PER_SOCKET = _socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


@dataclass(frozen=True)
class Process:
    """The last known state of a process. Times are in clock ticks."""

    started: int
    """Start time. A later process with the same pid has another start time."""
    parent: int
    ticks: int
    """CPU time, including `waited_ticks`."""
    waited_ticks: int
    """CPU time of ended children, added by the kernel when the process waits for the child. Descendants included."""
    num_tasks: int


class Meter:
    """Sums up memory, CPU time and tasks of one call over its processes. The CPU time includes ended processes."""

    def __init__(self, memory_limit: int, host_bytes: int):
        """`memory_limit`: bytes above which the sum must be exact. `host_bytes`: private memory of the host. All forks
        share it; used if the kernel does not report shared memory."""
        self.memory_limit, self.host_bytes = memory_limit, host_bytes
        self._last: dict[int, Process] = {}
        self._lost_ticks = 0
        """CPU time of ended processes without a waiting parent (SIGCHLD ignored, for example)."""

    def measure(self, pids: list[int]) -> tuple[int, float, int]:
        """Return memory (bytes; below the limit only an upper bound), CPU time (seconds) and number of tasks."""
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
        """Return the memory of the processes. The quick sum counts memory shared by forks several times. Only if this
        sum exceeds the limit, ask the kernel for each process's share, which takes a millisecond per 100 MB."""
        bounds = {pid: private_bytes(pid) for pid in pids}
        if sum(bounds.values()) <= self.memory_limit:
            return sum(bounds.values())
        shares = {pid: _share_bytes(pid) for pid in pids}
        untold = [bounds[pid] for pid, own in shares.items() if own is None]
        if os.path.exists(ROLLUP):  # hidden processes are the code's own doing: subtract host_bytes once
            untold = [sum(untold)]
        return sum(own or 0 for own in shares.values()) + sum(max(0, bound - self.host_bytes) for bound in untold)


def lost_ticks(before: dict[int, Process], now: dict[int, Process]) -> int:
    """Return the CPU time of vanished processes that no living process has taken over.

    When a parent waits for a child, the kernel adds the child's time to the parent's `waited_ticks`. So time that
    vanished below a living process is lost, unless this process's `waited_ticks` have risen by the same amount.
    """
    stayed = {pid for pid, process in before.items() if pid in now and now[pid].started == process.started}
    vanished: dict[int | None, int] = {}
    """Vanished ticks by the nearest living ancestor; None: no living ancestor."""
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
    """Return the anonymous memory of a process, with swapped-out memory; 0 if the process is gone or ending."""
    # an ended first thread shows no memory, while other threads may go on
    return _anonymous(f"/proc/{pid}/status") or max(map(_anonymous, glob.glob(f"/proc/{pid}/task/*/status")), default=0)


def _share_bytes(pid: int) -> int | None:
    """Return the process's share of its anonymous memory (shared pages count in part); 0 if the process is gone or
    ending; None if the kernel does not report shares."""
    told = os.path.exists(ROLLUP)
    for task in glob.glob(f"/proc/{pid}/task/*"):  # an ended first thread has no memory
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
    """Return an upper bound of the memory in these processes' sockets. No process's memory includes it."""
    held = set()
    for path in (path for pid in pids for path in glob.glob(f"/proc/{pid}/task/*/fd/*")):
        with contextlib.suppress(OSError):  # closed since it was listed
            held.add(os.readlink(path))
    return BYTES_PER_SOCKET * sum(name.startswith("socket:") for name in held)


def _bytes_of(path: str, names: tuple[str, ...]) -> int:
    """Return the sum of the named fields of a file in /proc, in bytes. Raises OSError."""
    with open(path, errors="replace") as file:  # the process chooses its name, perhaps no UTF-8
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
