"""S, the supervisor of a family: a session and all sessions forked from it. S serves the cells one at a time.

A session is a worker (worker.py) waiting for the next cell. The state of a session is the worker's memory: between two
cells, S stops the worker, kills all processes started by the worker, and removes all files. So a fork of the worker is
a copy of the session. If a fork would not copy the entire session (waiting.py), S does not fork: the branch replays.

No session reads or writes the memory of another session. But a cell can send signals to the other workers: S kills
every worker woken, or with a pending signal, and the trainer replays the session.

    client                               supervisor S (PID 1 of the family's namespace)
      == session 1's socket ==>            worker 1, stopped      (READY, cells, exit codes on its channel)
      == session 2's socket ==>            worker 2, a fork of worker 1
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass

from jail import syscalls as kernel
from jail import wire
from jail.limits import MAX_FAMILY
from jail.meter import Meter
from jail.supervisor import BUSY_CPU_S, IO_TIMEOUT_S, Spare, Stream, prepare_streams
from jail.trees import remove_tree

from . import COPY, GREET
from .waiting import is_alive, is_stopped, is_untouched, is_whole, stop
from .worker import CELL, FORK, READY

KILL_PATIENCE_S = 2.0
CREDENTIALS = struct.Struct("3i")


@dataclass
class Member(Spare):
    """One session: a worker, the client's socket, and the resources used so far."""

    conn: socket.socket | None = None
    cpu_s: float = 0.0
    """CPU seconds of all cells of the session, including the cells before the fork."""
    others: tuple[int, ...] = ()
    """Workers of the other sessions, while a cell runs."""
    cell_cpu_s: float = 0.0
    kept_bytes: int = 0
    """Memory not shared with the host, at the last measurement, in bytes."""
    _before_s: float | None = None

    def run(self, code: bytes, host_bytes: int) -> tuple[dict[str, object], bytes, bytes]:
        """Run a cell. Return the reply's header, stdout and stderr."""
        started = time.monotonic()
        for stream in (self.stdout, self.stderr):  # drop output written after the last cell's end
            stream.drain()
        self.stdout, self.stderr = (Stream(s.fd, s.kept_bytes) for s in (self.stdout, self.stderr))
        self.cell_cpu_s, self._before_s = 0.0, None
        if not is_stopped(self.worker):
            raise ConnectionError("the worker was lost between two cells")  # not the fault of this cell
        pidfd = kernel.pidfd_open(self.worker)
        meter = Meter(self.jail.limits.memory_bytes, host_bytes)
        self._exceeded(meter)
        with contextlib.suppress(BlockingIOError):  # drop messages the code wrote after the last cell
            self.channel.settimeout(0)
            while self.channel.recv(4096):
                pass
        os.kill(self.worker, signal.SIGCONT)
        with contextlib.suppress(OSError):  # the worker is gone: `_watch` notices
            self.channel.settimeout(IO_TIMEOUT_S)
            self.channel.sendall(CELL)
            wire.send_block(self.channel, code)
        verdict = self._watch(self.conn, self.channel.fileno(), started + self.jail.limits.wall_s, meter)
        answer = b""
        with contextlib.suppress(OSError):
            self.channel.settimeout(0)
            answer = self.channel.recv(1)
        if answer and not verdict and stop(self.worker):
            verdict = self._exceeded(meter)
        else:
            answer = b""
        self.cpu_s += self.cell_cpu_s
        if answer and not verdict:
            for stream in (self.stdout, self.stderr):
                stream.drain()
            header = {"status": "error" if answer[0] else "ok", "exit_code": answer[0], "is_open": True}
            header["memory_bytes"] = self.kept_bytes
        else:
            with contextlib.suppress(OSError):
                os.kill(self.worker, signal.SIGKILL)
            header = self._bury(pidfd, verdict)
        os.close(pidfd)
        header["wall_s"] = round(time.monotonic() - started, 4)
        return header, self.stdout.text(), self.stderr.text()

    def _exceeded(self, meter: Meter) -> str | None:
        kill_touched(self.others)
        pids = [pid for pid in self.jail.processes(self.worker) if pid not in self.others]
        memory_bytes, cpu_s, num_tasks = meter.measure(pids)
        self.kept_bytes = max(0, memory_bytes - meter.host_bytes)
        self._before_s = cpu_s if self._before_s is None else self._before_s
        self.cell_cpu_s = cpu_s - self._before_s
        limits = self.jail.limits
        if self.cell_cpu_s > BUSY_CPU_S:
            self._step_back(pids)
        if self.cell_cpu_s > limits.cpu_s or self.cpu_s + self.cell_cpu_s > limits.session_cpu_s:
            return "cpu_limit"
        if memory_bytes > limits.memory_bytes:
            return "memory_limit"
        if num_tasks > limits.max_processes:
            return "process_limit"
        return "disk_limit" if self.jail.base and self.jail.is_over_quota(self.worker, self.scratch) else None


