"""Many ranks in one process on a virtual clock.

Each rank is a thread with the real rollout. Only the thread with the earliest clock runs, until this thread waits in
virtual time. So all events happen in the order of virtual time, and a run repeats exactly.
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
        # a rank that must wait blocks on its lock
        self._turns = [threading.Lock() for _ in range(num_ranks)]
        # a heap of (virtual time, rank): when each rank continues that is not in `gather`
        self._waiting: list[tuple[float, int]] = []
        self._gathered: dict[int, Any] = {}
        self._all_values: list[Any] = []
        self._error: BaseException | None = None

    def sleep(self, rank: int, seconds: float) -> None:
        """Advance the rank's clock, and return when no other rank is earlier."""
        self.now[rank] += seconds
        if self._waiting and self._waiting[0] < (self.now[rank], rank):
            _, earliest = heapq.heapreplace(self._waiting, (self.now[rank], rank))
            self._turns[earliest].release()
            self._wait(rank)

    def gather(self, rank: int, value: T) -> list[T]:
        """Return the values of all ranks. All wait for the last one. Collective."""
        self._gathered[rank] = value
        if len(self._gathered) < len(self.now):
            self._wake_next()
            self._wait(rank)
            return self._all_values
        self._all_values = [self._gathered[number] for number in range(len(self.now))]
        self._gathered = {}
        self.now[:] = [max(self.now)] * len(self.now)
        self._waiting = [(self.now[number], number) for number in range(len(self.now)) if number != rank]
        return self._all_values

    def _wait(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self._error:
            raise self._error

    def _wake_next(self) -> None:
        if self._waiting:
            self._turns[heapq.heappop(self._waiting)[1]].release()

    def run(self, body: Callable[[int], None]) -> list[float]:
        """Call body(rank) on all ranks, from the present clocks on. Return the virtual end time of each rank. If ranks
        fail, raises the error of the first failed rank."""

        def on_thread(rank: int) -> None:
            try:
                self._wait(rank)
                body(rank)
                self._wake_next()
            except BaseException as error:  # raised below, in the caller's thread
                if self._error is None:
                    self._error = error
                    # all other ranks are blocked: release them, so that they fail too
                    for turn in self._turns:
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
    """The store of the simulated ranks, with those methods of torch's store that a queue calls. A request takes
    `seconds`; requests do not wait for each other."""

    def __init__(self, time: VirtualTime, seconds: float):
        self.time = time
        self.seconds = seconds
        self.values: dict[str, int | bytes] = {}
        self.num_requests = 0

    def of(self, rank: int) -> VirtualStore.Client:
        return VirtualStore.Client(self, rank)

    @dataclass(frozen=True)
    class Client:
        """A rank's connection."""

        store: VirtualStore
        rank: int

        def _request(self) -> dict[str, int | bytes]:
            self.store.num_requests += 1
            self.store.time.sleep(self.rank, self.store.seconds)
            return self.store.values

        def add(self, key: str, amount: int) -> int:
            values = self._request()
            values[key] = values.get(key, 0) + amount
            return values[key]

        def set(self, key: str, value: str) -> None:
            self._request()[key] = value.encode()

        def multi_get(self, keys: list[str]) -> list[bytes]:
            while not all(key in self._request() for key in keys):
                pass  # another rank is about to write it
            return [self.store.values[key] for key in keys]

        def delete_key(self, key: str) -> bool:
            return self._request().pop(key, None) is not None


@dataclass(frozen=True)
class VirtualRanks(Ranks):
    """A rank whose collectives wait for the last rank and take no time otherwise. Values are not copied."""

    time: VirtualTime | None = None

    @classmethod
    def make(cls, rank: int, time: VirtualTime, store: VirtualStore) -> VirtualRanks:
        world_size = len(time.now)
        return cls(
            rank=rank,
            world_size=world_size,
            device=torch.device("cpu"),
            mesh=None,
            store=store.of(rank),
            time=time,
        )

    def all_gather_objects(self, value: T) -> list[T]:
        return self.time.gather(self.rank, value)
