"""Questions about a worker that waits for its next cell: is it stopped, was it touched, would a fork copy all of it?"""

from __future__ import annotations

import os
import signal

OWN_FDS = {"0", "1", "2", "3"}
"""Descriptors of a worker. A copy gets others for all but the first, which is /dev/null."""


def stop(worker: int) -> bool:
    """Stop a child process, and wait until it is stopped. Return False if it has ended."""
    os.kill(worker, signal.SIGSTOP)
    return os.waitid(os.P_PID, worker, os.WEXITED | os.WSTOPPED | os.WNOWAIT).si_code == os.CLD_STOPPED


def is_stopped(worker: int) -> bool:
    """Return whether a child process is stopped; not if it has ended, or is about to."""
    state = os.waitid(os.P_PID, worker, os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG)
    return state is not None and state.si_code == os.CLD_STOPPED


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie, which its parent has not waited for, does not."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def is_untouched(worker: int) -> bool:
    """Return whether all threads of a process are stopped, and no signal waits for it."""
    try:
        tasks = os.listdir(f"/proc/{worker}/task")
        states = [_status(f"/proc/{worker}/task/{task}/status") for task in tasks]
    except OSError:
        return False
    return all(state["State"].startswith("T") and not _has_signals(state) for state in states)


def is_whole(worker: int) -> bool:
    """Return whether a fork of the worker, which must not be hidden, copies all of the session.

    It does not copy threads, children, open and mapped files, timers, and signals that wait.
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
    """Return whether a process has timers of timer_create; those of setitimer the worker itself knows."""
    path = f"{folder}/timers"
    if not os.path.exists(path):  # a kernel without CONFIG_CHECKPOINT_RESTORE does not tell
        return False
    with open(path) as file:
        return bool(file.read())


def _has_signals(status: dict[str, str]) -> bool:
    return any(int(status[name], 16) for name in ("SigPnd", "ShdPnd"))


def _status(path: str) -> dict[str, str]:
    """Return the fields of a /proc/PID/status. Raises OSError."""
    with open(path, errors="replace") as file:  # a process names itself
        return dict(line.rstrip("\n").partition(":\t")[::2] for line in file)
