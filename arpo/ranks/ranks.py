"""Ranks: start and end of the process group, the device mesh, reductions, seeds and random states, timers.

Works under torchrun and as a plain single process (then world size 1), on CPU (gloo) and GPU (nccl, gloo for CPU data).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from arpo.config.exits import check_launch
from arpo.errors import UserError
from arpo.metrics import Metrics
from arpo.ranks import devices, peers

T = TypeVar("T")
logger = logging.getLogger(__name__)
DEFAULT_TIMEOUT = timedelta(minutes=60)


@dataclass(frozen=True)
class Ranks:
    """This process among the others: its rank, device and mesh, and the collectives that the scripts need."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    """A mesh named ("dp",), or ("replicate", "shard") if a copy of the model is spread over some of the ranks only."""
    watch: peers.Watch | None = None
    """Ends the run when a peer is gone; only under torchrun."""
    group: dist.ProcessGroup | None = None
    """The neighbours that share this rank's micro-batches (context_parallel.py); None if there are none."""
    owns_process_group: bool = True
    """False if the process group was there before; its maker destroys it."""
    timeout: timedelta = DEFAULT_TIMEOUT
    """Time that ranks wait for each other in a collective, of any group."""
    store: dist.Store | None = None
    """The process group's store, for what ranks tell each other outside of collectives; None in a test without one."""
    control: dist.ProcessGroup | None = None
    """The group of all ranks over which objects travel; None is the default one. A thread needs one of its own."""

    @property
    def data_size(self) -> int:
        """Number of different shares that a batch is cut into."""
        return self.world_size // (dist.get_world_size(self.group) if self.group else 1)

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of a batch, from 0 to data_size - 1."""
        return self.rank // (self.world_size // self.data_size)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def check_multiple(self, count: int, option: str) -> None:
        """Raise UserError unless every rank gets an equal part of `count`, which `option` has set."""
        if count % self.world_size:
            reason = f"is not a multiple of the {self.world_size} ranks; change it or --nproc_per_node"
            raise UserError(f"{option}={count} {reason}")

    def all_gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank. Values are picklable, and travel over gloo."""
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def together(self, make: Callable[[], T]) -> T:
        """Return what `make` gives on this rank. If it raises UserError on any, all raise the first's. Collective."""
        made, problem = None, None
        try:
            made = make()
        except UserError as error:
            problem = error
        if first := next(filter(None, self.all_gather_objects(problem)), None):
            raise first
        return made

    def from_rank_0(self, value: T) -> T:
        """Return rank 0's value on every rank; the others' are ignored. Values are picklable."""
        box = [value]
        dist.broadcast_object_list(box, group=self.control)
        return box[0]

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return each value's sum over the ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def reduce_metrics(self, metrics: Metrics) -> Metrics:
        """Return the metrics of all ranks, merged by their declared reduction."""
        merged = Metrics()
        for part in self.all_gather_objects(metrics):
            merged.merge(part)
        return merged

    def step_times(self, timers: Timers) -> dict[str, float]:
        """Return time/*: means over ranks of the seconds of each phase, of the step, of no phase (idle); and rank_wait.

        rank_wait = seconds by which the slowest rank exceeded the mean in the phases in which ranks work on their own
        (`Timers.ALONE`); so long the ranks stood still at the end of them, on average.
        """
        by_rank = self.all_gather_objects(timers.seconds())
        mean = {name: sum(seconds[name] for seconds in by_rank) / len(by_rank) for name in by_rank[0]}
        alone = [sum(seconds.get(name, 0.0) for name in Timers.ALONE) for seconds in by_rank]
        mean["rank_wait"] = max(alone) - sum(alone) / len(alone)
        return {f"time/{name}": value for name, value in mean.items()}

    def log_devices(self, attention: str = "") -> None:
        """Log the run's first line: devices, versions, and the `attention` kernel that was chosen. Collective."""
        logger.info(devices.describe(attention))

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        """Leave the process group together with the others; a vLLM engine may have destroyed it already."""
        if dist.is_initialized():
            dist.barrier()
        if self.watch:
            self.watch.stop()
        if dist.is_initialized() and self.owns_process_group:
            dist.destroy_process_group()


