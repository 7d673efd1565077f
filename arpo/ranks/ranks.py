"""Ranks: start and end of the process group, the device mesh, reductions, timers.

Works under torchrun and in a single process (world size 1), on CPU (gloo) and GPU (nccl, and gloo for CPU data).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, TypeVar

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
    """This process and the others: rank, device, mesh, and the collectives of the scripts."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    """Mesh of all ranks. Named ("dp",) if all ranks together hold one copy of the model, ("replicate", "shard") if
    there are several copies, each spread over `shard` ranks."""
    watch: peers.Watch | None = None
    """Ends the run if a rank is gone. Only under torchrun."""
    group: dist.ProcessGroup | None = None
    """The neighbours that share this rank's micro-batches (context_parallel.py); None = no neighbours."""
    owns_process_group: bool = True
    """False if the process group was there before. Then its maker destroys it."""
    timeout: timedelta = DEFAULT_TIMEOUT
    """Time limit of collectives, in any group."""
    store: dist.Store | None = None
    """The process group's store, for messages outside of collectives; None in some tests."""
    control: dist.ProcessGroup | None = None
    """The group of all ranks for Python objects; None = the default group. Each thread needs a separate group."""

    @property
    def data_size(self) -> int:
        """Number of shares of a batch."""
        return self.world_size // (dist.get_world_size(self.group) if self.group else 1)

    @property
    def data_rank(self) -> int:
        """Index of this rank's share of a batch, from 0 to data_size - 1."""
        return self.rank // (self.world_size // self.data_size)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def check_multiple(self, count: int, option: str) -> None:
        """Raise UserError unless `count` divides equally over the ranks. option: the option that sets the count."""
        if count % self.world_size:
            reason = f"is not a multiple of the {self.world_size} ranks; change it or --nproc_per_node"
            raise UserError(f"{option}={count} {reason}")

    def all_gather_objects(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank. Values are picklable, and travel over gloo."""
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def call_together(self, function: Callable[[], T]) -> T:
        """Call the function on each rank and return this rank's result. Collective.

        If it raises UserError on any rank, all ranks raise the error of the first such rank.
        """
        result = None
        problem = None
        try:
            result = function()
        except UserError as error:
            problem = error
        for error in self.all_gather_objects(problem):
            if error is not None:
                raise error
        return result

    def from_rank_0(self, value: T) -> T:
        """Return rank 0's value on every rank. Values are picklable; those of other ranks are ignored."""
        values = [value]
        dist.broadcast_object_list(values, group=self.control)
        return values[0]

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return each value's sum over the ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def reduce_metrics(self, metrics: Metrics) -> Metrics:
        """Return the metrics of all ranks, merged by their declared reduction."""
        merged = Metrics()
        for metrics_of_rank in self.all_gather_objects(metrics):
            merged.merge(metrics_of_rank)
        return merged

    def step_times(self, timers: Timers) -> dict[str, float]:
        """Return time/*: seconds of each phase, of the step, of no phase (idle), as means over ranks; and rank_wait.

        rank_wait is the average time that ranks wait for the slowest rank at the end of the phases without a collective
        (`Timers.INDEPENDENT`): the seconds of the slowest rank minus the mean.
        """
        by_rank = self.all_gather_objects(timers.seconds())
        times = {name: sum(seconds[name] for seconds in by_rank) / len(by_rank) for name in by_rank[0]}
        independent = [sum(seconds.get(name, 0.0) for name in Timers.INDEPENDENT) for seconds in by_rank]
        times["rank_wait"] = max(independent) - sum(independent) / len(independent)
        return {f"time/{name}": value for name, value in times.items()}

    def log_devices(self, dtypes: dict[str, str], attention: str = "") -> None:
        """Log the run's first line: devices, versions, and the attention kernel. Collective.

        `dtypes` are options and their values; the second line warns if this CPU is slow with one of them.
        """
        logger.info(devices.describe(attention))
        warning = devices.slow_bfloat16(dtypes)
        if warning:
            logger.info(warning)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        """Leave the process group together with the other ranks. A vLLM engine may have destroyed it already."""
        if dist.is_initialized():
            dist.barrier()
        if self.watch:
            self.watch.stop()
        if dist.is_initialized() and self.owns_process_group:
            dist.destroy_process_group()


def init_ranks(
    timeout_minutes: float = 60.0, silence_s: float = 300.0, shard_size: int = 0, context_parallel: int = 1
) -> Ranks:
    """Join the process group of torchrun's environment, or make a group of one rank.

    The arguments are run.peer_timeout_minutes, run.silence_timeout_s, model.shard_size and model.context_parallel.
    Raises UserError if torch cannot use a GPU, or if variables of torchrun's environment are missing.
    """
    check_launch(os.environ)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # If torchrun dies, its workers must die too (PR_SET_PDEATHSIG): orphans would keep the GPU.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    _log_once_per_node()
    note = devices.check_devices()
    if note:
        logger.info(note)
    cuda = torch.cuda.is_available()
    if not cuda:
        devices.keep_freed_memory()
        if torch.cpu._is_amx_tile_supported():
            # Without this, vLLM's CPU attention dies of SIGILL if its first batch is tiny.
            torch.cpu._init_amx()
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # 0: any free port
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    owns_process_group = not dist.is_initialized()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    watch = _join_process_group(backend, timeout_minutes, silence_s) if owns_process_group else None
    timeout = timedelta(minutes=timeout_minutes)
    mesh = make_mesh(device.type, dist.get_world_size(), shard_size, timeout)
    group = make_group(context_parallel, timeout) if context_parallel > 1 else None
    return Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        mesh=mesh,
        watch=watch,
        group=group,
        owns_process_group=owns_process_group,
        timeout=timeout,
        store=dist.distributed_c10d._get_default_store(),
    )


