"""S, the supervisor of one call. The host forks it before the call arrives.

The supervisor forks the worker, enforces all limits missing in the kernel, sends the reply, and ends all processes of
the call. In tier A the supervisor is PID 1 of the call's pid namespace. When PID 1 exits, the kernel kills all other
processes of the namespace.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field

from . import syscalls as kernel
from . import wire
from .cgroup import CallCgroup
from .folder import FolderJail
from .limits import BUSY_NICE, CallLimits
from .meter import Meter
from .namespaces import NamespaceJail
from .worker import run_worker

POLL_S = 0.05
QUOTA_POLL_S = 0.02
"""Seconds between two counts of the call's files, if the kernel does not limit files."""
BUSY_CPU_S = 0.2
"""CPU seconds until a call gets a lower priority, so that a few endless loops do not delay the other calls."""
KILL_PATIENCE_S = 2.0
IO_TIMEOUT_S = 10.0
READ_BYTES = 1 << 16
MAX_READ_PER_TURN = 1 << 20


@dataclass
class Stream:
    """A pipe from the worker. Keeps the first and the last `kept_bytes // 2` bytes."""

    fd: int
    kept_bytes: int
    num_bytes: int = 0
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)

    def drain(self) -> bool:
        """Read the available bytes. Return False at the pipe's end.

        At most MAX_READ_PER_TURN bytes are read, since a writer may never pause.
        """
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
            self._tail += data[room:]
            del self._tail[: max(0, len(self._tail) - self.kept_bytes // 2)]
        return True

    def text(self) -> bytes:
        num_cut = self.num_bytes - len(self._head) - len(self._tail)
        mark = f"\n... [{num_cut} bytes cut] ...\n".encode() if num_cut > 0 else b""
        return bytes(self._head) + mark + bytes(self._tail)


def prepare_worker(jail: FolderJail | NamespaceJail) -> Spare:
    """Prepare the worker and its streams before a call arrives. Raises OSError."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # If the kernel groups processes by session (autogroup), niceness counts only within a group. So give each call a
    # group of its own.
    os.setsid()
    group_fd = None
    with contextlib.suppress(OSError):
        group_fd = os.open("/proc/self/autogroup", os.O_WRONLY | os.O_CLOEXEC)
    scratch = jail.open_scratch()
    streams, (out_write, err_write) = prepare_streams(jail.limits)
    ours, theirs = socket.socketpair()
    cgroup = CallCgroup(jail.cgroup, jail.limits) if jail.cgroup else None
    try:
        worker = os.fork()
        if worker and cgroup:
            cgroup.adopt(worker)  # before it has any code
    except OSError:
        if cgroup:
            cgroup.remove()
        raise
    if worker == 0:
        run_worker(jail, scratch, out_write, err_write, theirs.fileno())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no handler: PID 1 then receives no SIGINT
    theirs.close()
    for fd in (out_write, err_write):
        os.close(fd)
    return Spare(jail, worker, scratch, ours, *streams, cgroup, group_fd)


def prepare_streams(limits: CallLimits) -> tuple[list[Stream], list[int]]:
    """Return a worker's stdout and stderr (reading ends), and the descriptors of the writing ends."""
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
    for fd, _ in pipes:
        os.set_blocking(fd, False)
    return [Stream(fd, limits.kept_output_bytes) for fd, _ in pipes], [fd for _, fd in pipes]


@dataclass
class Spare:
    """A worker waiting for its code. The worker is confined, or about to be."""

    jail: FolderJail | NamespaceJail
    worker: int
    scratch: str
    channel: socket.socket
    """Sends the code to the worker. Returns the reason if the worker could not be confined. The worker closes its end
    before it runs the code."""
    stdout: Stream
    stderr: Stream
    cgroup: CallCgroup | None = None
    group_fd: int | None = None
    """File for the priority of the call's process group; None: no such file, or the priority has been set."""

    def serve(self, conn: socket.socket, host_bytes: int) -> None:
        """Serve one call on `conn`: send hello, receive the code, send the reply. `host_bytes`: see meter.Meter.

        An exception closes the connection, and the trainer then repeats the call.
        """
        conn.settimeout(IO_TIMEOUT_S)
        conn.sendall(wire.HELLO)
        code = wire.receive_block(conn, wire.MAX_CODE_BYTES)
        started = time.monotonic()
        is_sent = False
        with contextlib.suppress(OSError):  # the worker has ended already
            self.channel.settimeout(IO_TIMEOUT_S)
            self.channel.sendall(code)
            self.channel.shutdown(socket.SHUT_WR)
            is_sent = True
        pidfd = kernel.pidfd_open(self.worker)
        meter = self.cgroup or Meter(self.jail.limits.memory_bytes, host_bytes)
        verdict = self._watch(conn, pidfd, started + self.jail.limits.wall_s, meter)
        self.jail.kill(self.worker)
        header = self._bury(pidfd, verdict)
        error_text, set_up_error = self.stderr.text(), b""
        with contextlib.suppress(OSError):  # nothing was written
            set_up_error = self.channel.recv(4096, socket.MSG_DONTWAIT)
        if set_up_error:
            header, error_text = {"status": "sandbox_error"}, set_up_error
        elif not is_sent:
            raise ConnectionError("the worker was lost before it had its code")
        header["wall_s"] = round(time.monotonic() - started, 4)
        conn.settimeout(IO_TIMEOUT_S)
        wire.send_reply(conn, header, self.stdout.text(), error_text)

    def _watch(self, conn: socket.socket, pidfd: int, deadline: float, meter: Meter | CallCgroup) -> str | None:
        """Wait for the end of the worker. Return None, or the name of the limit if the call exceeds a limit first."""
        poll_s = QUOTA_POLL_S if self.jail.base else POLL_S
        poller = select.poll()
        streams = {stream.fd: stream for stream in (self.stdout, self.stderr)}
        for fd in (*streams, pidfd):
            poller.register(fd, select.POLLIN)
        poller.register(conn.fileno(), select.POLLRDHUP)
        next_check = time.monotonic() + poll_s
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= next_check:
                next_check = now + poll_s
                verdict = self._exceeded(meter)
                if verdict:
                    return verdict
            wait_s = min(deadline, next_check) - now
            ready = {fd for fd, _ in poller.poll(max(1, int(wait_s * 1000)))}
            if conn.fileno() in ready:
                return "client_gone"
            for fd in ready & streams.keys():
                if not streams[fd].drain():
                    poller.unregister(fd)
            if sum(stream.num_bytes for stream in streams.values()) > self.jail.limits.max_output_bytes:
                return "output_limit"
            if pidfd in ready:
                return None

    def _exceeded(self, meter: Meter | CallCgroup) -> str | None:
        pids = self.jail.processes(self.worker)
        memory_bytes, cpu_s, num_tasks = meter.measure(pids)
        if cpu_s > BUSY_CPU_S:
            self._step_back(pids)
        if cpu_s > self.jail.limits.cpu_s:  # RLIMIT_CPU is per process; this is the sum
            return "cpu_limit"
        if memory_bytes > self.jail.limits.memory_bytes:
            return "memory_limit"
        if num_tasks > self.jail.limits.max_processes:  # needed only without RLIMIT_NPROC
            return "process_limit"
        return "disk_limit" if self.jail.base and self.jail.is_over_quota(self.worker, self.scratch) else None

    def _step_back(self, pids: list[int]) -> None:
        """Lower the priority of these processes' threads and of the call's group. Calls with less CPU time go first."""
        nice = os.getpriority(os.PRIO_PROCESS, 0) + BUSY_NICE
        for task in (task for pid in pids for task in glob.glob(f"/proc/{pid}/task/*")):
            with contextlib.suppress(OSError):  # the thread has ended, or has a lower priority already
                os.setpriority(os.PRIO_PROCESS, int(os.path.basename(task)), nice)
        if self.group_fd is not None:
            with contextlib.suppress(OSError):  # EAGAIN right after another such write: repeat at the next poll
                os.write(self.group_fd, str(BUSY_NICE).encode())
                os.close(self.group_fd)
                self.group_fd = None

    def _bury(self, pidfd: int, verdict: str | None) -> dict[str, object]:
        """Reap the worker, read the rest of its output, and return the reply's header with the status."""
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(KILL_PATIENCE_S * 1000):  # uninterruptible sleep: the kernel ends it later
            return {"status": verdict or "killed"}
        _, status, used = os.wait4(self.worker, 0)
        for stream in (self.stdout, self.stderr):
            stream.drain()
        exit_code = os.waitstatus_to_exitcode(status)
        verdict = verdict or self._how_it_ended(exit_code, used.ru_utime + used.ru_stime)
        return {"status": verdict, "exit_code": exit_code}

    def _how_it_ended(self, exit_code: int, cpu_s: float) -> str:
        if exit_code >= 0:
            return "error" if exit_code else "ok"
        if exit_code == -signal.SIGKILL and self.cgroup and self.cgroup.ran_out_of_memory():
            return "memory_limit"
        if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and cpu_s >= self.jail.limits.cpu_s):
            return "cpu_limit"
        if exit_code == -signal.SIGXFSZ:
            return "file_limit"
        return "killed" if exit_code == -signal.SIGKILL else "signal"
