"""An engine and a tool runner on the virtual clock of virtual_ranks.py, with the interfaces of the real ones."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import ceil

from arpo.engine import Chunk, SamplingSpec
from arpo.tools.base import ToolContext, ToolResult
from arpo.tools.sessions import Sessions
from benchmarks.shared.cost_model import BF16, Shape, decode_seconds, forward_flops, kv_bytes_per_token
from benchmarks.shared.hardware import Hardware
from benchmarks.shared.virtual_ranks import VirtualTime


@dataclass
class Request:
    """One request in flight, in real tokens."""

    token_ids: list[int]
    """All that it samples, of which `num_sent` ids are the rollout's already."""
    num_left: int
    context: float
    """Tokens in its cache."""
    uncached: float
    """Tokens that must be computed before its first step."""
    spec: SamplingSpec
    finish: str
    num_prompt_ids: int
    """Ids of the prompt with which it was first submitted."""
    num_sent: int = 0
    num_sent_before: int = 0
    """Those that it had sent when it was submitted the last time."""
    part_at: int = 0
    """num_left at which the next unit is there."""


@dataclass
class VirtualEngine:
    """Decodes what `script` prescribes, as fast as the cost model says. A step goes on until a request or a tool call
    ends, but no longer than `max_step_s`: nothing else can happen in between. A token id stands for `unit` tokens.

    A request that was aborted and comes back goes on where it was, also within a unit.
    """

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
    sends_parts: bool = False
    """Whether each step returns what it has sampled, and not only whole turns: for requests that may be cut."""
    speed: float = 1.0
    """Of this rank, against the others."""
    busy_s: float = 0.0
    prefilled: float = 0.0
    """Tokens."""
    running: dict[str, Request] = field(default_factory=dict)
    cut: dict[str, Request] = field(default_factory=dict)
    """Requests that were aborted."""
    cached: set[str] = field(default_factory=set)
    """Prompts and trajectories whose tokens are in the prefix cache."""
    contexts: dict[str, float] = field(default_factory=dict)
    """Tokens of each trajectory, up to the end of its last whole turn."""

    @property
    def num_running(self) -> int:
        return len(self.running)

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        prompt_id, path, turn = request_id.split("|")
        owner = f"{prompt_id}|{path}"
        if request := self.cut.pop(request_id, None):
            assert len(token_ids) == request.num_prompt_ids + request.num_sent, f"{request_id}: tokens were lost"
            request.spec, request.num_sent_before, request.uncached = spec, request.num_sent, request.context
        else:
            # in real tokens: a result is shorter than its ids would stand for
            new = self.tools.result_tokens if turn != "0" else len(token_ids) * self.unit
            context = float(self.contexts.get(owner, 0.0) + new)
            is_cached = (prompt_id if turn == "0" else owner) in self.cached
            uncached = context if not is_cached else new if turn != "0" else 0.0
            sampled, stop = self.script(request_id)
            request = Request(sampled, len(sampled) * self.unit, context, uncached, spec, stop, len(token_ids))
            request.part_at = request.num_left - self.unit if self.sends_parts else 0
        self.cached |= {prompt_id, owner}
        self.running[request_id] = request

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request := self.running.pop(request_id, None):
                self.cut[request_id] = request

    def sync(self) -> None:
        """Do what new weights do: empty the prefix cache."""
        self.cached.clear()

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
        uncached = sum([request.uncached for request in batch])
        spent += uncached * self.prefill_s
        self.prefilled += uncached
        self.busy_s += spent
        self.time.sleep(self.rank, spent)
        for request in batch:
            request.uncached = 0.0
            request.num_left -= num_steps
            request.context += num_steps
        ready = [(key, request) for key, request in self.running.items() if request.num_left <= request.part_at]
        return [self.chunk(*pair) for pair in ready]

    def chunk(self, request_id: str, request: Request) -> Chunk:
        """Return what the request has sampled since its last chunk, in whole units."""
        until = len(request.token_ids) - ceil(request.num_left / self.unit)
        ids = request.token_ids[request.num_sent : until]
        measured = request.spec.num_entropy_tokens - (request.num_sent - request.num_sent_before)
        entropies = [1.0] * min(len(ids), max(measured, 0))
        request.num_sent, request.part_at = until, (len(request.token_ids) - until - 1) * self.unit
        if request.num_left > 0:
            return Chunk(request_id, ids, [-0.5] * len(ids), entropies)
        del self.running[request_id]
        self.contexts[request_id.rpartition("|")[0]] = request.context
        finish = "stop" if request.finish else "eos"
        return Chunk(request_id, ids, [-0.5] * len(ids), entropies, finish=finish, stop_string=request.finish or None)


class VirtualTools:
    """Has the interface of a ToolRunner. Each call takes what `latency_s` says of its id."""

    def __init__(self, time: VirtualTime, rank: int, latency_s: Callable[[str], float], text: str, result_tokens: int):
        self.time, self.rank, self.latency_s, self.text, self.result_tokens = time, rank, latency_s, text, result_tokens
        self.tools = {"search": None}
        self.sessions = Sessions()
        self.pending: list[tuple[float, str]] = []
        self.parked: list[tuple[float, str]] = []

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

    def park(self) -> None:
        assert not self.parked
        self.parked, self.pending = self.pending, []

    def unpark(self) -> None:
        assert not self.pending
        self.pending, self.parked = self.parked, []

    def abandon(self) -> None:
        self.pending.clear()


def cost_of_tokens(shape: Shape, hw: Hardware, num_tokens: float, start: float, batch: int) -> float:
    """Seconds of an engine for `num_tokens` tokens behind a cache of `start`, as one of `batch` that are decoded."""
    alone = BF16 * shape.parameters / (hw.memory_share * hw.memory_gb_s * 1e9) + hw.step_overhead_ms / 1e3
    cache = (start + num_tokens / 2) * kv_bytes_per_token(shape) / (hw.memory_share * hw.memory_gb_s * 1e9)
    return num_tokens * (alone / batch + hw.overhead_ms_per_sequence / 1e3 + cache)
