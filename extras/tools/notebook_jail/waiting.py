"""Checks on a worker between two cells. Is the worker stopped? Was it touched? Would a fork copy the whole session?"""

from __future__ import annotations

import os
import signal

OWN_FDS = {"0", "1", "2", "3"}
"""File descriptors of a worker. A copy shares only the first (/dev/null), and gets new files for the others."""


def stop(worker: int) -> bool:
    """Stop a child process, and wait for the stop. Return False if the process has ended."""
    os.kill(worker, signal.SIGSTOP)
    return os.waitid(os.P_PID, worker, os.WEXITED | os.WSTOPPED | os.WNOWAIT).si_code == os.CLD_STOPPED


def is_stopped(worker: int) -> bool:
    """Return whether a child process is stopped. False also for a process at or near its end."""
    state = os.waitid(os.P_PID, worker, os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG)
    return state is not None and state.si_code == os.CLD_STOPPED


def is_alive(pid: int) -> bool:
    """Return whether the process runs. False for a zombie (ended, but the parent has not yet waited for it)."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def is_untouched(worker: int) -> bool:
    """Return whether all threads of a process are stopped, with no pending signal."""
    try:
        tasks = os.listdir(f"/proc/{worker}/task")
        states = [_status(f"/proc/{worker}/task/{task}/status") for task in tasks]
    except OSError:
        return False
    return all(state["State"].startswith("T") and not _has_signals(state) for state in states)


def is_whole(worker: int) -> bool:
    """Return whether a fork copies the whole session. The worker must not be hidden.

    A fork does not copy threads, children, open and mapped files, timers, and pending signals.
    """
    folder = f"/proc/{worker}"
    try:
        with open(f"{folder}/maps", "rb") as file:
            has_lost_files = b" (deleted)\n" in file.read()
        fds = set(os.listdir(f"{folder}/fd"))
        has_files = not fds <= OWN_FDS or ("0" in fds and os.readlink(f"{folder}/fd/0") != os.devnull)
        with open(f"{folder}/task/{worker}/children") as file:
            is_alone = len(os.listdir(f"{folder}/task")) == 1 and not file.read().split()
        has_signals = _has_signals(_status(f"{folder}/status"))
        return is_alone and not has_files and not has_lost_files and not has_signals and not _has_timers(folder)
    except OSError:
        return False


def _has_timers(folder: str) -> bool:
    """Return whether a process has timers of timer_create. The worker itself checks the timers of setitimer."""
    path = f"{folder}/timers"
    if not os.path.exists(path):  # a kernel without CONFIG_CHECKPOINT_RESTORE: unknown
        return False
    with open(path) as file:
        return bool(file.read())


def _has_signals(status: dict[str, str]) -> bool:
    return any(int(status[name], 16) for name in ("SigPnd", "ShdPnd"))


def _status(path: str) -> dict[str, str]:
    """Return the fields of a /proc/PID/status. Raises OSError."""
    with open(path, errors="replace") as file:  # a process chooses its name, perhaps not in UTF-8
        return dict(line.rstrip("\n").partition(":\t")[::2] for line in file)
