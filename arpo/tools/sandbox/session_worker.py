"""The worker of a session: like worker.py, but its code comes cell by cell, and the names that a cell makes stay.

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

from . import wire

CHANNEL_FD = 3
"""Descriptor from which the code comes, and to which a worker writes why it could not be confined. For a single call it
is closed before the code runs, which could else write there too."""
READY, CELL, FORK = b"R", b"c", b"f"
"""The worker's first message; the supervisor's before a cell's code; the supervisor's with a copy's stdout, stderr and
channel, which the worker sends back when it has made the copy, or could not."""


def serve_cells(home: str, run_code: Callable[[str, types.ModuleType], int], main: types.ModuleType) -> NoReturn:
    """Answer the supervisor until it is gone. A cell's answer is one byte, its exit code."""
    channel = socket.socket(fileno=CHANNEL_FD)
    channel.sendall(READY)
    while True:
        request, fds, _, _ = socket.recv_fds(channel, 1, 3)
        if request == FORK and len(fds) == 3:
            _fork(fds)
            continue
        if request != CELL:
            os._exit(0)
        code = wire.receive_block(channel, wire.MAX_CODE_BYTES).decode()
        worker = os.getpid()
        os.chdir(home)  # the folder of the last cell is gone
        exit_code = run_code(code, main)
        exit_code = _flush() or exit_code
        if os.getpid() != worker:  # a child that the code has forked, and that came back from it
            os._exit(exit_code)
        channel.sendall(bytes([exit_code]))


def _fork(fds: list[int]) -> None:
    """Return in this process, and in a copy of it whose parent is the supervisor, on these descriptors.

    Where there can be no copy, the descriptors are closed, which tells the supervisor.
    """
    state = random.getstate()  # a fork seeds it anew
    child = 1
    with contextlib.suppress(OSError):  # no process to be had; or the code ignores SIGCHLD
        if signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0):  # a fork would not have it
            child = os.fork()
            if child:
                os.waitpid(child, 0)
    if child:
        for fd in fds:
            os.close(fd)
        os.write(CHANNEL_FD, FORK)  # the process between us and the copy has been waited for
        return
    if os.fork():
        os._exit(0)
    for fd, target in zip(fds, (1, 2, CHANNEL_FD)):  # noqa: B905, as Python 3.9 has no strict
        os.dup2(fd, target)
        os.close(fd)
    random.setstate(state)
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
