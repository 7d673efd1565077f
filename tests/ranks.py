"""Process groups for tests: a group of one in this process, or several real gloo ranks in processes of their own."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from arpo import distributed


@contextlib.contextmanager
def mesh_of_one() -> Iterator[DeviceMesh]:
    """A CPU mesh of this process alone. A session's vLLM engine may have made the group already; then it is shared."""
    mine = not dist.is_initialized()
    if mine:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    if mine:
        dist.destroy_process_group()


def run_ranks(world_size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(ranks, *args)` on every rank; the return values by rank. A rank that raises fails the caller."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world_size, port, folder, body, args), nprocs=world_size, start_method="spawn")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def _rank(rank: int, world_size: int, port: int, folder: str, body: Callable[..., Any], args: tuple) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = distributed.init(timeout_minutes=2)
    value = body(ranks, *args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(value))
    ranks.close()