def serve(spare: Spare, conn: socket.socket, host_bytes: int) -> None:
    """Serve the session of the spare worker, and all copies of the session. The host calls this in a supervisor."""
    Family(spare, conn, host_bytes).serve()


class Family:
    """The sessions of one supervisor."""

    def __init__(self, spare: Spare, conn: socket.socket, host_bytes: int):
        """Use the spare's worker for the first session. Raises OSError if the worker could not be confined."""
        self.host_bytes = host_bytes
        first = Member(**{name: getattr(spare, name) for name in spare.__dataclass_fields__}, conn=conn)
        first.channel.settimeout(IO_TIMEOUT_S)
        if first.channel.recv(4096) != READY:
            raise ConnectionError("the worker could not be confined")
        stop(first.worker)
        self.jail, self.members = first.jail, {conn.fileno(): first}
        conn.settimeout(IO_TIMEOUT_S)

    def serve(self) -> None:
        """Answer the clients until all of them have closed their sessions."""
        poller = select.poll()
        for fd in self.members:
            poller.register(fd, select.POLLIN)
        while self.members:
            for fd, _ in poller.poll():
                member = self.members[fd]
                copy = None
                try:
                    is_open, copy = self._answer(member)
                except (OSError, EOFError, ValueError):  # the client is gone
                    is_open = False
                if copy:
                    self.members[copy.conn.fileno()] = copy
                    poller.register(copy.conn.fileno(), select.POLLIN)
                if not is_open:
                    poller.unregister(fd)
                    self._close(self.members.pop(fd))

    def _answer(self, member: Member) -> tuple[bool, Member | None]:
        """Answer a request. Return whether the session goes on, and the copy, if the client asked for a copy."""
        request = wire.receive_block(member.conn, wire.MAX_CODE_BYTES)
        if request == COPY:
            _, [fd], _, _ = socket.recv_fds(member.conn, 1, 1)
            conn = socket.socket(fileno=fd)
            conn.settimeout(IO_TIMEOUT_S)
            copy = self._copy(member, conn) if len(self.members) < MAX_FAMILY else None
            if copy is None:
                conn.close()
            wire.send_reply(member.conn, {"status": "ok" if copy else "cannot_fork"}, b"", b"")
            return True, copy
        member.conn.sendall(wire.HELLO)
        if request == GREET:
            return True, None
        member.others = tuple(m.worker for m in self.members.values() if m is not member)
        header, stdout, stderr = member.run(request, self.host_bytes)
        self._clean(member)
        # A woken worker may have sent a signal to a worker checked earlier in the loop.
        while kill_touched(member.others):
            pass
        if header.get("is_open"):
            header["memory_bytes"] += self._file_bytes(member.scratch)
        wire.send_reply(member.conn, header, stdout, stderr)
        return bool(header.get("is_open")), None

    def _copy(self, member: Member, conn: socket.socket) -> Member | None:
        """Ask the worker to fork, and return the copy. Return None if the worker does not fork, or must not."""
        os.kill(member.worker, signal.SIGCONT)
        try:
            member.channel.settimeout(IO_TIMEOUT_S)
            member.channel.sendall(FORK)
            if member.channel.recv(1) != FORK:
                raise ConnectionError("the worker does not show itself")
            if is_whole(member.worker):
                return self._forked(member, conn)
            member.channel.sendall(FORK)
            member.channel.recv(1)
        except OSError:
            self._clean(member)  # end processes made instead of a copy
        finally:
            stop(member.worker)
        return None

    def _forked(self, member: Member, conn: socket.socket) -> Member:
        """Return the worker's copy. Raises OSError if no copy comes."""
        streams, theirs = prepare_streams(self.jail.limits)
        ours, channel = socket.socketpair()
        try:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            ours.settimeout(IO_TIMEOUT_S)
            with channel:
                socket.send_fds(member.channel, [FORK], [*theirs, channel.fileno()])
            ready, notes, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
            answered = member.channel.recv(1) == FORK
            [worker] = [CREDENTIALS.unpack(data)[0] for _, kind, data in notes if kind == socket.SCM_CREDENTIALS]
            is_new = worker in self.jail.processes(member.worker) and worker not in self._workers()
            if ready != READY or not answered or not is_new:
                raise ConnectionError("no copy has come")
            stop(worker)
        except (OSError, ValueError) as error:
            ours.close()
            for stream in streams:
                os.close(stream.fd)
            raise ConnectionError("no copy has come") from error
        finally:
            for fd in theirs:
                os.close(fd)
        return Member(self.jail, worker, member.scratch, ours, *streams, conn=conn, cpu_s=member.cpu_s)

    def _workers(self) -> set[int]:
        return {member.worker for member in self.members.values()}

    def _close(self, member: Member) -> None:
        with contextlib.suppress(ChildProcessError):  # already reaped: its pid may belong to a new process
            if os.waitpid(member.worker, os.WNOHANG) == (0, 0):
                os.kill(member.worker, signal.SIGKILL)
                os.waitpid(member.worker, 0)
        member.conn.close()
        member.channel.close()
        for fd in (member.stdout.fd, member.stderr.fd):
            os.close(fd)

    def _clean(self, member: Member) -> None:
        """Remove all traces of the cell except the worker's memory: end other processes, remove files."""
        workers = self._workers()
        deadline = time.monotonic() + KILL_PATIENCE_S
        while strays := [pid for pid in self.jail.processes(member.worker) if pid not in workers and is_alive(pid)]:
            for pid in strays:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:  # they fork faster than they die: end all sessions
                self.jail.kill(member.worker)
                break
        for pid in self.jail.processes(member.worker):
            if pid not in workers:
                with contextlib.suppress(ChildProcessError):  # a worker's child: the worker may still wait for it
                    os.waitpid(pid, os.WNOHANG)
        for folder, kept in self._written(member.scratch).items():
            _empty(folder, kept)

    def _file_bytes(self, scratch: str) -> int:
        """Return the memory of all files, in bytes, including removed files that are still open. Files on a disk count
        as 0."""
        if self.jail.base:
            return 0
        return sum((s.f_blocks - s.f_bfree) * s.f_frsize for s in map(os.statvfs, (scratch, "/dev/shm")))

    def _written(self, scratch: str) -> dict[str, set[str]]:
        """Return the folders writable for a session. Each has the set of names to keep."""
        if self.jail.base:
            return {scratch: set()}
        return {scratch: {path.split("/")[2] for path in self.jail.interpreter_in_tmp}, "/dev/shm": set()}


def kill_touched(workers: tuple[int, ...]) -> bool:
    """Kill the workers woken or signalled by a cell of another session. Return True if any was killed.

    No meter counts the memory and CPU time of a woken worker, and a signal could carry a message between branches.
    """
    touched = [worker for worker in workers if is_alive(worker) and not is_untouched(worker)]
    for worker in touched:
        os.kill(worker, signal.SIGKILL)
    for worker in touched:
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # `_close` reaps it
    return bool(touched)


def _empty(folder: str, kept: set[str]) -> None:
    """Remove the contents of a folder, except the names in `kept`."""
    with contextlib.suppress(OSError):
        for name in set(os.listdir(folder)) - kept:
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                remove_tree(path)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(path)
