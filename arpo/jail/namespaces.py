"""Tier A: the host in namespaces of its own, and each call in further ones. Nothing of the machine is visible but
the system's libraries and the interpreter, read-only; no network, not even loopback.

Needs user namespaces (or root), mount_setattr (Linux 5.12), and for child processes a /proc that may be mounted again.
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
"""Devices in the jail. /dev/zero is not among them: a shared mapping of it is memory that no limit of ours counts."""
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
        """Return in a child that is PID 1 of the new pid namespace; the caller stays behind as its launcher and never
        returns. Raises OSError, in either of them, if the machine does not allow it."""
        self.limits = limits
        self.interpreter_in_tmp = [path for path in visible if path.startswith("/tmp/")]
        own = kernel.ALL_NAMESPACES & ~(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
        if os.geteuid() == 0 and _is_mapped(JAIL_UID):
            kernel.unshare(kernel.CLONE_NEWNS)
            root = _build_root(visible)
            kernel.mount("/proc", root + "/proc", None, kernel.MS_BIND | kernel.MS_REC)
            _enter(root)  # before NEWUSER: after it these mounts are locked and pivot_root says EINVAL
            root = ""
            if cgroup:
                cgroup.give_to(JAIL_UID)
            os.setgroups([])
            os.setresgid(JAIL_UID, JAIL_UID, JAIL_UID)
            os.setresuid(JAIL_UID, JAIL_UID, JAIL_UID)
            kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # setuid cleared it, and /proc/self/uid_map would belong to root
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
            cgroup.settle()  # before there are two of us
        _become_pid_1(control)
        self.has_proc = _mount_proc(root + "/proc")
        if root:
            _enter(root)
        self._pid_namespace = kernel.pidfd_open(os.getpid())
        # Without /proc nobody can sum up the memory of several processes, so there is only one.
        has_siblings = self.has_proc and bool(limits.sessions)  # forks of one session, which hide from each other
        self._filter = seccomp.program(allow_children=self.has_proc, may_hide=has_siblings)

    def fork(self) -> int:
        """Fork a child that is PID 1 of a pid namespace of its own: when it ends, the kernel kills the rest of it."""
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = None
        try:
            pid = os.fork()
        finally:
            if pid != 0:  # a process can unshare again only after it has gone back to its own namespace
                try:
                    kernel.setns(self._pid_namespace, kernel.CLONE_NEWPID)
                except OSError:  # no further call could be forked: better a host that is gone, and replaced
                    os._exit(1)
        return pid

    def open_scratch(self) -> str:
        """Mount a private /tmp, /dev/shm and /proc."""
        kernel.unshare(kernel.CLONE_NEWNS)
        size = f"size={self.limits.scratch_bytes},nr_inodes={self.limits.scratch_inodes},mode=1777"
        target = "/mnt" if self.interpreter_in_tmp else "/tmp"
        kernel.mount("tmp", target, "tmpfs", NO_SPECIAL_FILES, size)
        for path in self.interpreter_in_tmp:  # a virtual environment below /tmp must not vanish under the new /tmp
            place = target + path.removeprefix("/tmp")
            os.makedirs(place)
            kernel.mount(path, place, None, kernel.MS_BIND | kernel.MS_REC)
        if self.interpreter_in_tmp:
            kernel.mount(target, "/tmp", None, kernel.MS_MOVE)
        size = f"size={self.limits.scratch_bytes // 4},nr_inodes=256,mode=1777"
        kernel.mount("shm", "/dev/shm", "tmpfs", NO_SPECIAL_FILES | kernel.MS_NOEXEC, size)
        if self.has_proc:
            # read-only: a program that the code starts could lower its oom_score_adj to the trainer's
            kernel.mount("proc", "/proc", "proc", NO_SPECIAL_FILES | kernel.MS_NOEXEC | kernel.MS_RDONLY)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # or the worker, who has our uid, could read /proc/1/mem
        return "/tmp"

    def confine(self, scratch: str) -> None:
        kernel.unshare(kernel.CLONE_NEWUSER)  # or RLIMIT_NPROC would count the processes of all calls together
        set_rlimits(self.limits, count_processes=True)
        kernel.drop_capabilities()
        # The kernel tells the supervisor what each process shares only if that may be dumped. That leaves the code no
        # more to do: programs that it starts are dumpable anyway, and /proc is read-only.
        kernel.prctl(kernel.PR_SET_DUMPABLE, int(self.has_proc))
        seccomp.install(self._filter)

    def processes(self, worker: int) -> list[int]:
        """Return all processes of the pid namespace but the supervisor; none if /proc is missing."""
        if not self.has_proc:
            return []
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def kill(self, worker: int) -> None:
        """Kill -1: every process of the namespace but us, PID 1, at one moment, so that none can fork away."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)


def _is_mapped(uid: int) -> bool:
    """Return whether this user namespace has that uid and gid: "root" of a rootless container may be alone in it."""
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
    """Return in a child, the first process of the new pid namespace; the parent only waits for it."""
    pid = os.fork()
    if pid == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # the trainer ends a stuck host by killing the launcher
        return
    control.close()
    _, status = os.waitpid(pid, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _build_root(visible: list[str]) -> str:
    """Mount a tmpfs with read-only binds of `visible`, a made-up /etc and four devices; return its folder."""
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
    """Mount a /proc of this pid namespace only; return False if that is refused, as in containers that mask theirs."""
    try:
        kernel.mount("proc", target, "proc", NO_SPECIAL_FILES | kernel.MS_NOEXEC)
    except PermissionError:
        kernel.mount("none", target, "tmpfs", NO_SPECIAL_FILES | kernel.MS_RDONLY, "size=4k")
        return False
    return True
