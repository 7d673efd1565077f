"""A child process for parsing untrusted text: a chat template, a formula, a web page.

Hostile text may hang its parser, fill the memory, or take over the process. So the parser is a separate program,
jailed, with limits on time and memory, and without the keys of the environment. A program is a file with two
functions:

    prepare()           imports modules; called once, before the jail closes
    answer(request)     returns the answer to one request; request and answer are JSON values

    child = Child(Path("parser.py"), memory_bytes=2 << 30, cpu_s=2.0, wall_s=60.0)
    child.ask(["1/2", "0.5"])   # parser.answer(["1/2", "0.5"])

The program is imported by its path, without `arpo`, and so starts in a fraction of a second. It may import files of
its folder, the standard library and installed packages.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .parser_jail import confine_parser

START_S = 120.0
"""Longest start of a child, even on a busy machine."""
GRACE_S = 30.0
"""Time after `wall_s` until the parent kills a child that is still running."""
MAX_ANSWER_BYTES = 1 << 20
"""Longest answer. A hostile text may take over the child and send any answer."""
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
BOOT = """
import sys
sys.path.append(sys.argv[1])
import jail.child
sys.path.pop()
jail.child.serve(*sys.argv[2:])
"""


class ChildDied(OSError):
    """The child ended without an answer. The message names the exceeded limit: "2 s of CPU time"."""


class Child:
    """A child process. The first request starts it, and a dead child is replaced. Safe to use from any thread."""

    def __init__(self, program: Path, *, memory_bytes: int, wall_s: float, cpu_s: float = 0.0):
        """`wall_s` and `cpu_s` are limits per request, enforced by the kernel; 0 = no limit. A busy machine makes wall
        time longer, but not CPU time."""
        self.program = program
        self.memory_bytes = memory_bytes
        self.wall_s = wall_s
        self.cpu_s = cpu_s
        self._forget()
        _children.add(self)

    def _forget(self) -> None:
        """Drop the process. Called after a fork, since a fork must not use its parent's pipe."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None

    def ask(self, request: Any) -> Any:
        """Return the program's answer. Raises ChildDied for an exceeded limit or an unreadable answer, and
        RuntimeError if the program cannot be started."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            process = self._process
            line = b""
            with killed_after(process, self.wall_s + GRACE_S), contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline(MAX_ANSWER_BYTES)
            with contextlib.suppress(ValueError, RecursionError):
                if line.endswith(b"\n"):
                    return json.loads(line)
            self._process = None
            if not line:
                raise ChildDied(self._cause_of_death(process))
            end(process)
            raise ChildDied("an answer that no parser gives")

    def _start(self) -> subprocess.Popen:
        folder = Path(__file__).resolve().parents[1]
        limits = [str(limit) for limit in (self.memory_bytes, self.cpu_s, self.wall_s)]
        # -P: the current folder is not searched for modules
        command = [sys.executable, "-P", "-W", "ignore", "-c", BOOT, str(folder), str(self.program), *limits]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT)
        with killed_after(process, START_S):
            is_ready = process.stdout.readline(MAX_ANSWER_BYTES) == b"ready\n"
        if not is_ready:
            end(process, patience_s=1.0)
            name = f"{self.program.name} did not start"
            raise RuntimeError(f"{name} (exit code {process.returncode}); see its message above")
        return process

    def _cause_of_death(self, process: subprocess.Popen) -> str:
        """End a process. Return the reason for the missing answer, in words."""
        end(process, patience_s=1.0)  # its pipe is closed: wait for its own exit code
        if process.returncode == -signal.SIGPROF:
            return f"{self.cpu_s:g} s of CPU time"
        if process.returncode in (-signal.SIGALRM, -signal.SIGKILL):
            return f"{self.wall_s:g} s"
        return f"{self.memory_bytes / 2**30:g} GiB of memory, or the parser crashed"

    def close(self) -> None:
        """End the child. A request that is running raises ChildDied. Safe to call twice."""
        process = self._process
        if process is None:
            return
        process.kill()
        with self._lock:  # a running request releases the lock now
            if self._process is process:
                self._process = None
                end(process)


_children: weakref.WeakSet[Child] = weakref.WeakSet()


def _forget_all() -> None:
    for child in _children:
        child._forget()


os.register_at_fork(after_in_child=_forget_all)


@contextlib.contextmanager
def killed_after(process: subprocess.Popen, limit_s: float) -> Iterator[None]:
    """Kill the process if the block takes longer than `limit_s` seconds."""
    timer = threading.Timer(limit_s, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end(process: subprocess.Popen, *, patience_s: float = 0.0) -> None:
    """Wait `patience_s` for the end of the process, then kill the process. Close the pipes."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    process.kill()
    process.wait()
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def serve(program: str, memory_bytes: str, cpu_s: str, wall_s: str) -> None:
    """Run in the child: answer requests until the parent is gone. A request over its time limit ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; when the parent ends, stdin closes
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of a parser must not mix with the answers
    folder, name = os.path.split(program)
    sys.path.append(folder)
    module = importlib.import_module(name.removesuffix(".py"))
    module.prepare()
    sys.path.remove(folder)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    confine_parser()
    answers.write(b"ready\n")
    answers.flush()
    os.dup2(nothing, 2)  # warnings of a parser about a text must not fill the log
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(cpu_s))
        signal.setitimer(signal.ITIMER_REAL, float(wall_s))
        answer = module.answer(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
