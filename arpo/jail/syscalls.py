"""Linux system calls missing in Python, through ctypes. Each raises OSError. For x86_64 and aarch64."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Iterator

CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 32, 4096, 8192, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 28, 38
NOROOT_FOREVER = 0x2F  # NOROOT, NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE with their locks, KEEP_CAPS locked off
CAPABILITY_VERSION_3 = 0x20080522

_SHARED_NUMBERS = {"pidfd_open": 434, "close_range": 436, "mount_setattr": 442, "landlock": 444}
_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126, **_SHARED_NUMBERS},
    "aarch64": {"pivot_root": 41, "capset": 91, **_SHARED_NUMBERS},
}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def check(returned: int, what: str) -> int:
    """Return `returned`, the result of a call. Raises OSError with errno if the result is negative."""
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return returned


def syscall(name: str, *arguments: object, offset: int = 0) -> int:
    """Make a system call by name. `offset` is added to its number, for groups of consecutive numbers (landlock)."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(errno.ENOSYS, f"no system call table for {platform.machine()}")
    return check(_libc.syscall(ctypes.c_long(numbers[name] + offset), *arguments), name)


def unshare(flags: int) -> None:
    check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, flags: int) -> None:
    check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flags)), "setns")


def prctl(option: int, value: int = 0, third: int = 0) -> None:
    zero = ctypes.c_ulong(0)
    arguments = (ctypes.c_int(option), ctypes.c_ulong(value), ctypes.c_ulong(third), zero, zero)
    check(_libc.prctl(*arguments), f"prctl({option})")


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. `parent`: pid of the parent."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


@contextlib.contextmanager
def file_user(uid: int | None) -> Iterator[None]:
    """Access files, above all those in /proc, as this user and group within the block. None: no change."""
    if uid is None:
        yield
        return
    gid_before, uid_before = _libc.setfsgid(ctypes.c_uint(uid)), _libc.setfsuid(ctypes.c_uint(uid))
    try:
        yield
    finally:
        _libc.setfsuid(ctypes.c_uint(uid_before))
        _libc.setfsgid(ctypes.c_uint(gid_before))


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    strings = [None if s is None else s.encode() for s in (source, target, kind)]
    data = None if options is None else options.encode()
    check(_libc.mount(*strings, ctypes.c_ulong(flags), data), f"mount {target}")


def bind_readonly(source: str, target: str) -> None:
    """Bind a folder with all mounts below it, read-only, without set-uid programs and devices."""
    mount(source, target, None, MS_BIND | MS_REC)
    # mount_setattr, not a remount: it also reaches all mounts below, and keeps flags locked by a parent namespace.
    attributes = struct.pack("QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    at_cwd, recursive = ctypes.c_int(-100), ctypes.c_uint(0x8000)
    syscall("mount_setattr", at_cwd, target.encode(), recursive, attributes, ctypes.c_size_t(len(attributes)))


def pivot_into(new_root: str) -> None:
    """Make `new_root` the root of this mount namespace, and detach the old root."""
    os.chdir(new_root)
    syscall("pivot_root", b".", b".")
    check(_libc.umount2(b".", ctypes.c_int(MNT_DETACH)), "umount2")
    os.chdir("/")


def pidfd_open(pid: int) -> int:
    """Do the same as os.pidfd_open. Pythons built with old kernel headers (conda, for example) lack os.pidfd_open."""
    return syscall("pidfd_open", ctypes.c_int(pid), ctypes.c_uint(0))


def close_from(first_fd: int) -> None:
    try:
        syscall("close_range", ctypes.c_uint(first_fd), ctypes.c_uint(0xFFFFFFFF), ctypes.c_uint(0))
    except OSError:  # kernels before 5.9
        os.closerange(first_fd, 65536)


def drop_capabilities() -> None:
    """Give up all capabilities forever: no_new_privs, and uid 0 cannot regain capabilities by execve."""
    with contextlib.suppress(PermissionError):  # needs CAP_SETPCAP; without CAP_SETPCAP there is nothing to drop
        prctl(PR_SET_SECUREBITS, NOROOT_FOREVER)
    header = struct.pack("II", CAPABILITY_VERSION_3, 0)
    syscall("capset", header, bytes(24))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
