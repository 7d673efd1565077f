"""The system call filter of a worker: a deny-list in the kernel's classic BPF. It is the worker's last restriction, and
also binds the worker's children.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from . import syscall_table as table
from . import syscalls as kernel

SECCOMP_MODE_FILTER = 2
ALLOW, KILL_PROCESS, RETURN_ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, AND, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_BITS, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_ARCHITECTURE, AT_ARGUMENTS = 0, 4, 16

CLONE_THREAD = 0x10000
SOCK_TYPE_MASK, SOCK_DGRAM = 0xF, 2
MAP_SHARED_ANONYMOUS, MAP_GROWSDOWN = 0x21, 0x100
O_TMPFILE = 0x400000
SOCKET_BUFFERS = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF and their FORCE variants."""
PERSONALITY_QUERY = 0xFFFFFFFF
IOCTLS = (0x5412, 0x541C, 0x8901, 0x8902, 0x40086602, 0x401C5820)
"""TIOCSTI, TIOCLINUX (type into a terminal), FIOSETOWN, SIOCSPGRP (aim signals), FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR."""
FCNTLS = (8, 10, 15, 1024)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: with them "data is ready" becomes a SIGKILL for any process of the same user.
F_SETLEASE: a process opening the file elsewhere (the trainer, perhaps) would wait until the call ends."""
RLIMIT_CORE = 4

Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, constant)"""


def program(*, allow_children: bool, only_pid: int | None = None, may_hide: bool = False) -> bytes:
    """Return the filter for this machine, in the kernel's format. Raises OSError on an unknown architecture.

    * `only_pid`: pid of the worker, the only process it may signal. Set it if no namespaces hide the user's other
      processes and files.
    * `may_hide`: the worker may change its PR_SET_DUMPABLE, and so hide its memory from processes of the same user.
    """
    machine = platform.machine()
    if machine not in table.ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call table for {machine}")
    audit_arch, _ = table.ARCHITECTURES[machine]
    single = table.numbers(table.SINGLE, machine)
    code: list[Instruction] = [
        (LOAD, 0, 0, AT_ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, audit_arch),
        (RETURN, 0, 0, KILL_PROCESS),  # 32-bit calls have other numbers
        (LOAD, 0, 0, AT_NUMBER),
        (JUMP_GREATER_EQUAL, 0, 1, table.NEWEST + 1),
        (RETURN, 0, 0, RETURN_ERRNO | errno.ENOSYS),
    ]
    code += _refuse(table.numbers(table.ADMINISTRATION, machine), errno.EPERM)
    code += _refuse(table.numbers(table.OUTSIDE_THE_LIMITS, machine), errno.ENOSYS)
    code += _refuse(table.numbers(table.FLUSH, machine), 0)
    code += _refuse({"socket": single["socket"]}, errno.ENETUNREACH)
    # asyncio needs socketpair; but a datagram socket can send to any address, connected or not
    datagram = [(AND, 0, 0, SOCK_TYPE_MASK), *_if(JUMP_EQUAL, SOCK_DGRAM, RETURN_ERRNO | errno.EPERM)]
    code += _on_argument(single["socketpair"], 1, datagram)
    code += _on_argument(single["mmap"], 3, _uncounted_memory())
    # socket buffers are kernel memory (up to some MB per socket): no limit of a process counts them
    code += _on_argument(single["setsockopt"], 2, _if_any(SOCKET_BUFFERS, RETURN_ERRNO | errno.EPERM))
    # quotas by name do not find a file without a name; tempfile then makes a file with a name
    nameless = _if(JUMP_BITS, O_TMPFILE, RETURN_ERRNO | errno.EOPNOTSUPP)
    for name, argument in (("open", 1), ("openat", 2)):
        code += _on_argument(single[name], argument, nameless) if name in single else []
    code += _on_argument(single["ioctl"], 1, _if_any(IOCTLS, RETURN_ERRNO | errno.EPERM))
    code += _on_argument(single["personality"], 0, _only(0, PERSONALITY_QUERY))
    children = _if(JUMP_BITS, kernel.ALL_NAMESPACES, RETURN_ERRNO | errno.EPERM)
    if not allow_children:
        children += [*_if(JUMP_BITS, CLONE_THREAD, ALLOW), (RETURN, 0, 0, RETURN_ERRNO | errno.EPERM)]
        code += _refuse({name: single[name] for name in ("fork", "vfork") if name in single}, errno.EPERM)
    code += _on_argument(single["clone"], 0, children)
    # a dumpable process may write its /proc/self/oom_score_adj, and send a core to the core handler of the machine
    own_state = {kernel.PR_SET_DUMPABLE: not may_hide, kernel.PR_SET_PDEATHSIG: only_pid is not None}
    forbidden = tuple(option for option, is_forbidden in own_state.items() if is_forbidden)
    code += _on_argument(single["prctl"], 0, _if_any(forbidden, RETURN_ERRNO | errno.EPERM))
    # a limit of 0 instead of ours would send cores to the core handler of the machine
    no_core = _if(JUMP_EQUAL, RLIMIT_CORE, RETURN_ERRNO | errno.EPERM)
    code += _on_argument(single["setrlimit"], 0, no_core)
    # the supervisor is visible and has our uid: the code must not change its limits
    own = _only(0) if only_pid is None else _only(0, only_pid)
    code += _on_argument(single["prlimit64"], 1, [*no_core, (LOAD, 0, 0, AT_ARGUMENTS), *own])
    code += _on_argument(single["fcntl"], 1, _if_any(FCNTLS, RETURN_ERRNO | errno.EPERM))
    if only_pid is not None:
        code += _refuse(table.numbers(table.ON_OTHERS, machine), errno.EPERM)
        # fallocate could fill the disk between two counts of the files
        code += _refuse({"fallocate": single["fallocate"]}, errno.EOPNOTSUPP)
        for name in ("kill", "tgkill"):
            code += _on_argument(single[name], 0, _only(only_pid))
        code += _on_argument(single["sched_setaffinity"], 0, _only(0, only_pid))
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def install(filter_program: bytes) -> None:
    """Bind this process and its future children forever."""
    instructions = ctypes.create_string_buffer(filter_program, len(filter_program))
    header = struct.pack("HxxxxxxQ", len(filter_program) // 8, ctypes.addressof(instructions))
    header_buffer = ctypes.create_string_buffer(header, len(header))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header_buffer))


