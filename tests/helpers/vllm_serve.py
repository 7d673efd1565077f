"""A real `vllm serve` process on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.processes import free_port
from helpers.ranks import PATIENCE_S, ROOT

SERVER = f"{ROOT}/extras/server_engine.py:ServerEngine"
"""What eval.server names before an address."""
PORT_TAKEN = "ddress already in use"
"""The server takes its port seconds after it was free; meanwhile somebody else may have taken it."""


@contextmanager
def serving(model: Path, folder: Path, *, max_model_len: int) -> Iterator[str]:
    """The address of a server of `model`, which is called tiny there; its log is in `folder`."""
    if missing := [
        name for name in ("uvicorn", "watchfiles", "model_hosting_container_standards") if not find_spec(name)
    ]:
        pytest.skip(f"vLLM's server needs {', '.join(missing)}; they are pinned in requirements/cpu.txt")
    for is_last in (False, False, True):
        port, log = free_port(), folder / "log"
        process = _start(model, port, max_model_len, log)
        try:
            if _is_up(process, port, log):
                yield f"http://127.0.0.1:{port}"
                return
            assert PORT_TAKEN in log.read_text() and not is_last, log.read_text()[-3000:]
        finally:
            _stop(process)


def _stop(process: subprocess.Popen) -> None:
    """End the server and its engine; one that is too busy to hear of it is killed."""
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its session, which is its own
        process.wait()


def _start(model: Path, port: int, max_model_len: int, log: Path) -> subprocess.Popen:
    flags = {"model": model, "host": "127.0.0.1", "port": port, "served-model-name": "tiny",
             "dtype": "float32", "max-model-len": max_model_len, "max-num-seqs": 16}  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True)


def _is_up(process: subprocess.Popen, port: int, log: Path) -> bool:
    """Wait until the server answers; False where its process has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not _answers(port):
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)
    return True


def _answers(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    except OSError:
        return False
