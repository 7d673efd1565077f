"""The worker of a session: as the jail's worker, but code comes cell by cell, and the names that a cell makes stay.

A fork of it is a copy of the session: the supervisor asks for one between two cells. Nothing that this process says is
believed: a false answer ends its own cell early, or leaves its own session without a copy.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import types
from collections.abc import Callable
from typing import NoReturn

from jail import syscalls as kernel
from jail import wire
from jail.worker import CHANNEL_FD, without_file

READY, CELL, FORK = b"R", b"c", b"f"
"""The worker's first message; the supervisor's before a cell's code; and what announces a copy. The worker sends FORK
back and can be looked at; the supervisor sends it again, with the copy's stdout, stderr and channel if there may be
one; and the worker sends it back when it has made the copy, or could not."""
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def serve_cells(home: str, run_code: Callable[[str, types.ModuleType], int], main: types.ModuleType) -> NoReturn:
    """Answer the supervisor until it is gone. A cell's answer is one byte, its exit code."""
    channel = socket.socket(fileno=CHANNEL_FD)
    _hide(True)
    channel.sendall(READY)
    while True:
        request = channel.recv(1)
        if request == FORK:
            _fork(channel)
            continue
        if request != CELL:
            os._exit(0)
        code = wire.receive_block(channel, wire.MAX_CODE_BYTES).decode()
        worker = os.getpid()
        _hide(False)
        os.chdir(home)  # the folder of the last cell is gone
        exit_code = run_code(without_file(code), main)
        exit_code = _flush() or exit_code
        if os.getpid() != worker:  # a child that the code has forked, and that came back from it
            os._exit(exit_code)
        _hide(True)
        channel.sendall(bytes([exit_code]))


def _hide(hidden: bool) -> None:
    """Let nobody of our user read this process's memory and open files in /proc, or let them.

    The other sessions of the family have our user and see our number. While a cell of theirs runs, we wait, hidden.
    While one of ours does, they are stopped, and the supervisor must see what we use.
    """
    with contextlib.suppress(OSError):  # the filter forbids it where sessions do not see each other
        kernel.prctl(kernel.PR_SET_DUMPABLE, int(not hidden))


def _fork(channel: socket.socket) -> None:
    """Return in this process, and in a copy of it whose parent is the supervisor, on descriptors that it sends.

    Where there can be no copy, the descriptors are closed, which tells the supervisor.
    """
    _hide(False)
    channel.sendall(FORK)
    _, fds, _, _ = socket.recv_fds(channel, 1, 3)
    state = random.getstate()  # a fork seeds it anew
    child = 1
    with contextlib.suppress(OSError):  # no process to be had; or the code ignores SIGCHLD
        if len(fds) == 3 and not any(sum(signal.getitimer(timer)) for timer in TIMERS):  # a fork would have none
            child = os.fork()
            if child:
                os.waitpid(child, 0)
    if child:
        for fd in fds:
            os.close(fd)
        _hide(True)
        os.write(CHANNEL_FD, FORK)  # the process between us and the copy has been waited for
        return
    if os.fork():
        os._exit(0)
    for fd, target in zip(fds, (1, 2, CHANNEL_FD)):  # noqa: B905, as Python 3.9 has no strict
        os.dup2(fd, target)
        os.close(fd)
    random.setstate(state)
    _hide(True)
    os.write(CHANNEL_FD, READY)


def _flush() -> int:
    """Return 0, or the exit code of a cell whose output cannot be written."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except BaseException:
        return 120  # as CPython at its end
    return 0