def _join_process_group(backend: str, timeout_minutes: float, silence_s: float) -> peers.Watch | None:
    """Join the default process group. Return a watch over the other ranks if torchrun started several."""
    timeout = timedelta(minutes=timeout_minutes)
    watch = None
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    if "TORCHELASTIC_RUN_ID" in os.environ and world_size > 1:
        store = peers.join(store, rank, world_size, timeout_s=timeout.total_seconds())
        watch = peers.Watch(
            store.clone(),
            rank=rank,
            world_size=world_size,
            silence_s=silence_s,
            limits=f"run.silence_timeout_s={silence_s:g}, run.peer_timeout_minutes={timeout_minutes:g}",
            observes=os.environ["LOCAL_RANK"] == "0",
        )
        # Otherwise torch's NCCL watchdog would abort the process before ours can name the missing rank. torchrun sets
        # this variable for its workers, so the old value is not the user's choice.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return watch


def make_mesh(device_type: str, world_size: int, shard_size: int, timeout: timedelta = DEFAULT_TIMEOUT) -> DeviceMesh:
    """Return a mesh of groups of `shard_size` ranks (0 = the ranks of a node). Each group shares a copy of the model.
    Raises UserError."""
    shard_size = shard_size or ranks_per_node(world_size)
    if world_size % shard_size:
        raise UserError(f"model.shard_size={shard_size} does not divide the {world_size} ranks; choose one that does")
    if shard_size == world_size:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp",))
    # Not init_device_mesh: its groups would have torch's default time limits.
    ranks = torch.arange(world_size).view(-1, shard_size)
    shard, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    replicate, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group([replicate, shard], device_type, ranks, mesh_dim_names=("replicate", "shard"))


def ranks_per_node(world_size: int) -> int:
    """Return the number of ranks on each node. Collective. Raises UserError, on all ranks, if the nodes differ."""
    numbers = [0] * world_size
    dist.all_gather_object(numbers, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    if len(set(numbers)) > 1:
        found = " and ".join(map(str, sorted(set(numbers))))
        raise UserError(
            f"the nodes have {found} ranks; start torchrun with the same --nproc_per_node on all nodes, or set "
            "model.shard_size"
        )
    return numbers[0]


def make_group(num_ranks: int, timeout: timedelta = DEFAULT_TIMEOUT) -> dist.ProcessGroup:
    """Return this rank's group of `num_ranks` neighbours, on one node if possible. Raises UserError."""
    if dist.get_world_size() % num_ranks:
        raise UserError(
            f"model.context_parallel={num_ranks} does not divide the {dist.get_world_size()} ranks; choose another"
        )
    group, _ = dist.new_subgroups(num_ranks, timeout=timeout)
    return group


def _log_once_per_node() -> None:
    """Print this package's log as plain lines: everything from rank 0, and warnings from each node (sandbox, cache)."""
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    logger = logging.getLogger("arpo")
    if rank == 0:
        logger.setLevel(logging.INFO)
    elif local_rank == 0:
        logger.setLevel(logging.WARNING)
    else:
        logger.setLevel(logging.ERROR)
    if local_rank == 0 and not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)  # stderr is only for the line at the end of a failed run
        node = f"{socket.gethostname()}: " if rank else ""
        handler.setFormatter(logging.Formatter(f"{node}%(message)s"))
        logger.addHandler(handler)


class Timers:
    """Measures the seconds of consecutive named phases, and the total time since construction.

    >>> timers = Timers()
    >>> with timers("rollout"): pass
    >>> list(timers.seconds())
    ['rollout', 'step', 'idle']
    """

    INDEPENDENT: ClassVar = ("rollout", "reward")
    """Phases without a collective: no rank waits for another within them."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
            if torch.cuda.is_initialized():
                # The GPU work queued in this phase must not count for the next one.
                torch.cuda.synchronize()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self, prefix: str = "") -> dict[str, float]:
        """Return seconds by phase, with "step" (all time since construction) and "idle" (time in no phase)."""
        step = time.perf_counter() - self._started
        total = self._seconds | {"step": step, "idle": step - sum(self._seconds.values())}
        return {prefix + name: value for name, value in total.items()}