def _uncounted_memory() -> list[Instruction]:
    """Return tests of an mmap's flags, for two kinds of memory outside RLIMIT_DATA: memory growing like a stack, and
    shared memory without a file. Unmapped shared memory is also in no process's RSS."""
    return [
        *_if(JUMP_BITS, MAP_GROWSDOWN, RETURN_ERRNO | errno.EPERM),
        (AND, 0, 0, MAP_SHARED_ANONYMOUS),
        *_if(JUMP_EQUAL, MAP_SHARED_ANONYMOUS, RETURN_ERRNO | errno.ENOMEM),
    ]


def _if(test: int, value: int, verdict: int) -> list[Instruction]:
    return [(test, 0, 1, value & 0xFFFFFFFF), (RETURN, 0, 0, verdict)]


def _if_any(values: tuple[int, ...], verdict: int) -> list[Instruction]:
    return [instruction for value in values for instruction in _if(JUMP_EQUAL, value, verdict)]


def _only(*values: int) -> list[Instruction]:
    return [*_if_any(values, ALLOW), (RETURN, 0, 0, RETURN_ERRNO | errno.EPERM)]


def _refuse(calls: dict[str, int], error: int) -> list[Instruction]:
    return _if_any(tuple(calls.values()), RETURN_ERRNO | error)


def _on_argument(number: int, argument: int, tests: list[Instruction]) -> list[Instruction]:
    """Run `tests` on the low half of an argument of this call. The call is allowed unless a test refuses."""
    # The low half is enough: the kernel, too, takes all tested arguments as int (or flags below 2^32).
    tests = [(LOAD, 0, 0, AT_ARGUMENTS + 8 * argument), *tests, (RETURN, 0, 0, ALLOW)]
    return [(JUMP_EQUAL, 0, len(tests), number), *tests]
