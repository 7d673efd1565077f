"""Kernel limits on all processes of a call together: each call has a cgroup (version 2), if the machine allows this.

    PARENT/               delegated to us, or named by the user; memory and pids in its cgroup.subtree_control
      arpo-PID-RANDOM/    of one host. A live host holds a lock on it; folders without a lock are removed
        host/             the host and its supervisors, without limits
        call-RANDOM/      one worker and all processes started by it

Only our own processes are moved. The folder is opened before the host jails itself. A worker has no descriptor of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time

from .limits import CallLimits

CONTROLLERS = ("memory", "pids")
_ENABLE = " ".join(f"+{name}" for name in CONTROLLERS)
PREFIX = "arpo-"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
KERNEL_BYTES = 8 << 20
"""Room for the kernel's own data (page tables), in addition to the memory and the files of a call."""
PATIENCE_S = 5.0
"""Longest wait for killed processes to leave a cgroup."""
NUM_ATTEMPTS = 5


def find_parent(setting: str) -> str:
    """Return the folder of the parent cgroup for all hosts. `setting`: tools.python.cgroup, "auto" or a folder.

    Raises ValueError with the reason if there is no usable parent.
    """
    if setting != "auto":
        _check_usable(setting)
        return setting
    with open("/proc/self/cgroup") as file:
        own = own_path(file.read())
    with open("/proc/self/mountinfo") as file:
        root, folder = locate(own, file.read())
    is_real_root = not os.path.exists(f"{folder}/cgroup.events")  # only this one may hold processes too
    if not is_real_root:
        if folder == root:
            raise ValueError(f"{folder} has this process in it, and so no cgroups with limits; start it in one below")
        folder = os.path.dirname(folder)
        if folder != root and not _is_delegated(folder):
            raise ValueError(f"{folder} is not delegated to us")
    _check_usable(folder)
    return folder


def own_path(text: str) -> str:
    """Return this process's cgroup, from /proc/self/cgroup: "0::/a/b\\n" -> "/a/b". Raises ValueError."""
    found = re.search(r"^0::(/.*)$", text, re.MULTILINE)
    if found is None:
        raise ValueError("the kernel has no cgroup version 2")
    if found[1].startswith("/..") or found[1].endswith(" (deleted)"):
        raise ValueError(f"this process's cgroup {found[1]} cannot be seen from here")
    return found[1]


def locate(own: str, mountinfo: str) -> tuple[str, str]:
    """Return two folders from /proc/self/mountinfo: of the topmost mounted cgroup, and of this process's cgroup.

    Raises ValueError.
    """
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        shown, mount_point = (_unescape(field) for field in fields.split()[3:5])
        inside = "" if shown == "/" else shown
        if rest.startswith("cgroup2 ") and (own == shown or own.startswith(inside + "/")):
            return mount_point, (mount_point + own[len(inside) :]).rstrip("/")
    raise ValueError("no cgroup version 2 that shows this process is mounted")


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _is_delegated(folder: str) -> bool:
    """Return True if the cgroup was delegated to this user or unit. Write access to systemd's cgroup is not enough."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            return os.getxattr(folder, name) == b"1"
    return os.geteuid() != 0 and os.stat(folder).st_uid == os.geteuid() and not folder.endswith(".slice")


def _check_usable(folder: str) -> None:
    """Raises ValueError, with the reason, if no cgroup with limits can be made below this folder."""
    try:
        missing = set(CONTROLLERS) - _words(f"{folder}/cgroup.controllers")
        enabled = _words(f"{folder}/cgroup.subtree_control")
        processes = _words(f"{folder}/cgroup.procs")
    except OSError as error:
        raise ValueError(f"{folder} is no cgroup of version 2 ({error.strerror})") from None
    if missing:
        raise ValueError(f"{folder} lacks {' and '.join(sorted(missing))} in its cgroup.controllers")
    is_root = not os.path.exists(f"{folder}/cgroup.events")
    if processes and not is_root and not enabled.issuperset(CONTROLLERS):
        raise ValueError(f"{folder} has processes in it; start them in a cgroup below it")
    needs = (folder, f"{folder}/cgroup.procs")
    if not all(os.access(path, os.W_OK) for path in needs):
        raise ValueError(f"{folder} is not writable")


def _words(path: str) -> set[str]:
    with open(path) as file:
        return set(file.read().split())


class HostFolder:
    """The trainer's handle on the cgroup of one host."""

    def __init__(self, parent: str):
        """Remove the cgroups of dead hosts, then make a new cgroup below `parent`. Raises OSError."""
        remove_leftovers(parent)
        if not _words(f"{parent}/cgroup.subtree_control").issuperset(CONTROLLERS):
            with open(f"{parent}/cgroup.subtree_control", "w") as file:
                file.write(_ENABLE)
        for _ in range(NUM_ATTEMPTS):
            self.path = f"{parent}/{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
            os.mkdir(self.path)
            with contextlib.suppress(OSError):  # another process removed it as a leftover before it was locked
                self.fd = os.open(self.path, FOLDER)
                try:
                    fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.stat(self.path)
                    return
                except OSError:
                    os.close(self.fd)
        raise OSError(f"{parent}: cgroups vanish as soon as they are made")

    def remove(self) -> None:
        """Kill all processes in the cgroup, and remove it. Never raises."""
        _remove(self.path)
        os.close(self.fd)


