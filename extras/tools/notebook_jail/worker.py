"""The worker of a session. It works like the jail's worker, but code comes cell by cell, and variables stay.

A fork of the worker is a copy of the session. The supervisor asks for a fork between two cells. The supervisor trusts
no answer of the worker: a false answer can only end the worker's cell early, or leave the session without a copy.
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

READY = b"R"
CELL = b"c"
FORK = b"f"
"""READY is the worker's first message. The supervisor sends CELL before a cell's code. FORK announces a copy, in four
steps: the supervisor sends FORK; the worker sends FORK back, and the supervisor inspects the worker; the supervisor
sends FORK again, with the copy's stdout, stderr and channel if a copy is allowed; the worker makes the copy or fails,
and sends FORK back."""
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def serve_cells(home: str, run_code: Callable[[str, types.ModuleType], int], main: types.ModuleType) -> NoReturn:
    """Answer the supervisor until the supervisor is gone. The answer to a cell is one byte, the exit code."""
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
        if os.getpid() != worker:  # a child forked by the code, returning into this loop
            os._exit(exit_code)
        _hide(True)
        channel.sendall(bytes([exit_code]))


def _hide(hidden: bool) -> None:
    """Hide this process's memory and open files in /proc from processes of the same user, or show them.

    The other sessions of the family run as the same user and see our pid. While another session's cell runs, we wait,
    hidden. While our cell runs, the other sessions are stopped, and the supervisor must see our resources.
    """
    with contextlib.suppress(OSError):  # forbidden by the filter if sessions cannot see each other
        kernel.prctl(kernel.PR_SET_DUMPABLE, int(not hidden))


def _fork(channel: socket.socket) -> None:
    """Fork: return in this process, and in a copy. The supervisor is the copy's parent, and sends its descriptors.

    If no copy can be made, close the descriptors. The supervisor notices the closed descriptors.
    """
    _hide(False)
    channel.sendall(FORK)
    _, fds, _, _ = socket.recv_fds(channel, 1, 3)
    state = random.getstate()  # a fork would seed `random` anew
    child = 1
    with contextlib.suppress(OSError):  # no process left, or the code ignores SIGCHLD
        if len(fds) == 3 and not any(sum(signal.getitimer(timer)) for timer in TIMERS):  # timers are not copied
            child = os.fork()
            if child:
                os.waitpid(child, 0)
    if child:
        for fd in fds:
            os.close(fd)
        _hide(True)
        os.write(CHANNEL_FD, FORK)  # the process between us and the copy is reaped
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
    """Write out all output. Return 0, or an exit code if the output cannot be written."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except BaseException:
        return 120  # as CPython at its end
    return 0
