"""Tier B, for machines without namespaces (Docker's default profile).

Landlock (Linux 5.13) restricts access to files. The seccomp filter restricts all other system calls. A call has one
process. The process can read only the interpreter, and write only in the call's folder.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from pathlib import Path

from . import seccomp
from . import syscalls as kernel
from .folder import FolderJail
from .limits import CallLimits

JAIL_UID = 61000
READABLE_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/dev/random", "/dev/urandom")

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ALL_OF_ABI_1 = (1 << 13) - 1
REFER, TRUNCATE, IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15  # of ABI 2, 3, 5
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
RULE_PATH_BENEATH = 1
NET_BIND_AND_CONNECT = 3
SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3
CREATE, ADD_RULE, RESTRICT_SELF = 0, 1, 2


class LandlockJail(FolderJail):
    tier = "landlock"

    def __init__(self, limits: CallLimits, visible: list[str]):
        """Raises OSError if the kernel lacks or forbids Landlock."""
        newest_abi()
        seccomp.program(allow_children=False)  # raises for an unknown machine
        super().__init__(limits)
        self.readable = [*visible, *READABLE_FILES]
        if os.geteuid() == 0 and all(_is_open_to_all(path) for path in visible):
            self.worker_uid = JAIL_UID  # root without capabilities would still own root's files

    def confine(self, scratch: str) -> None:
        super().confine(scratch)
        restrict_files(self.readable, scratch)
        kernel.drop_capabilities()
        seccomp.install(seccomp.program(allow_children=False, only_pid=os.getpid()))


def restrict_files(readable: list[str], scratch: str | None = None) -> None:
    """Restrict this process: read only the files in `readable`, and write only below `scratch`. Raises OSError.

    ABI 4 of Landlock also forbids TCP. ABI 6 also forbids signals and abstract sockets to other processes.
    """
    abi = newest_abi()
    everything = ALL_OF_ABI_1
    for since, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEVICE)):
        everything |= right if abi >= since else 0
    network = NET_BIND_AND_CONNECT if abi >= 4 else 0
    scope = SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    attributes = struct.pack("QQQ", everything, network, scope)[:size]
    ruleset = _landlock(CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint(0))
    rules = dict.fromkeys(readable, EXECUTE | READ_FILE | READ_DIR) | {"/dev/null": READ_FILE | WRITE_FILE}
    if scratch:
        rules[scratch] = everything
    for path, rights in rules.items():
        if os.path.exists(path):
            _allow(ruleset, path, rights)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    _landlock(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    os.close(ruleset)


def newest_abi() -> int:
    """Return the version of Landlock's interface. Raises OSError if the kernel lacks or forbids Landlock."""
    return _landlock(CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1))


def _landlock(operation: int, *arguments: object) -> int:
    return kernel.syscall("landlock", *arguments, offset=operation)


def _allow(ruleset: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= FILE_RIGHTS
        rule = struct.pack("<Qi", rights, fd)
        _landlock(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(RULE_PATH_BENEATH), rule, ctypes.c_uint(0))
    except OSError as error:
        raise OSError(error.errno or errno.EINVAL, f"{error.strerror} for {path}") from error
    finally:
        os.close(fd)


def _is_open_to_all(path: str) -> bool:
    """Return True if all users may enter and list the folder and every parent folder."""
    return all(os.stat(folder).st_mode & 0o005 == 0o005 for folder in (path, *Path(path).parents))
