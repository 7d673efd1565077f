"""W, the process for the model's code. After `confine`, assume that an attacker controls it."""

from __future__ import annotations

import ast
import atexit
import base64
import builtins
import contextlib
import gc
import io
import os
import random
import sys
import tempfile
import threading
import traceback
import types
import zlib
from typing import NoReturn

from . import syscalls as kernel
from .folder import FolderJail
from .limits import NICE
from .namespaces import NamespaceJail
from .wire import FILE_MARK

CHANNEL_FD = 3
"""Descriptor for the code (in) and for an error of `confine` (out). For a single call the worker closes it before the
code runs, so that the code cannot write there."""
SEED = 0


class PromptWriter(io.BufferedWriter):
    """Flushes after each write, so that no output is lost when a limit kills the code.

    Only the first `num_prompt_writes` writes are flushed. For a flood of output, one system call per write would cost
    more than the printing.
    """

    num_prompt_writes = 10_000

    def write(self, data: bytes) -> int:
        num_bytes = super().write(data)
        self.flush()
        self.num_prompt_writes -= 1
        if not self.num_prompt_writes:
            self.write = super().write
        return num_bytes


def run_worker(
    jail: FolderJail | NamespaceJail, scratch: str, stdout_fd: int, stderr_fd: int, channel_fd: int
) -> NoReturn:
    """Confine this process, wait for the code, run it, and exit with its exit code."""
    null = os.open("/dev/null", os.O_RDWR)
    for source, target in ((null, 0), (stdout_fd, 1), (stderr_fd, 2), (channel_fd, CHANNEL_FD)):
        os.dup2(source, target)
    kernel.close_from(CHANNEL_FD + 1)
    try:
        os.setpgrp()  # signals from the code to its process group must not reach the supervisor
        os.nice(NICE)
        os.chdir(scratch)
        os.umask(0o077)
        if scratch != os.environ["HOME"]:
            os.environ.update(HOME=scratch, TMPDIR=scratch, PWD=scratch)
        tempfile.tempdir = None  # the host may have cached another folder
        jail.confine(scratch)
    except BaseException as error:
        os.write(CHANNEL_FD, repr(error).encode())
        os._exit(1)
    _prepare_interpreter()
    if jail.sessions:
        try:
            jail.sessions.worker.serve_cells(scratch, run_code, new_main())
        finally:  # the supervisor is gone, or the code has damaged this interpreter
            os._exit(1)
    with open(CHANNEL_FD, "rb", buffering=0) as channel:
        code = channel.read().decode()
    exit_code = run_code(without_file(code), new_main())
    os._exit(_finish() or exit_code)


def _prepare_interpreter() -> None:
    """Reset the interpreter to a fresh state, with the same random numbers in every call."""
    stdin, stdout, stderr = (io.FileIO(fd, mode, closefd=False) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))
    stdin.name, stdout.name, stderr.name = "<stdin>", "<stdout>", "<stderr>"
    sys.stdin = io.TextIOWrapper(io.BufferedReader(stdin), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(PromptWriter(stdout), encoding="utf-8", write_through=True)
    buffer = io.BufferedWriter(stderr)
    sys.stderr = io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.argv, sys.path[:0] = ["-c"], [""]
    random.seed(SEED)  # a fork reseeds `random`, but not NumPy's generator: the host has seeded that
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(sys.getrecursionlimit() + depth)  # do not count our frames against the code
    gc.enable()


def new_main() -> types.ModuleType:
    """Return a new `__main__` module for the code."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    return main


def run_code(code: str, main: types.ModuleType) -> int:
    """Execute the code like a notebook cell: print the value of a bare last expression. Return the exit code.

    Only the last line(s) of a traceback go to stderr, since the other lines would show our own files.
    """
    try:
        tree = compile(code, "<string>", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<string>", "exec", dont_inherit=True), main.__dict__)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<string>", "eval", dont_inherit=True), main.__dict__)
            sys.displayhook(value)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        _complain(f"{error.code}\n")
        return 1
    except BaseException as error:
        _complain("".join(traceback.format_exception_only(type(error), error)))
        return 1
    return 0


def without_file(code: str) -> str:
    """Write the file sent with the code, if any. Return the code without it. See wire.FILE_MARK."""
    if not code.startswith(FILE_MARK):
        return code
    line, _, code = code.removeprefix(FILE_MARK).partition("\n")
    name, content = line.split()
    path = os.path.join(os.environ["HOME"], name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(zlib.decompress(base64.b64decode(content)))
    return code


def _complain(text: str) -> None:
    with contextlib.suppress(BaseException):  # the code may have closed or replaced its streams
        sys.stdout.flush()
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    os.write(2, text.encode("utf-8", "backslashreplace"))


def _finish() -> int:
    """End like an interpreter: join threads, run atexit, flush. Return 0, or the exit code after a failure."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.modules["__main__"].__dict__.clear()
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except BaseException:
        return 120  # as in CPython after a failed last flush
    return 0
