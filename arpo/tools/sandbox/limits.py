"""The limits of one call: what they are, the kernel's share of enforcing them, and how much a call uses now."""

from __future__ import annotations

import contextlib
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
    """Summed over the processes of the call."""
    memory_bytes: int = 1 << 30
    """Per process by the kernel, and the sum over the processes by the supervisor."""
    max_processes: int = 32
    """Processes and threads."""
    max_open_files: int = 128
    max_file_bytes: int = 32 << 20
    scratch_bytes: int = 64 << 20
    """Largest total size of the call's files."""
    scratch_inodes: int = 4096
    kept_output_bytes: int = 64 << 10
    """Bytes kept of each output stream; the rest is cut out of the middle."""
    max_output_bytes: int = 8 << 20
    """More than that on both streams together ends the call."""


@dataclass(frozen=True)
class Usage:
    """Resources that the processes of a call use at one moment."""

    memory_bytes: int
    """Private memory, less what they share with the host they were forked from."""
    cpu_s: float
    num_tasks: int


def set_rlimits(limits: CallLimits, *, count_processes: bool) -> None:
    """The kernel's part, for this process and its children. `count_processes` only in an own user namespace:
    elsewhere the kernel counts all processes of the user on the machine."""
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
    """Anonymous memory of a process, swapped out or not; 0 for a process that is gone or about to be."""
    return sum(_status(pid, ("RssAnon:", "VmSwap:"))) << 10


def usage(pids: list[int], host_bytes: int) -> Usage:
    """Sum over processes. `host_bytes` = private memory of the host, which each of them shares copy-on-write."""
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
    return Usage(memory, ticks / CLOCK_TICKS_PER_S, tasks)


def step_back(pids: list[int]) -> None:
    """Let calls that have computed less go first. Of all threads of these processes, since priorities are theirs."""
    nice = os.getpriority(os.PRIO_PROCESS, 0) + BUSY_NICE
    for pid in pids:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:  # it ended since it was listed
            continue
        for thread in threads:
            with contextlib.suppress(OSError):  # the same, or it has gone further back by itself
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def _status(pid: int | str, names: tuple[str, ...]) -> list[int]:
    try:
        with open(f"/proc/{pid}/status") as file:
            return [int(line.split()[1]) for line in file if line.startswith(names)]
    except OSError:
        return []
