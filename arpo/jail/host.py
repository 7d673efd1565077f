"""The host: jails itself once, loads numpy and sympy, and then only keeps a few forked supervisors ready.

Command: `python -s -S -B -c BOOT PACKAGE CONTROL_FD` (host_process.py). The first message on CONTROL_FD has the
settings.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import sys
import time
from types import ModuleType
from typing import NoReturn

from . import syscalls as kernel
from .cgroup import HostCgroup
from .folder import FolderJail
from .landlock import LandlockJail
from .limits import CallLimits
from .meter import private_bytes
from .namespaces import NamespaceJail
from .supervisor import prepare_worker
from .trees import remove_tree
from .worker import SEED

PRELOADED = ("random", "json", "itertools", "fractions", "decimal", "datetime", "statistics", "numpy.random", "sympy")
"""Modules loaded by the host. The import of sympy takes 250 ms, saved in every call. Each call pays for forking all
modules: with pandas or scipy the 6 ms of a call would double."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    **dict.fromkeys(("HOME", "TMPDIR", "PWD"), "/tmp"),
    "USER": "nobody",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "2",
    "MPLBACKEND": "Agg",
}
"""The complete environment of the host, and so of the model's code."""
NUM_SPARES = 4
"""Number of supervisors kept ready with jail and worker, since preparing one takes longer than most calls."""
RETRY_FORK_S = 0.1
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")


def main(control_fd: int) -> NoReturn:
    """Serve until the trainer is gone. If the machine does not allow the requested tier, report the reason and end."""
    control = socket.socket(fileno=control_fd)
    settings = json.loads(control.recv(1 << 16))
    trainer = kernel.pidfd_open(settings["trainer_pid"])
    if os.getppid() != settings["trainer_pid"]:  # the trainer died meanwhile, and its pid may belong to another process
        os._exit(1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("900")  # if memory runs out, the kernel should kill us, not the trainer
    limits = CallLimits(**settings["limits"])
    sys.path += settings["import_paths"]
    visible = visible_paths(settings["import_paths"] + settings["prefixes"])
    sessions = _imported(limits.sessions) if limits.sessions else None  # the jail hides its files
    try:
        cgroup = None if settings["cgroup_fd"] is None else HostCgroup(settings["cgroup_fd"])
        if settings["tier"] == "namespaces":
            jail: FolderJail | NamespaceJail = NamespaceJail(limits, visible, control, cgroup)
        elif settings["tier"] == "landlock":
            jail = LandlockJail(limits, visible)
        else:
            jail = FolderJail(limits)
        if cgroup and settings["tier"] != "namespaces":
            cgroup.settle()
        jail.cgroup, jail.sessions = cgroup, sessions
    except (OSError, ValueError) as error:
        control.send(json.dumps({"refused": str(error)}).encode())
        os._exit(3)
    _preload()
    gc.collect()
    gc.freeze()  # a garbage collection in a fork would touch every page, and so copy it
    gc.disable()
    control.send(json.dumps({"has_proc": jail.has_proc, "base": jail.base}).encode())
    os.dup2(0, 2)  # until now stderr was a file of the client, for errors before the first report
    _keep_spares(jail, control, trainer)


def visible_paths(paths: list[str]) -> list[str]:
    """Return the system's folders and all `paths` outside them. Each path is named twice: as given and resolved."""
    visible = [folder for folder in SYSTEM_FOLDERS if os.path.lexists(folder)]
    prefixes = [sys.base_prefix, sys.base_exec_prefix, *paths]
    for path in sorted({os.path.abspath(p) for p in prefixes} | {os.path.realpath(p) for p in prefixes}):
        inside = any(path == folder or path.startswith(folder + "/") for folder in visible)
        if os.path.isdir(path) and path != "/" and not inside:
            visible.append(path)
    return visible


def _imported(folder: str) -> ModuleType:
    """Import the package CallLimits.sessions with its modules `family` and `worker`, used by the jail."""
    parent, name = os.path.split(folder)
    sys.path.insert(0, parent)
    for module in ("family", "worker"):
        importlib.import_module(f"{name}.{module}")
    del sys.path[0]
    return sys.modules[name]


def _preload() -> None:
    site.setquit()  # exit() and help(), missing with -S
    site.sethelper()
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # numpy and sympy need not be installed
            importlib.import_module(name)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(SEED)
    if sympy := sys.modules.get("sympy"):
        # sympy imports some modules (units, tensors, Risch) only at first use. Use them here: each call saves 0.4 s.
        x = sympy.Symbol("x")
        sympy.diff(x**3, x)
        sympy.solve(x**2 - 2, x)
        sympy.integrate(x * sympy.sin(x), x)
        sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
        sympy.core.cache.clear_cache()  # keep the modules, but no results: calls must not share them


def _keep_spares(jail: FolderJail | NamespaceJail, control: socket.socket, trainer: int) -> NoReturn:
    """Run the zygote. The zygote reads one byte per started call and nothing else, so no call can confuse it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps supervisors
    host_bytes = private_bytes()
    taken, taken_write = os.pipe2(os.O_CLOEXEC)
    poller = select.poll()
    poller.register(taken, select.POLLIN)
    poller.register(control, 0)  # hang-up
    poller.register(trainer, select.POLLIN)  # needed too: a fork of the trainer may keep the control socket open
    num_spares = 0
    while True:
        while num_spares < NUM_SPARES:
            try:
                pid = jail.fork()
            except OSError:  # no free process: callers wait, and so does this loop
                break
            if pid == 0:
                _supervise(jail, control, taken_write, host_bytes)
            num_spares += 1
        ready = {fd for fd, _ in poller.poll(None if num_spares == NUM_SPARES else 1e3 * RETRY_FORK_S)}
        if ready - {taken}:
            break
        if ready:
            num_spares -= len(os.read(taken, NUM_SPARES))
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)  # idle supervisors wait on this socket, and end now
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, 0)  # returns when all supervisors have ended; the busy ones see it too
    if jail.base:
        remove_tree(jail.base)
    os._exit(0)


def _supervise(jail: FolderJail | NamespaceJail, control: socket.socket, taken: int, host_bytes: int) -> NoReturn:
    try:
        spare = prepare_worker(jail)
    except BaseException:  # no memory or disk, perhaps: wait, give up, and let the host start another
        time.sleep(RETRY_FORK_S)
        os.write(taken, b"1")
        os._exit(1)
    exit_code = 0
    try:
        _, fds, _, _ = socket.recv_fds(control, 16, 1)  # the kernel wakes one waiting supervisor
        control.close()
        if fds:  # without a descriptor: the trainer is gone
            os.write(taken, b"1")
            os.close(taken)
            with socket.socket(fileno=fds[0]) as conn:
                if jail.sessions:
                    jail.sessions.family.serve(spare, conn, host_bytes)
                else:
                    spare.serve(conn, host_bytes)
    except BaseException:  # the connection closes, and the caller tries again
        exit_code = 1
    with contextlib.suppress(ChildProcessError):  # already reaped: the pid may belong to another process now
        if os.waitpid(spare.worker, os.WNOHANG) == (0, 0):
            jail.kill(spare.worker)
    if jail.base:
        remove_tree(spare.scratch)
    if spare.cgroup:
        spare.cgroup.remove()
    os._exit(exit_code)
