"""S: one per call, there before it. Forks the worker, enforces the limits that the kernel does not, replies, and takes
all with it.

In tier A it is PID 1 of the call's pid namespace: when it exits the kernel kills whatever the call left behind.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass, field

from . import syscalls as kernel
from . import wire
from .jail import Jail
from .limits import CallLimits, step_back, usage
from .worker import run_worker

POLL_S = 0.05
QUOTA_POLL_S = 0.02
"""Seconds between two counts of the call's files, where the kernel does not limit them."""
BUSY_CPU_S = 0.2
"""A call that has used more lets those go first that have not: a few endless loops must not hold up all others."""
KILL_PATIENCE_S = 2.0
IO_TIMEOUT_S = 10.0
READ_BYTES = 1 << 16
MAX_READ_PER_TURN = 1 << 20


@dataclass
class Stream:
    """A pipe from the worker, of which the first and the last half of `kept_bytes` are kept."""

    fd: int
    kept_bytes: int
    num_bytes: int = 0
    _head: bytearray = field(default_factory=bytearray)
    _tail: deque[bytes] = field(default_factory=deque)
    _num_tail: int = 0

    def drain(self) -> bool:
        """Read what is there, but no more than a writer that never pauses can hold us with; False at its end."""
        for _ in range(MAX_READ_PER_TURN // READ_BYTES):
            try:
                data = os.read(self.fd, READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.num_bytes += len(data)
            room = self.kept_bytes // 2 - len(self._head)
            self._head += data[:room]
            self._keep_last(data[room:])
        return True

    def _keep_last(self, data: bytes) -> None:
        self._tail.append(data)
        self._num_tail += len(data)
        while self._num_tail - len(self._tail[0]) >= self.kept_bytes // 2:
            self._num_tail -= len(self._tail.popleft())

    def text(self) -> bytes:
        tail = b"".join(self._tail)[-(self.kept_bytes // 2) :]
        num_cut = self.num_bytes - len(self._head) - len(tail)
        mark = f"\n... [{num_cut} bytes cut] ...\n".encode() if num_cut > 0 else b""
        return bytes(self._head) + mark + tail


@dataclass
class Spare:
    """A worker that is confined, or on its way there, and waits for its code."""

    worker: int
    scratch: str
    channel: socket.socket
    """Code in; out: why the worker could not be confined. The worker closes it before it runs the code."""
    stdout: Stream
    stderr: Stream


def prepare_worker(jail: Jail, limits: CallLimits) -> Spare:
    """Do everything that does not depend on the code, before there is a call. Raises OSError."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    scratch = jail.open_scratch()
    out_read, out_write = os.pipe2(os.O_CLOEXEC)
    err_read, err_write = os.pipe2(os.O_CLOEXEC)
    ours, theirs = socket.socketpair()
    worker = os.fork()
    if worker == 0:
        run_worker(jail, scratch, out_write, err_write, theirs.fileno())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as PID 1 we get only signals we have handlers for: have none
    theirs.close()
    for fd in (out_write, err_write):
        os.close(fd)
    for fd in (out_read, err_read):
        os.set_blocking(fd, False)
    stdout, stderr = (Stream(fd, limits.kept_output_bytes) for fd in (out_read, err_read))
    return Spare(worker, scratch, ours, stdout, stderr)


def serve_call(jail: Jail, limits: CallLimits, spare: Spare, conn: socket.socket, host_bytes: int) -> None:
    """One call on `conn`: hello, code in, reply out. An exception closes the connection; the trainer then repeats."""
    conn.settimeout(IO_TIMEOUT_S)
    conn.sendall(wire.HELLO)
    code = wire.receive_block(conn, wire.MAX_CODE_BYTES)
    started = time.monotonic()
    is_sent = _send_code(spare.channel, code)
    stdout, stderr = spare.stdout, spare.stderr
    call = _Call(jail, limits, spare.scratch, spare.worker, host_bytes, deadline=started + limits.wall_s)
    verdict = call.watch(conn, stdout, stderr)
    jail.kill(spare.worker)
    header = call.bury(verdict, stdout, stderr)
    error_text = stderr.text()
    set_up_error = _set_up_error(spare.channel)
    if set_up_error:
        header, error_text = {"status": "sandbox_error"}, set_up_error
    elif not is_sent:
        raise ConnectionError("the worker was lost before it had its code")
    header["wall_s"] = round(time.monotonic() - started, 4)
    conn.settimeout(IO_TIMEOUT_S)
    wire.send_reply(conn, header, stdout.text(), error_text)


def _send_code(channel: socket.socket, code: bytes) -> bool:
    channel.settimeout(IO_TIMEOUT_S)
    try:
        channel.sendall(code)
        channel.shutdown(socket.SHUT_WR)
    except OSError:  # the worker is not there any more
        return False
    return True


def _set_up_error(channel: socket.socket) -> bytes:
    """Empty for a worker that got as far as its code: it has closed its end."""
    try:
        return channel.recv(4096, socket.MSG_DONTWAIT)
    except OSError:
        return b""


@dataclass
class _Call:
    jail: Jail
    limits: CallLimits
    scratch: str
    worker: int
    host_bytes: int
    deadline: float
    pidfd: int = -1

    def watch(self, conn: socket.socket, stdout: Stream, stderr: Stream) -> str | None:
        """Wait for the worker's end, None, or for the limit that it hits."""
        self.pidfd = kernel.pidfd_open(self.worker)
        poll_s = QUOTA_POLL_S if self.jail.tier != "namespaces" else POLL_S
        poller = select.poll()
        streams = {stdout.fd: stdout, stderr.fd: stderr}
        for fd in (*streams, self.pidfd):
            poller.register(fd, select.POLLIN)
        poller.register(conn.fileno(), select.POLLRDHUP)
        next_check = time.monotonic() + poll_s
        while True:
            now = time.monotonic()
            if now >= self.deadline:
                return "timeout"
            if now >= next_check:
                next_check = now + poll_s
                verdict = self._exceeded()
                if verdict:
                    return verdict
            wait_s = min(self.deadline, next_check) - now
            ready = {fd for fd, _ in poller.poll(max(1, int(wait_s * 1000)))}
            if conn.fileno() in ready:
                return "client_gone"
            for fd in ready & streams.keys():
                if not streams[fd].drain():
                    poller.unregister(fd)
            if stdout.num_bytes + stderr.num_bytes > self.limits.max_output_bytes:
                return "output_limit"
            if self.pidfd in ready:
                return None

    def _exceeded(self) -> str | None:
        pids = self.jail.processes(self.worker)
        current = usage(pids, self.host_bytes)
        if current.cpu_s > BUSY_CPU_S:
            step_back(pids)
        if current.cpu_s > self.limits.cpu_s:  # RLIMIT_CPU is per process; this is all of them
            return "cpu_limit"
        if current.memory_bytes > self.limits.memory_bytes:
            return "memory_limit"
        if current.num_tasks > self.limits.max_processes:  # only where RLIMIT_NPROC could not be used
            return "process_limit"
        return "disk_limit" if self.jail.is_over_quota(self.scratch) else None

    def bury(self, verdict: str | None, stdout: Stream, stderr: Stream) -> dict[str, object]:
        """Reap the worker, take the rest of its output, and decide how the call ended."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        if not poller.poll(KILL_PATIENCE_S * 1000):  # in an uninterruptible sleep: the kernel will finish it
            return {"status": verdict or "killed"}
        _, status, used = os.wait4(self.worker, 0)
        for stream in (stdout, stderr):
            stream.drain()
        cpu_s = used.ru_utime + used.ru_stime
        exit_code = os.waitstatus_to_exitcode(status)
        if verdict is None:
            verdict = self._how_it_ended(exit_code, cpu_s)
        return {"status": verdict, "exit_code": exit_code}

    def _how_it_ended(self, exit_code: int, cpu_s: float) -> str:
        if exit_code >= 0:
            return "error" if exit_code else "ok"
        if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and cpu_s >= self.limits.cpu_s):
            return "cpu_limit"
        if exit_code == -signal.SIGXFSZ:
            return "file_limit"
        return "killed" if exit_code == -signal.SIGKILL else "signal"
