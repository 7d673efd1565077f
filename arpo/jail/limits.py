"""The limits of one call. `set_rlimits` sets those that the kernel enforces."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass

NICE = 5
"""Niceness of the code's processes. The supervisors, which must stop them, are run first."""
BUSY_NICE = 10
"""Niceness of a call that has computed for a while. With 19 it would hardly run beside a busy trainer."""
MAX_FAMILY = 32
"""Limit on the sessions forked from one another, which share a user namespace. Further sessions are replayed."""


@dataclass(frozen=True)
class CallLimits:
    wall_s: float = 20.0
    cpu_s: float = 10.0
    """CPU time, summed over the processes of the call."""
    memory_bytes: int = 1 << 30
    """Limit of each process (the kernel enforces it) and of their sum (the supervisor enforces it)."""
    max_processes: int = 32
    """Limit on processes and threads together"""
    max_open_files: int = 128
    max_file_bytes: int = 32 << 20
    scratch_bytes: int = 64 << 20
    """Largest total size of the call's files."""
    scratch_inodes: int = 4096
    scratch_depth: int = 64
    """Limit on nested folders, in the tiers that count files"""
    kept_output_bytes: int = 64 << 10
    """Bytes kept of each output stream. The middle of a longer one is cut out."""
    max_output_bytes: int = 8 << 20
    """Bytes of both streams together. The call ends above it."""
    sessions: str = ""
    """Folder of a package whose modules let a worker live on between calls, in a session; empty: a worker serves one
    call. The host imports it before it is jailed, and calls two functions of it: `family.serve(spare, conn,
    host_bytes)` in a supervisor, in place of `spare.serve`; and in the confined worker, in place of its one call,
    `worker.serve_cells(scratch, run_code, main)`."""
    session_cpu_s: float = 0.0
    """CPU time of all calls of a session together."""


def set_rlimits(limits: CallLimits, *, count_processes: bool) -> None:
    """Set the limits that the kernel enforces, for this process and its children.

    `count_processes` needs a user namespace. Elsewhere the kernel counts all processes of the user on the machine.
    """
    cpu_s = math.ceil(max(limits.cpu_s, limits.session_cpu_s))
    # RLIMIT_DATA is what makes allocations fail. The address space is larger: libraries and thread stacks are in it.
    address_space = limits.memory_bytes + (2 << 30)
    values = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_AS: address_space,
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_FSIZE: limits.max_file_bytes,
        resource.RLIMIT_NOFILE: limits.max_open_files,
        resource.RLIMIT_CORE: 1,  # byte. With 0 a core still goes where the machine pipes cores to a program
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if count_processes:
        values[resource.RLIMIT_NPROC] = limits.max_processes + (MAX_FAMILY if limits.sessions else 0)
    for kind, value in values.items():
        soft, hard = value if isinstance(value, tuple) else (value, value)
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))
