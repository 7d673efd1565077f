"""Tier C, only if the user accepts it: rlimits and a folder to work in. No isolation; Landlock builds on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time

from . import syscalls as kernel
from .limits import CallLimits, set_rlimits


class FolderJail:
    """A jail's methods for host, supervisor and worker; NamespaceJail has the same."""

    tier = "none"
    has_proc = True
    """True where /proc shows a call's processes. Without it their memory cannot be summed up: there may be only one."""

    def __init__(self, limits: CallLimits):
        """Called once, in the host. Raises OSError if the machine does not allow this kind of jail."""
        self.limits = limits
        # not in /dev/shm: Docker gives it 64 MB, and the trainer's NCCL and data loaders live there
        self.base = tempfile.mkdtemp(prefix="arpo-python-")
        os.chmod(self.base, 0o711)
        self.worker_uid: int | None = None

    def fork(self) -> int:
        """Fork a supervisor (called in the zygote). Whatever it leaves behind must not outlive it."""
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != zygote:  # it died before the line above
                os._exit(1)
        return pid

    def open_scratch(self) -> str:
        """Make the folder that the call may write to (called in the supervisor)."""
        scratch = tempfile.mkdtemp(prefix="call-", dir=self.base)
        if self.worker_uid is not None:
            os.chown(scratch, self.worker_uid, self.worker_uid)
        return scratch

    def confine(self, scratch: str) -> None:
        """Give up everything else, and die with the supervisor (called in the worker, just before the model's code)."""
        supervisor = os.getppid()
        if self.worker_uid is not None:
            os.setgroups([])
            os.setresgid(self.worker_uid, self.worker_uid, self.worker_uid)
            os.setresuid(self.worker_uid, self.worker_uid, self.worker_uid)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after setuid, which clears it
        if os.getppid() != supervisor:
            os._exit(1)
        set_rlimits(self.limits, count_processes=False)

    def processes(self, worker: int) -> list[int]:
        """Return the processes of the call whose use is summed up (called in the supervisor)."""
        return [worker]

    def is_over_quota(self, scratch: str) -> bool:
        """Return whether the call's files are too many or too large (called in the supervisor, between polls). They are
        counted, as no tmpfs limits them here, so a call may overshoot by what it writes between two polls."""
        num_bytes = num_inodes = 0
        folders = [scratch]
        while folders:
            try:
                entries = list(os.scandir(folders.pop()))
            except OSError:  # removed, or made unreadable, since it was listed
                continue
            for entry in entries:
                num_inodes += 1
                with contextlib.suppress(OSError):
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                if num_inodes > self.limits.scratch_inodes or num_bytes > self.limits.scratch_bytes:
                    return True
        return False

    def kill(self, worker: int) -> None:
        """End all processes of the call (called in the supervisor)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    def close_scratch(self, scratch: str) -> None:
        """Remove the folder (called in the supervisor, after `kill`)."""
        remove_tree(scratch)

    def close(self) -> None:
        """Clean up when the trainer is gone (called in the zygote)."""
        remove_tree(self.base)


def remove_tree(folder: str, patience_s: float = 2.0) -> None:
    """Remove a folder that model code wrote to: it may have closed folders in it, and a process may still be dying."""
    deadline = time.monotonic() + patience_s
    while os.path.lexists(folder):
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
        for path, folders, _ in os.walk(folder):
            for name in folders:
                inner = os.path.join(path, name)
                if not os.path.islink(inner):
                    with contextlib.suppress(OSError):
                        os.chmod(inner, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > deadline:
            return
        if os.path.lexists(folder):
            time.sleep(0.02)
