"""The limits of one call, the part of them that the kernel enforces, and the measuring of what a call uses."""

from __future__ import annotations

import contextlib
import glob
import math
import os
import resource
from dataclasses import dataclass

NICE = 5
"""Niceness of the code's processes, so that the supervisors, which must stop them, come first."""
BUSY_NICE = 10
"""Niceness of a call that has computed for a while. With 19 it would hardly run beside a busy trainer."""
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CallLimits:
    wall_s: float = 20.0
    cpu_s: float = 10.0
    """CPU time, summed over the processes of the call."""
    memory_bytes: int = 1 << 30
    """Limit of each process, enforced by the kernel, and of their sum, enforced by the supervisor."""
    max_processes: int = 32
    """Largest number of processes and threads together."""
    max_open_files: int = 128
    max_file_bytes: int = 32 << 20
    scratch_bytes: int = 64 << 20
    """Largest total size of the call's files."""
    scratch_inodes: int = 4096
    kept_output_bytes: int = 64 << 10
    """Number of bytes kept of each output stream; the rest is cut out of the middle."""
    max_output_bytes: int = 8 << 20
    """Number of bytes on both streams together above which the call ends."""


def set_rlimits(limits: CallLimits, *, count_processes: bool) -> None:
    """Set the limits that the kernel enforces, for this process and its children. count_processes: only in a user
    namespace of its own; elsewhere the kernel counts all processes of the user on the machine."""
    cpu_s = math.ceil(limits.cpu_s)
    # RLIMIT_DATA is what makes allocations fail. The address space is larger: libraries and thread stacks are in it.
    address_space = limits.memory_bytes + (2 << 30)
    values = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_AS: address_space,
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_FSIZE: limits.max_file_bytes,
        resource.RLIMIT_NOFILE: limits.max_open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if count_processes:
        values[resource.RLIMIT_NPROC] = limits.max_processes
    for kind, value in values.items():
        soft, hard = value if isinstance(value, tuple) else (value, value)
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))


def private_bytes(pid: int | str = "self") -> int:
    """Return the anonymous memory of a process, swapped out or not; 0 for one that is gone or about to be."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "VmSwap:"))) << 10
    except OSError:
        return 0


def usage(pids: list[int], host_bytes: int) -> tuple[int, float, int]:
    """Return private memory (bytes), CPU time (seconds) and number of tasks, summed over processes. host_bytes: private
    memory of the host, which each process shares copy-on-write, and which is not counted."""
    memory = ticks = tasks = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:  # it ended since it was listed
            continue
        ticks += sum(int(field) for field in fields[11:15])  # user, system, and both of the children it waited for
        tasks += int(fields[17])
        memory += max(0, private_bytes(pid) - host_bytes)
    return memory, ticks / CLOCK_TICKS_PER_S, tasks


def step_back(pids: list[int]) -> None:
    """Lower the priority of all threads of these processes, so that calls that have computed less go first."""
    nice = os.getpriority(os.PRIO_PROCESS, 0) + BUSY_NICE
    for pid in pids:
        for task in glob.glob(f"/proc/{pid}/task/*"):
            with contextlib.suppress(OSError):  # it ended since it was listed, or has gone further back by itself
                os.setpriority(os.PRIO_PROCESS, int(os.path.basename(task)), nice)
