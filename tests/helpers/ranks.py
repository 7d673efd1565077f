"""Real processes for tests, forked from one warm server that has the slow imports behind it (helpers/preloaded.py).

A child costs tenths of a second instead of the ten that the imports take. Each is a fresh fork of a process that has
done nothing but import: no state goes from one to the next. The server belongs to the pytest process and ends with it.

    run_ranks(2, body, *args)                        body(ranks, *args) on two gloo ranks; the values by rank
    run_script("train_rl.py", *flags, ranks=2)       a script as torchrun starts it; output and exit code
    mesh_of_one()                                    no process: a mesh of this one alone; ranks_of(mesh): its Ranks
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from arpo.ranks import Ranks, init_ranks

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 900.0
"""Longest time of a script on a machine that is busy with other things. A bound, not an expectation."""
SERVER_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@contextlib.contextmanager
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A CPU mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """The Ranks of `mesh_of_one`."""
    return Ranks(rank=0, world_size=1, device=torch.device("cpu"), mesh=mesh)


# ---- a function on every rank


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(ranks, *args)` on every rank; the return values by rank. A rank that raises fails the caller."""
    with tempfile.TemporaryDirectory() as folder:
        context = start_ranks(world_size, body, *args, folder=folder)
        while not context.join():
            pass
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def start_ranks(world_size: int, body: Callable[..., Any], *args: Any, folder: str) -> mp.ProcessContext:
    """The same without waiting; the values go to `folder`."""
    ensure_server()
    store = open_store()
    everything = (world_size, store.port, folder, body, args)
    context = mp.start_processes(_rank, everything, nprocs=world_size, join=False, start_method="forkserver")
    context.store = store  # which lives as long
    return context


def run_ranks_until_killed(world_size: int, body: Callable[..., Any], *args: Any) -> None:
    """The same, where one of the ranks ends by a SIGKILL."""
    with tempfile.TemporaryDirectory() as folder:
        context = start_ranks(world_size, body, *args, folder=folder)
        with pytest.raises(Exception, match=r"SIGKILL|onnection"):  # or the other rank's error, if that is seen first
            while not context.join():
                pass


def _rank(rank: int, world_size: int, port: int, folder: str, body: Callable[..., Any], args: tuple) -> None:
    take_place(rank, world_size, port)
    ranks = init_ranks(timeout_minutes=10)
    value = body(ranks, *args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(value))
    ranks.close()


# ---- a script on every rank


@dataclass(frozen=True)
class Done:
    """The processes that are left of a script's ranks."""

    code: int
    """0 where all ranks ended well, else the exit code of the one that ended first with another."""
    output: str
    """The ranks' stdout and stderr, tracebacks included."""


def run_script(
    script: str,
    *argv: str,
    ranks: int = 2,
    env: dict[str, str] | None = None,
    prepare: Callable[[int], None] | None = None,
) -> str:
    """The output of `script`, which must end well. env: variables beside those that the server began with.

    prepare: called on each rank before its script, see `script_on_ranks`; without `env`.
    """
    done = try_script(script, *argv, ranks=ranks, env=env, prepare=prepare)
    assert done.code == 0, f"{script} ended with code {done.code}\n{done.output[-6000:]}"
    return done.output


def try_script(
    script: str,
    *argv: str,
    ranks: int = 2,
    env: dict[str, str] | None = None,
    prepare: Callable[[int], None] | None = None,
) -> Done:
    """Run `python script argv` as `__main__` on each of `ranks` ranks, and wait for all of them.

    When one of them fails, the others may end by themselves, as under torchrun, until they are killed.
    """
    assert not (env and prepare)
    prepare = partial(set_variables, env) if env else prepare
    with script_on_ranks(script, *argv, ranks=ranks, prepare=prepare) as (processes, output):
        code = wait_for_all(processes, 30)
        return Done(code, output.read_text(errors="replace"))


def set_variables(env: dict[str, str], rank: int) -> None:
    os.environ.update(env)


@contextlib.contextmanager
def script_on_ranks(
    script: str, *argv: str, ranks: int = 2, prepare: Callable[[int], None] | None = None
) -> Iterator[tuple[list[multiprocessing.Process], Path]]:
    """The running processes, by rank, and the file of their output. What still runs at the end is killed.

    prepare: a function of a module, called on each rank before its script.
    """
    ensure_server()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        output, store = Path(folder) / "output", open_store()
        place = (ranks, store.port, str(output), script, argv, prepare)
        processes = [context.Process(target=_script, args=(rank, *place)) for rank in range(ranks)]
        try:
            for process in processes:
                process.start()
            yield processes, output
        finally:
            for process in processes:
                process.kill()
                process.join()


def wait_for_all(processes: list[multiprocessing.Process], patience_after_failure_s: float) -> int:
    """0, or the code of the first that failed; that of a kill before all others, which it has caused."""
    deadline, running, code = time.monotonic() + PATIENCE_S, list(processes), 0
    while running and (left := deadline - time.monotonic()) > 0:
        multiprocessing.connection.wait([process.sentinel for process in running], timeout=left)
        for process in [process for process in running if process.exitcode is not None]:
            running.remove(process)
            if process.exitcode and not code:
                code, deadline = process.exitcode, min(deadline, time.monotonic() + patience_after_failure_s)
    assert code or not running, f"{len(running)} ranks still ran after {PATIENCE_S} s"
    return -signal.SIGKILL if any(process.exitcode == -signal.SIGKILL for process in processes) else code


def wait_for_step(run: Path, step: int, is_running: Callable[[], bool]) -> None:
    """Until the run's log has the step."""
    deadline, metrics = time.monotonic() + PATIENCE_S, run / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert is_running() and time.monotonic() < deadline
        time.sleep(0.02)


def _script(
    rank: int, world_size: int, port: int, output: str, script: str, argv: tuple[str, ...], prepare: Callable | None
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    take_place(rank, world_size, port)
    os.chdir(ROOT)
    sys.argv = [script, *argv]
    if prepare:
        prepare(rank)
    runpy.run_path(str(ROOT / script), run_name="__main__")


# ---- the server, and what it forks


def ensure_server() -> None:
    """Start the server unless it runs. It keeps this environment, whatever the first test that needs it has set."""
    multiprocessing.set_forkserver_preload(["helpers.preloaded"])
    with mock.patch.dict(os.environ, SERVER_ENVIRONMENT):
        forkserver.ensure_running()


def open_store() -> dist.TCPStore:
    """The ranks' store, which torchrun's agent has, too: it is there before them, so that none has to try again."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def take_place(rank: int, world_size: int, port: int) -> None:
    """The environment that torchrun gives a rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)  # as torchrun does; vLLM on a CPU leaves another one behind
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.set_num_threads(1)
