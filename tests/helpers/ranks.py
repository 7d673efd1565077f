"""Process groups for tests: a group of one in this process, or several real gloo ranks in processes of their own.

The ranks are forked from a server that has the slow imports behind it, and nothing else.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from arpo.ranks import init

PRELOADED = ["torch", "arpo.checkpoint", "transformers.models.qwen3.modeling_qwen3", "transformers.generation"]


@contextlib.contextmanager
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A CPU mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(ranks, *args)` on every rank; the return values by rank. A rank that raises fails the caller."""
    with tempfile.TemporaryDirectory() as folder:
        context = start_ranks(world_size, body, *args, folder=folder)
        while not context.join():
            pass
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def start_ranks(world_size: int, body: Callable[..., Any], *args: Any, folder: str) -> mp.ProcessContext:
    """The same without waiting; the values go to `folder`."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    everything = (world_size, port, folder, body, args)
    return mp.start_processes(_rank, everything, nprocs=world_size, join=False, start_method="forkserver")


def _rank(rank: int, world_size: int, port: int, folder: str, body: Callable[..., Any], args: tuple) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)  # as torchrun does; vLLM on a CPU leaves another one behind
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    ranks = init(timeout_minutes=10)
    value = body(ranks, *args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(value))
    ranks.close()
