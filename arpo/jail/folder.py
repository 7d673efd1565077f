"""Tier C, only if the user accepts it: rlimits and a work folder, without isolation. Landlock builds on it."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from types import ModuleType

from . import syscalls as kernel
from .cgroup import HostCgroup
from .limits import CallLimits, set_rlimits
from .trees import exceeds, nameless_bytes


class FolderJail:
    """The methods of a jail for host, supervisor and worker. NamespaceJail has the same methods."""

    tier = "none"
    has_proc = True
    """True if /proc shows the processes of a call. Without /proc a call may have only one process."""
    cgroup: HostCgroup | None = None
    """Parent of the calls' cgroups; None: limits on sums are polled."""
    sessions: ModuleType | None = None
    """The package of CallLimits.sessions."""

    def __init__(self, limits: CallLimits):
        """Called once, in the host. Raises OSError if the machine does not allow this kind of jail."""
        self.limits = limits
        # not in /dev/shm: in Docker this has 64 MB, needed by the trainer's NCCL and data loaders
        self.base: str | None = tempfile.mkdtemp(prefix="arpo-python-")
        """Parent of the calls' folders; None: a call's folder disappears with the call's namespaces."""
        os.chmod(self.base, 0o711)
        self.worker_uid: int | None = None
        self._zygote = os.getpid()

    def fork(self) -> int:
        """Fork a supervisor (called in the zygote). It dies with the zygote."""
        pid = os.fork()
        if pid == 0:
            kernel.die_with(self._zygote)
        return pid

    def open_scratch(self) -> str:
        """Make the writable folder of the call (called in the supervisor)."""
        scratch = tempfile.mkdtemp(prefix="call-", dir=self.base)
        if self.worker_uid is not None:
            os.chown(scratch, self.worker_uid, self.worker_uid)
        return scratch

    def confine(self, scratch: str) -> None:
        """Confine this process, and let it die with the supervisor (called in the worker, before the model's code)."""
        supervisor = os.getppid()
        if self.worker_uid is not None:
            os.setgroups([])
            os.setresgid(self.worker_uid, self.worker_uid, self.worker_uid)
            os.setresuid(self.worker_uid, self.worker_uid, self.worker_uid)
        kernel.die_with(supervisor)  # after setuid, which clears it
        set_rlimits(self.limits, count_processes=False)
        # The kernel shows the supervisor the worker's open files only if the worker is dumpable. The code gains
        # nothing: Landlock hides /proc from it, and the filter forbids calls that look into processes.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)

    def processes(self, worker: int) -> list[int]:
        """Return the processes of the call, for sums of their use (called in the supervisor)."""
        return [worker]

    def is_over_quota(self, worker: int, scratch: str) -> bool:
        """Return True if the call's files are too many, too large or too deep (called in the supervisor).

        No tmpfs limits the files here, so the supervisor counts them. A call may exceed the limit between two polls.
        """
        with kernel.file_user(self.worker_uid):
            removed = nameless_bytes(worker, scratch, self.limits.max_file_bytes)
        kernel.die_with(self._zygote)  # file_user has cleared the setting
        return exceeds(scratch, self.limits, removed)

    def kill(self, worker: int) -> None:
        """End all processes of the call (called in the supervisor)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
