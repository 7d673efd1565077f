"""A real `vllm serve` process on loopback."""

from __future__ import annotations

import os
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
from helpers.ranks import PATIENCE_S


@contextmanager
def serving(model: Path, folder: Path, *, max_model_len: int) -> Iterator[str]:
    """The address of a server of `model`, which is called tiny there; its log is in `folder`."""
    if missing := [
        name for name in ("uvicorn", "watchfiles", "model_hosting_container_standards") if not find_spec(name)
    ]:
        pytest.skip(f"vLLM's server needs {', '.join(missing)}; they are pinned in requirements/cpu.txt")
    port = free_port()
    flags = {"model": model, "host": "127.0.0.1", "port": port, "served-model-name": "tiny",
             "dtype": "float32", "max-model-len": max_model_len, "max-num-seqs": 16}  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _answers(port):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=60)


def _answers(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    except OSError:
        return False