def init_ranks(
    timeout_minutes: float = 60.0, silence_s: float = 300.0, shard_size: int = 0, context_parallel: int = 1
) -> Ranks:
    """Join the process group of torchrun's environment, or make one of a single rank.

    The arguments are run.peer_timeout_minutes, run.silence_timeout_s, model.shard_size and model.context_parallel.
    Raises UserError for a GPU that torch cannot use, and for half of torchrun's environment.
    """
    check_launch(os.environ)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun may die without ending its workers; orphans keep the GPU
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    _log_once_per_node()
    if note := devices.check_devices():
        logger.info(note)
    cuda = torch.cuda.is_available()
    if not cuda:
        devices.keep_freed_memory()
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # else vLLM's CPU attention dies of SIGILL when its first batch is tiny
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # 0: any free port
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    watch = None
    owns_process_group = not dist.is_initialized()
    timeout = timedelta(minutes=timeout_minutes)
    if owns_process_group:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        if "TORCHELASTIC_RUN_ID" in os.environ and world_size > 1:
            store = peers.join(store, rank, world_size, timeout_s=timeout.total_seconds())
            limits = f"run.silence_timeout_s={silence_s:g}, run.peer_timeout_minutes={timeout_minutes:g}"
            observes = os.environ["LOCAL_RANK"] == "0"
            watch = peers.Watch(store.clone(), rank, world_size, silence_s, limits, observes=observes)
            # Else torch's watchdog of NCCL aborts the process, with a page of text and no word of which rank is gone,
            # before ours can say it. torchrun sets this for its workers, so it is not a wish of the user's.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    mesh = make_mesh(device.type, dist.get_world_size(), shard_size, timeout)
    group = make_group(context_parallel, timeout) if context_parallel > 1 else None
    return Ranks(
        dist.get_rank(),
        dist.get_world_size(),
        device,
        mesh,
        watch,
        group,
        owns_process_group,
        timeout,
        store=dist.distributed_c10d._get_default_store(),
    )


def make_mesh(device_type: str, world_size: int, shard_size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> DeviceMesh:
    """Return a mesh in which `shard_size` ranks (0 = those of a node) share a copy of the model. Raises UserError."""
    shard_size = shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if world_size % shard_size:
        raise UserError(f"model.shard_size={shard_size} does not divide the {world_size} ranks; choose one that does")
    if shard_size == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp",))
    # init_device_mesh would make groups with torch's own time limits, and takes no other.
    ranks = torch.arange(world_size).view(-1, shard_size)
    shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group([replicate, shard], device_type, ranks, mesh_dim_names=("replicate", "shard"))


def make_group(num_ranks: int, timeout: timedelta = DEFAULT_TIMEOUT) -> dist.ProcessGroup:
    """Return this rank's group of `num_ranks` neighbours, on one node if possible. Raises UserError."""
    if dist.get_world_size() % num_ranks:
        raise UserError(
            f"model.context_parallel={num_ranks} does not divide the {dist.get_world_size()} ranks; choose another"
        )
    return dist.new_subgroups(num_ranks, timeout=timeout)[0]


def _log_once_per_node() -> None:
    """Print our own log as plain lines: rank 0's, and each node's warnings of its own troubles (sandbox, cache)."""
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    logger = logging.getLogger("arpo")
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING if local_rank == 0 else logging.ERROR)
    if local_rank == 0 and not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)  # stderr is for the one line that ends a run
        node = f"{socket.gethostname()}: " if rank else ""
        handler.setFormatter(logging.Formatter(f"{node}%(message)s"))
        logger.addHandler(handler)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class RandomState:
    """The states of Python's, NumPy's and torch's global generators, and of torch's on the current GPU, in types that
    torch.load reads with weights_only."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    """NumPy's state; None if it was not taken, and so is not restored."""
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def current(cls, *, with_numpy: bool = True) -> RandomState:
        """Return the states as they are now. NumPy's takes 0.12 ms to take and restore, ten times the others' time."""
        cuda, numpy = torch.cuda.get_rng_state() if torch.cuda.is_available() else None, None
        if with_numpy:
            numpy = np.random.get_state(legacy=False)
            numpy["state"]["key"] = numpy["state"]["key"].tolist()
        return cls(random.getstate(), numpy, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)


class Timers:
    """Measures the seconds of named phases, which follow each other, and of all time since construction.

    >>> timers = Timers()
    >>> with timers("rollout"): pass
    >>> list(timers.seconds())
    ['rollout', 'step', 'idle']
    """

    ALONE: ClassVar = ("rollout", "reward")
    """Phases without a collective, in which no rank waits for another."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # what the phase queued on the GPU is its own time, not the next one's
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self, prefix: str = "") -> dict[str, float]:
        """Return seconds by phase, with "step" (all time since construction) and "idle" (time in no phase)."""
        step = time.perf_counter() - self._started
        total = self._seconds | {"step": step, "idle": step - sum(self._seconds.values())}
        return {prefix + name: value for name, value in total.items()}