def remove_leftovers(parent: str) -> None:
    """Remove the cgroups of dead hosts. Raises OSError if the parent cannot be read."""
    for name in os.listdir(parent):
        if not name.startswith(PREFIX):
            continue
        with contextlib.suppress(OSError):  # its host is alive, or belongs to another user
            fd = os.open(f"{parent}/{name}", FOLDER)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(f"{parent}/{name}")
            finally:
                os.close(fd)


def _remove(folder: str, parent: int | None = None) -> None:
    """Kill all processes in a cgroup and remove it with its child cgroups, as far as possible. Never raises."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            os.rmdir(folder, dir_fd=parent)
        try:
            fd = os.open(folder, FOLDER, dir_fd=parent)
        except OSError:  # it is gone
            return
        with contextlib.suppress(OSError):
            _write("cgroup.kill", "1", fd)
        with contextlib.suppress(OSError):
            for name in os.listdir(fd):
                with contextlib.suppress(OSError):  # a file, or a cgroup with processes that are still ending
                    os.rmdir(name, dir_fd=fd)
        os.close(fd)
        time.sleep(0.005)


def _write(name: str, text: str, folder: int) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


class HostCgroup:
    """The host's side of a HostFolder. Make it before the host jails itself, and call `settle` afterwards."""

    def __init__(self, fd: int):
        """Enter the cgroup. A cgroup namespace made now will show it as the root. Raises OSError."""
        os.set_inheritable(fd, False)
        self.fd = fd
        os.mkdir("host", dir_fd=fd)
        self._procs = os.open("host/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC, dir_fd=fd)
        self._control = os.open("cgroup.subtree_control", os.O_WRONLY | os.O_CLOEXEC, dir_fd=fd)
        _write("cgroup.procs", "0", fd)

    def give_to(self, uid: int) -> None:
        """Allow this user to make cgroups below. Raises OSError."""
        for name in (".", "cgroup.procs"):
            os.chown(name, uid, uid, dir_fd=self.fd)

    def settle(self) -> None:
        """Move the host into host/: a cgroup with limits on its children may hold no processes. Raises OSError.

        The files were opened earlier, with the rights of that time."""
        os.write(self._procs, b"0")
        os.write(self._control, _ENABLE.encode())
        os.close(self._procs)
        os.close(self._control)


class CallCgroup:
    """The cgroup of one call, in the supervisor. Has the method `measure` of meter.Meter."""

    def __init__(self, host: HostCgroup, limits: CallLimits):
        """Make the cgroup and set its limits. Raises OSError."""
        self._host, self._name, self._memory_limit = host.fd, f"call-{secrets.token_hex(8)}", limits.memory_bytes
        # files in the scratch folder may be in memory (two tmpfs), and the kernel then counts them as memory
        self._max_bytes = limits.memory_bytes + limits.scratch_bytes + limits.scratch_bytes // 4 + KERNEL_BYTES
        os.mkdir(self._name, dir_fd=self._host)
        self.fd = -1
        try:
            self.fd = os.open(self._name, FOLDER, dir_fd=self._host)
            _write("memory.max", str(self._max_bytes), self.fd)
            _write("memory.oom.group", "1", self.fd)
            _write("pids.max", str(limits.max_processes), self.fd)
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                _write("memory.swap.max", "0", self.fd)
        except OSError:
            self.remove()
            raise

    def adopt(self, pid: int) -> None:
        """Move a process into the cgroup, before the process can start others. Raises OSError."""
        _write("cgroup.procs", str(pid), self.fd)

    def measure(self, pids: list[int]) -> tuple[int, float, int]:
        """Return memory (bytes, without files), CPU time (seconds, with ended processes) and number of tasks.

        `pids` is unused: Meter needs a list of processes, the kernel does not."""
        memory_bytes = int(self._read("memory.current"))
        if memory_bytes > self._memory_limit:
            memory_bytes -= field(self._read("memory.stat"), "file")
        return memory_bytes, field(self._read("cpu.stat"), "usage_usec") / 1e6, int(self._read("pids.current"))

    def ran_out_of_memory(self) -> bool:
        """Return True if the kernel killed the call at its memory limit, not for a lack of memory elsewhere."""
        with contextlib.suppress(OSError):
            events = self._read("memory.events")
            return field(events, "oom") > 0 and field(events, "oom_kill") > 0
        return False

    def remove(self) -> None:
        """Kill the processes of the call, and remove the cgroup. Never raises."""
        _remove(self._name, self._host)
        if self.fd >= 0:
            os.close(self.fd)

    def _read(self, name: str) -> str:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            return os.read(fd, 1 << 16).decode()
        finally:
            os.close(fd)


def field(text: str, name: str) -> int:
    """Return one value of a flat file: field("low 0\\nmax 3\\n", "max") -> 3. 0 if the field is missing."""
    found = re.search(rf"^{re.escape(name)} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
