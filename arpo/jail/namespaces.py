"""Tier A: the host has its own namespaces, and each call has further namespaces. Of the machine, the code sees only
the system's libraries and the interpreter, read-only. There is no network, not even loopback.

Needs user namespaces (or root) and mount_setattr (Linux 5.12). Code may start child processes only if the machine
allows a second mount of /proc.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from types import ModuleType

from . import seccomp
from . import syscalls as kernel
from .cgroup import HostCgroup
from .limits import CallLimits, set_rlimits

JAIL_UID = 61000
"""The host's user id on the outside if the trainer is root: RLIMIT_NPROC does not bind root."""
NOBODY = 65534
STAGING_FOLDERS = ("/sys", "/mnt", "/media", "/srv")
DEVICES = ("null", "full", "random", "urandom")
"""Devices in the jail. /dev/zero is missing: none of our limits counts the memory of a shared mapping of /dev/zero."""
ETC = {
    "passwd": f"nobody:x:{NOBODY}:{NOBODY}:nobody:/tmp:/bin/false\n",
    "group": f"nogroup:x:{NOBODY}:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
NO_SPECIAL_FILES = kernel.MS_NOSUID | kernel.MS_NODEV


class NamespaceJail:
    """A jail with the methods of folder.FolderJail."""

    tier = "namespaces"
    base = None
    cgroup: HostCgroup | None = None
    sessions: ModuleType | None = None

    def __init__(
        self, limits: CallLimits, visible: list[str], control: socket.socket, cgroup: HostCgroup | None = None
    ):
        """Make the namespaces and fork. Returns only in the child, PID 1 of the new pid namespace.

        The calling process never returns: it waits for the child as its launcher. Raises OSError, in either process,
        if the machine does not allow the tier.
        """
        self.limits = limits
        self.interpreter_in_tmp = [path for path in visible if path.startswith("/tmp/")]
        own = kernel.ALL_NAMESPACES & ~(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        if os.geteuid() == 0 and _is_mapped(JAIL_UID):
            kernel.unshare(kernel.CLONE_NEWNS)
            root = _build_root(visible)
            kernel.mount("/proc", root + "/proc", None, kernel.MS_BIND | kernel.MS_REC)
            _enter(root)  # before NEWUSER: afterwards these mounts are locked, and pivot_root fails with EINVAL
            root = ""
            if cgroup:
                cgroup.give_to(JAIL_UID)
            os.setgroups([])
            os.setresgid(JAIL_UID, JAIL_UID, JAIL_UID)
            os.setresuid(JAIL_UID, JAIL_UID, JAIL_UID)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # setuid cleared it; without it root owns /proc/self/uid_map
            for path in visible:
                if not os.access(path, os.R_OK | os.X_OK):
                    raise PermissionError(f"{path} is not readable for uid {JAIL_UID}, as which the code is to run")
            _new_user_namespace()
            kernel.unshare(kernel.CLONE_NEWNS | own)
            kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        else:
            _new_user_namespace()
            kernel.unshare(kernel.CLONE_NEWNS | own)
            root = _build_root(visible)
        if cgroup:
            cgroup.settle()  # before the fork: one process to move
        _become_pid_1(control)
        self.has_proc = _mount_proc(root + "/proc")
        if root:
            _enter(root)
        self._pid_namespace = kernel.pidfd_open(os.getpid())
        # Without /proc the memory of several processes cannot be summed up. So the code may not start any.
        has_siblings = self.has_proc and bool(limits.sessions)  # forks of one session must not see each other
        self._filter = seccomp.program(allow_children=self.has_proc, may_hide=has_siblings)

    def fork(self) -> int:
        """Fork a child as PID 1 of a new pid namespace. When the child ends, the kernel kills the whole namespace."""
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = None
        try:
            pid = os.fork()
        finally:
            if pid != 0:  # only back in its own namespace can this process unshare again
                try:
                    kernel.setns(self._pid_namespace, kernel.CLONE_NEWPID)
                except OSError:  # no further call could be forked: end, so that the host is replaced
                    os._exit(1)
        return pid

    def open_scratch(self) -> str:
        """Mount a private /tmp, /dev/shm and /proc."""
        kernel.unshare(kernel.CLONE_NEWNS)
        size = f"size={self.limits.scratch_bytes},nr_inodes={self.limits.scratch_inodes},mode=1777"
        target = "/mnt" if self.interpreter_in_tmp else "/tmp"
        kernel.mount("tmp", target, "tmpfs", NO_SPECIAL_FILES, size)
        for path in self.interpreter_in_tmp:  # the new /tmp must not hide a virtual environment below /tmp
            place = target + path.removeprefix("/tmp")
            os.makedirs(place)
            kernel.mount(path, place, None, kernel.MS_BIND | kernel.MS_REC)
        if self.interpreter_in_tmp:
            kernel.mount(target, "/tmp", None, kernel.MS_MOVE)
        size = f"size={self.limits.scratch_bytes // 4},nr_inodes=256,mode=1777"
        kernel.mount("shm", "/dev/shm", "tmpfs", NO_SPECIAL_FILES | kernel.MS_NOEXEC, size)
        if self.has_proc:
            # read-only: otherwise a program of the code could lower its oom_score_adj to the trainer's
            kernel.mount("proc", "/proc", "proc", NO_SPECIAL_FILES | kernel.MS_NOEXEC | kernel.MS_RDONLY)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # otherwise the worker, with our uid, could read /proc/1/mem
        return "/tmp"

    def confine(self, scratch: str) -> None:
        kernel.unshare(kernel.CLONE_NEWUSER)  # so that RLIMIT_NPROC counts this call only, and not all calls together
        set_rlimits(self.limits, count_processes=True)
        kernel.drop_capabilities()
        # The kernel shows the supervisor the shared memory of a process only if the process is dumpable. This gives
        # the code no new power: programs started by the code are dumpable anyway, and /proc is read-only.
        kernel.prctl(kernel.PR_SET_DUMPABLE, int(self.has_proc))
        seccomp.install(self._filter)

    def processes(self, worker: int) -> list[int]:
        """Return all processes of the pid namespace except the supervisor; [] if /proc is missing."""
        if not self.has_proc:
            return []
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def kill(self, worker: int) -> None:
        """Kill all other processes of the namespace at the same moment (pid -1), so that none can escape by forking."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


def _is_mapped(uid: int) -> bool:
    """Return True if this user namespace maps the uid and gid. A rootless container may map only its root."""
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as file:
            ranges = [[int(word) for word in line.split()] for line in file]
        if not any(first <= uid < first + count for first, _, count in ranges):
            return False
    return True


def _new_user_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _become_pid_1(control: socket.socket) -> None:
    """Fork. Returns only in the child, the first process of the new pid namespace. The parent waits for the child."""
    pid = os.fork()
    if pid == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # the trainer ends a stuck host by killing the launcher
        return
    control.close()
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _build_root(visible: list[str]) -> str:
    """Mount a tmpfs with read-only binds of `visible`, an artificial /etc and four devices. Return its folder."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    free = (f for f in STAGING_FOLDERS if os.path.isdir(f) and not any(p.startswith(f + "/") for p in visible))
    root = next(free, None)
    if root is None:
        raise OSError(f"none of {', '.join(STAGING_FOLDERS)} is there to build a root on")
    kernel.mount("jail", root, "tmpfs", NO_SPECIAL_FILES, "size=4m,mode=755")
    os.umask(0o022)
    for path in visible:
        place = root + path
        if os.path.islink(path):  # /lib -> usr/lib
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(os.readlink(path), place)
        else:
            os.makedirs(place, exist_ok=True)
            kernel.bind_readonly(path, place)
    for folder in ("etc", "dev/shm", "tmp", "proc", "mnt"):
        os.makedirs(f"{root}/{folder}", exist_ok=True)
    for path in ("/etc/ld.so.cache", "/etc/localtime"):
        if os.path.isfile(path):
            shutil.copyfile(path, root + path)
    if os.path.isdir("/etc/alternatives"):  # Debian's libblas is a link through it
        os.makedirs(f"{root}/etc/alternatives")
        kernel.bind_readonly("/etc/alternatives", f"{root}/etc/alternatives")
    for name, text in ETC.items():
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(text)
    for name in DEVICES:
        with open(f"{root}/dev/{name}", "w"):
            pass
        kernel.mount(f"/dev/{name}", f"{root}/dev/{name}", None, kernel.MS_BIND)
    for name, path in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink("/proc/self/fd" + path, f"{root}/dev/{name}")
    return root


def _enter(root: str) -> None:
    kernel.pivot_into(root)
    kernel.mount(None, "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | NO_SPECIAL_FILES)


def _mount_proc(target: str) -> bool:
    """Mount a /proc with only this pid namespace. Return False if refused, as in containers with a masked /proc."""
    try:
        kernel.mount("proc", target, "proc", NO_SPECIAL_FILES | kernel.MS_NOEXEC)
    except PermissionError:
        kernel.mount("none", target, "tmpfs", NO_SPECIAL_FILES | kernel.MS_RDONLY, "size=4k")
        return False
    return True
