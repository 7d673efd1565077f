"""Many ranks in one process on a virtual clock: what takes time says how long, and whoever is earliest goes on.

Each rank is a thread that runs the real rollout. Only one runs at any moment, and it hands over where it waits in
virtual time, so all that ranks do happens in the order of virtual time, and a run repeats exactly.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from arpo.engine import Chunk, SamplingSpec
from arpo.tools.base import ToolContext, ToolResult
from arpo.tools.sessions import Sessions
from benchmarks.shared.cost_model import BF16, Hardware, Shape, decode_seconds, forward_flops, kv_bytes_per_token

STACK_BYTES = 512 * 1024


class VirtualTime:
    """The clocks of `num_ranks` threads, in seconds."""

    def __init__(self, num_ranks: int):
        self.now = [0.0] * num_ranks
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._waiting: list[tuple[float, int]] = []

    def sleep(self, rank: int, seconds: float) -> None:
        """Go on with this rank when no other one is earlier."""
        self.now[rank] += seconds
        if self._waiting and self._waiting[0] < (self.now[rank], rank):
            heapq.heappush(self._waiting, (self.now[rank], rank))
            self._wake_next()
            self._turns[rank].acquire()

    def _wake_next(self) -> None:
        if self._waiting:
            self._turns[heapq.heappop(self._waiting)[1]].release()

    def run(self, body: Callable[[int], None]) -> list[float]:
        """Call body(rank) on all ranks, from where their clocks are; return when each was done."""
        errors: list[BaseException] = []

        def on_thread(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                body(rank)
            except BaseException as error:  # raised below, in the caller's thread
                errors.append(error)
            self._wake_next()

        threading.stack_size(STACK_BYTES)
        threads = [threading.Thread(target=on_thread, args=(rank,)) for rank in range(len(self.now))]
        for rank, thread in enumerate(threads):
            thread.start()
            heapq.heappush(self._waiting, (self.now[rank], rank))
        self._wake_next()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
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


@dataclass
class Request:
    """One request in flight, in real tokens."""

    token_ids: list[int]
    num_left: int
    context: float
    """Tokens in its cache."""
    uncached: float
    """Tokens that must be computed before its first step."""
    spec: SamplingSpec
    finish: str


@dataclass
class VirtualEngine:
    """Decodes what `script` prescribes, as fast as the cost model says. A step goes on until a request or a tool call
    ends: nothing else can happen in between. A token id stands for `unit` tokens."""

    time: VirtualTime
    rank: int
    tools: VirtualTools
    script: Callable[[str], tuple[list[int], str]]
    """Request id -> token ids, and the stop string that they end in; "" for an end token."""
    shape: Shape
    hardware: Hardware
    max_num_seqs: int
    unit: int
    max_step_s: float = float("inf")
    speed: float = 1.0
    """Of this rank, against the others."""
    busy_s: float = 0.0
    running: dict[str, Request] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    """Prompts whose tokens are in the prefix cache."""

    @property
    def num_running(self) -> int:
        return len(self.running)

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        prompt_id, _, turn = request_id.split("|")
        context = float(len(token_ids) * self.unit)
        uncached = self.tools.result_tokens if turn != "0" else 0.0 if prompt_id in self.seen else context
        self.seen.add(prompt_id)
        sampled, stop = self.script(request_id)
        self.running[request_id] = Request(sampled, len(sampled) * self.unit, context, uncached, spec, stop)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def __post_init__(self) -> None:
        at = partial(decode_seconds, self.shape, self.hardware)
        self.weights_s = at(0, 0) / self.speed
        self.sequence_s, self.cached_s = at(1, 0) / self.speed - self.weights_s, at(0, 1) / self.speed - self.weights_s
        flops = forward_flops(self.shape, 1.0, 0.0)
        self.prefill_s = flops / (self.hardware.prefill_share * self.hardware.bf16_tflops * 1e12) / self.speed

    def seconds(self, batch: list[Request], num_steps: int) -> float:
        """Time of so many tokens of each request of the batch, whose caches grow meanwhile."""
        cached = sum([request.context for request in batch]) + len(batch) * (num_steps - 1) / 2
        return num_steps * (self.weights_s + len(batch) * self.sequence_s + cached * self.cached_s)

    def step(self) -> list[Chunk]:
        batch = list(islice(self.running.values(), self.max_num_seqs))
        num_steps = min([request.num_left for request in batch])
        until_s = min(self.tools.next_s - self.time.now[self.rank], self.max_step_s)
        spent = self.seconds(batch, num_steps)
        if spent > until_s:
            num_steps = max(1, min(num_steps, int(until_s / self.seconds(batch, 1))))
            spent = self.seconds(batch, num_steps)
        spent += sum([request.uncached for request in batch]) * self.prefill_s
        self.busy_s += spent
        self.time.sleep(self.rank, spent)
        for request in batch:
            request.uncached = 0.0
            request.num_left -= num_steps
            request.context += num_steps
        ended = [key for key, request in self.running.items() if request.num_left <= 0]
        return [self.chunk(key, self.running.pop(key)) for key in ended]

    def chunk(self, request_id: str, request: Request) -> Chunk:
        ids, stop = request.token_ids, request.finish
        entropies = [1.0] * min(len(ids), max(request.spec.num_entropy_tokens, 0))
        finish = "stop" if stop else "eos"
        return Chunk(request_id, ids, [-0.5] * len(ids), entropies, finish=finish, stop_string=stop or None)


class VirtualTools:
    """Has the interface of a ToolRunner. Each call takes what `latency_s` says of its id."""

    def __init__(self, time: VirtualTime, rank: int, latency_s: Callable[[str], float], text: str, result_tokens: int):
        self.time, self.rank, self.latency_s, self.text, self.result_tokens = time, rank, latency_s, text, result_tokens
        self.tools = {"search": None}
        self.sessions = Sessions({}, None)
        self.pending: list[tuple[float, str]] = []

    @property
    def num_pending(self) -> int:
        return len(self.pending)

    @property
    def next_s(self) -> float:
        """When the next call ends."""
        return self.pending[0][0] if self.pending else float("inf")

    def start(self, call_id: str, tag: str, argument: str, context: ToolContext | None = None) -> None:
        heapq.heappush(self.pending, (self.time.now[self.rank] + self.latency_s(call_id), call_id))

    def collect(self, *, block: bool) -> list[tuple[str, ToolResult]]:
        if block:
            self.time.sleep(self.rank, max(self.next_s - self.time.now[self.rank], 0.0))
        finished = []
        while self.next_s <= self.time.now[self.rank]:
            finished.append((heapq.heappop(self.pending)[1], ToolResult(self.text, ok=True)))
        return finished

    def abandon(self) -> None:
        self.pending.clear()


def cost_of_tokens(shape: Shape, hw: Hardware, num_tokens: float, start: float, batch: int) -> float:
    """Seconds of an engine for `num_tokens` tokens behind a cache of `start`, as one of `batch` that are decoded."""
    alone = BF16 * shape.parameters / (hw.memory_share * hw.memory_gb_s * 1e9) + hw.step_overhead_ms / 1e3
    cache = (start + num_tokens / 2) * kv_bytes_per_token(shape) / (hw.memory_share * hw.memory_gb_s * 1e9)
    return num_tokens * (alone / batch + hw.overhead_ms_per_sequence / 1e3 + cache)
