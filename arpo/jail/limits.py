"""The limits of one call. `set_rlimits` sets the limits enforced by the kernel."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass

NICE = 5
"""Niceness of the code's processes. The kernel runs supervisors first, since they must stop the code."""
BUSY_NICE = 10
"""Niceness of a call with much CPU time so far. With 19 it would hardly run beside a busy trainer."""
MAX_FAMILY = 32
"""Limit on sessions forked from one another in one user namespace. Further sessions are replayed."""


@dataclass(frozen=True)
class CallLimits:
    wall_s: float = 20.0
    cpu_s: float = 10.0
    """CPU time, summed over the processes of the call."""
    memory_bytes: int = 1 << 30
    """Limit of each process (enforced by the kernel) and of the sum (enforced by the supervisor)."""
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
    """Bytes kept of each output stream. If a stream is longer, its middle is cut out."""
    max_output_bytes: int = 8 << 20
    """Limit on both streams together. More output ends the call."""
    sessions: str = ""
    """Folder of a package for sessions. In a session a worker lives on between calls; "": a worker serves one call.

    The host imports the package before the jail closes. It calls two functions:

    * in a supervisor, instead of `spare.serve`: `family.serve(spare, conn, host_bytes)`
    * in the confined worker, instead of its single call: `worker.serve_cells(scratch, run_code, main)`
    """
    session_cpu_s: float = 0.0
    """CPU time of all calls of a session together."""


def set_rlimits(limits: CallLimits, *, count_processes: bool) -> None:
    """Set the kernel's limits for this process and its children.

    `count_processes` needs a user namespace. Elsewhere the kernel counts all processes of the user on the machine.
    """
    cpu_s = math.ceil(max(limits.cpu_s, limits.session_cpu_s))
    # RLIMIT_DATA makes allocations fail. RLIMIT_AS is larger, since it includes libraries and thread stacks.
    address_space = limits.memory_bytes + (2 << 30)
    values = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_AS: address_space,
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_FSIZE: limits.max_file_bytes,
        resource.RLIMIT_NOFILE: limits.max_open_files,
        resource.RLIMIT_CORE: 1,  # byte. With 0 a core may still go to a program of the machine
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
