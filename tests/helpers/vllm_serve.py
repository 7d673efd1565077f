"""A real `vllm serve` on loopback, forked where most of its imports are made already (helpers/ranks.py)."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.processes import free_port
from helpers.ranks import PATIENCE_S, ROOT, script_on_ranks

SERVER = f"{ROOT}/extras/server_engine.py:ServerEngine"
"""What eval.server names before an address."""
PORT_TAKEN = "ddress already in use"
"""The server takes its port seconds after it was free; meanwhile somebody else may have taken it."""


@contextmanager
def serving(model: Path, *, max_model_len: int) -> Iterator[str]:
    """The address of a server of `model`, which is called tiny there."""
    if missing := [
        name for name in ("uvicorn", "watchfiles", "model_hosting_container_standards") if not find_spec(name)
    ]:
        pytest.skip(f"vLLM's server needs {', '.join(missing)}; they are pinned in requirements/cpu.txt")
    for is_last in (False, False, True):
        port = free_port()
        flags = {"model": model, "host": "127.0.0.1", "port": port, "served-model-name": "tiny",
                 "dtype": "float32", "max-model-len": max_model_len, "max-num-seqs": 16}  # fmt: skip
        argv = ["--enforce-eager", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]
        script = find_spec("vllm.entrypoints.openai.api_server").origin
        with script_on_ranks(script, *argv, ranks=1, prepare=_prepare) as ([process], log):
            try:
                if _is_up(process, port, log):
                    yield f"http://127.0.0.1:{port}"
                    return
                assert PORT_TAKEN in log.read_text() and not is_last, log.read_text()[-3000:]
            finally:
                process.terminate()
                process.join(60)
                with contextlib.suppress(ProcessLookupError):  # where it was not too busy to end its engine
                    os.killpg(process.pid, signal.SIGKILL)


def _prepare(rank: int) -> None:
    """Its engine's processes are forks as it is one itself: what vLLM spawns on a CPU would import all of it twice."""
    os.setsid()
    multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"


def _is_up(process: multiprocessing.Process, port: int, log: Path) -> bool:
    """Wait until the server answers; False where its process has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not _answers(port):
        if process.exitcode is not None:
            return False
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)
    return True


def _answers(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    except OSError:
        return False
