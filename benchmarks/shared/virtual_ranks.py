"""Many ranks in one process on a virtual clock: what takes time says how long, and whoever is earliest goes on.

Each rank is a thread that runs the real rollout. Only one runs at any moment, and it hands over where it waits in
virtual time, so all that ranks do happens in the order of virtual time, and a run repeats exactly.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from arpo.ranks import Ranks

T = TypeVar("T")
STACK_BYTES = 512 * 1024


class VirtualTime:
    """The clocks of `num_ranks` threads, in seconds."""

    def __init__(self, num_ranks: int):
        self.now = [0.0] * num_ranks
        self._turns = [threading.Lock() for _ in range(num_ranks)]  # held while their ranks must wait
        self._waiting: list[tuple[float, int]] = []  # a heap: when each rank that is not in `gather` goes on
        self._gathered: dict[int, Any] = {}
        self._everywhere: list[Any] = []
        self._error: BaseException | None = None

    def sleep(self, rank: int, seconds: float) -> None:
        """Go on with this rank when no other one is earlier."""
        self.now[rank] += seconds
        if self._waiting and self._waiting[0] < (self.now[rank], rank):
            _, earliest = heapq.heapreplace(self._waiting, (self.now[rank], rank))
            self._turns[earliest].release()
            self._wait(rank)

    def gather(self, rank: int, value: T) -> list[T]:
        """Return the values of all ranks, which wait for the last of them. Collective."""
        self._gathered[rank] = value
        if len(self._gathered) < len(self.now):
            self._wake_next()
            self._wait(rank)
            return self._everywhere
        self._everywhere = [self._gathered[number] for number in range(len(self.now))]
        self._gathered = {}
        self.now[:] = [max(self.now)] * len(self.now)
        self._waiting = [(self.now[number], number) for number in range(len(self.now)) if number != rank]
        return self._everywhere

    def _wait(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self._error:
            raise self._error

    def _wake_next(self) -> None:
        if self._waiting:
            self._turns[heapq.heappop(self._waiting)[1]].release()

    def run(self, body: Callable[[int], None]) -> list[float]:
        """Call body(rank) on all ranks, from where their clocks are; return when each was done. Raises what the first
        rank that fails raises."""

        def on_thread(rank: int) -> None:
            try:
                self._wait(rank)
                body(rank)
                self._wake_next()
            except BaseException as error:  # raised below, in the caller's thread
                if self._error is None:
                    self._error = error
                    for turn in self._turns:  # no rank but this one runs: all others fail with it
                        if turn.locked():
                            turn.release()

        for turn in self._turns:
            turn.acquire(blocking=False)
        threading.stack_size(STACK_BYTES)
        threads = [threading.Thread(target=on_thread, args=(rank,)) for rank in range(len(self.now))]
        for rank, thread in enumerate(threads):
            thread.start()
            heapq.heappush(self._waiting, (self.now[rank], rank))
        self._wake_next()
        for thread in threads:
            thread.join()
        if self._error:
            raise self._error
        return list(self.now)


class VirtualStore:
    """The store of the simulated ranks, with the methods of torch's that a queue calls. A request takes `seconds`;
    requests do not wait for each other."""

    def __init__(self, time: VirtualTime, seconds: float):
        self.time, self.seconds = time, seconds
        self.values: dict[str, int | bytes] = {}
        self.num_requests = 0

    def of(self, rank: int) -> VirtualStore.Client:
        return VirtualStore.Client(self, rank)

    @dataclass(frozen=True)
    class Client:
        """A rank's connection."""

        store: VirtualStore
        rank: int

        def _asked(self) -> dict[str, int | bytes]:
            self.store.num_requests += 1
            self.store.time.sleep(self.rank, self.store.seconds)
            return self.store.values

        def add(self, key: str, amount: int) -> int:
            values = self._asked()
            values[key] = values.get(key, 0) + amount
            return values[key]

        def set(self, key: str, value: str) -> None:
            self._asked()[key] = value.encode()

        def multi_get(self, keys: list[str]) -> list[bytes]:
            while not all(key in self._asked() for key in keys):
                pass  # another rank is about to write it
            return [self.store.values[key] for key in keys]

        def delete_key(self, key: str) -> bool:
            return self._asked().pop(key, None) is not None


@dataclass(frozen=True)
class VirtualRanks(Ranks):
    """A rank whose collectives take no time, but wait for the last rank; values are not copied."""

    time: VirtualTime | None = None

    @classmethod
    def make(cls, rank: int, time: VirtualTime, store: VirtualStore) -> VirtualRanks:
        world_size = len(time.now)
        return cls(rank, world_size, torch.device("cpu"), mesh=None, store=store.of(rank), time=time)

    def all_gather_objects(self, value: T) -> list[T]:
        return self.time.gather(self.rank, value)
