"""Tier C, only where the user accepts it: rlimits and a folder to work in. No isolation; Landlock builds on it."""

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
    """The methods are those of jail.py."""

    tier = "none"
    has_proc = True

    def __init__(self, limits: CallLimits):
        self.limits = limits
        # not in /dev/shm: Docker gives it 64 MB, and the trainer's NCCL and data loaders live there
        self.base = tempfile.mkdtemp(prefix="arpo-python-")
        os.chmod(self.base, 0o711)
        self.worker_uid: int | None = None

    def fork(self) -> int:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != zygote:  # it died before the line above
                os._exit(1)
        return pid

    def open_scratch(self) -> str:
        scratch = tempfile.mkdtemp(prefix="call-", dir=self.base)
        if self.worker_uid is not None:
            os.chown(scratch, self.worker_uid, self.worker_uid)
        return scratch

    def confine(self, scratch: str) -> None:
        """The worker must not outlive its supervisor: nobody else would stop it."""
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
        return [worker]

    def is_over_quota(self, scratch: str) -> bool:
        """Counted, since there is no tmpfs of a size here; so a call may overshoot by what it writes between polls."""
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
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    def close_scratch(self, scratch: str) -> None:
        remove_tree(scratch)

    def close(self) -> None:
        remove_tree(self.base)


def remove_tree(folder: str, patience_s: float = 2.0) -> None:
    """Remove a folder that model code wrote to: closed folders in it, and perhaps a process that dies just now."""
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
