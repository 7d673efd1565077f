"""Starting, calling and watching a PythonTool in tests."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from arpo.config.tools import PythonConfig
from arpo.errors import UserError
from arpo.jail.host import NUM_SPARES
from arpo.tools.base import ToolResult
from arpo.tools.python import PythonTool

HANG_S = 300.0
TIERS = ["namespaces", "landlock"]
SMALL = PythonConfig(wall_s=3.0, memory_mib=256, max_concurrent=4)


TOO_LATE = ("did not start within", "no answer (TimeoutError", "its self-test: timeout")
OUR_FAULT = (*TOO_LATE, "self-test", "the host died")
"""A tier that the kernel refuses says which system call failed, and how. These say that the sandbox failed."""


def start(
    cfg: PythonConfig = SMALL, tier: str | None = None, *, kind: type[PythonTool] = PythonTool, **kwargs
) -> PythonTool:
    """A tool in `tier`. Skips the test where the kernel refuses it; a machine that is too busy is waited for."""
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            return kind(cfg, tier=tier, **kwargs)
        except UserError as error:
            if any(words in str(error) for words in TOO_LATE) and time.monotonic() < deadline:
                continue
            skip_where_the_kernel_refuses(error)


@contextlib.contextmanager
def started(
    cfg: PythonConfig = SMALL, tier: str | None = None, *, kind: type[PythonTool] = PythonTool, **kwargs
) -> Iterator[PythonTool]:
    """The same, closed at the end."""
    tool = start(cfg, tier, kind=kind, **kwargs)
    try:
        yield tool
    finally:
        asyncio.run(tool.aclose())


def skip_where_the_kernel_refuses(error: Exception) -> NoReturn:
    """Skip the test for a tier that this machine cannot carry; raise what is the sandbox's own failure."""
    if any(words in str(error) for words in OUR_FAULT):
        raise error
    pytest.skip(f"this machine cannot carry it: {error}")


def run(tool: PythonTool, *codes: str) -> list[ToolResult]:
    async def gather() -> list[ToolResult]:
        return await asyncio.wait_for(asyncio.gather(*(tool.run(code) for code in codes)), HANG_S)

    return asyncio.run(gather())


def text_of(tool: PythonTool, code: str) -> str:
    return run(tool, code)[0].text


def burning_children(number: int, *, cpu_s: float, are_waited_for: bool = False) -> str:
    """Code with so many children, one after the other, that compute for `cpu_s`. Nobody sees how long the ones took
    that are not waited for."""
    return f"""
import os, signal, time
signal.signal(signal.SIGCHLD, signal.{"SIG_DFL" if are_waited_for else "SIG_IGN"})
for _ in range({number}):
    if os.fork() == 0:
        while time.process_time() < {cpu_s}:
            pass
        os._exit(0)
    try:
        os.wait()
    except ChildProcessError:
        pass
"""


def processes_of(host_pid: int, *, zombies: bool = False) -> list[int]:
    """The host and all processes below it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rsplit(")", 1)[1].split()  # a name may be any bytes
        except OSError:  # it ended since it was listed
            continue
        if zombies or fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found = [host_pid] if host_pid in parents else []
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def jail_of(tool: PythonTool) -> list[int]:
    """The host without calls, in tier A after its launcher: when all there is below it are spares."""
    num_own = 2 if tool.sandbox.tier == "namespaces" else 1
    per_spare = 2  # a supervisor and its worker
    assert wait_until(lambda: len(processes_of(tool.sandbox.host.pid)) == num_own + per_spare * NUM_SPARES)
    return processes_of(tool.sandbox.host.pid)[:num_own]


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
