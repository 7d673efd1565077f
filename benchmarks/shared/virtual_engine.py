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
from arpo.tools.sessions import NoSessions
from benchmarks.shared.cost_model import BF16, decode_seconds, forward_flops, kv_bytes_per_token
from benchmarks.shared.hardware import Hardware
from benchmarks.shared.shapes import Shape
from benchmarks.shared.virtual_ranks import VirtualTime


@dataclass
class Request:
    """One request in flight. All counts are of real tokens, if they do not say ids."""

    token_ids: list[int]
    """All ids of the turn. The rollout already has the first `num_sent` of them."""
    num_left: int
    """Tokens still to decode."""
    context: float
    """Tokens in the request's KV cache."""
    uncached: float
    """Tokens to prefill before the first step."""
    spec: SamplingSpec
    finish: str
    """The stop string at the end of the turn; "" for an end token."""
    num_prompt_ids: int
    """Ids of the prompt at the first submission."""
    num_sent: int = 0
    num_sent_before: int = 0
    """`num_sent` at the latest submission."""
    part_at: int = 0
    """The next chunk is due when `num_left` has fallen to this."""


@dataclass
class VirtualEngine:
    """Decodes the tokens of `script`, at the speed of the cost model. A token id stands for `unit` tokens.

    A step lasts until a request or a tool call ends, but not longer than `max_step_s`. Nothing else can happen in
    between. An aborted request, submitted again, continues at the same token, also within a unit.
    """

    time: VirtualTime
    rank: int
    tools: VirtualTools
    script: Callable[[str], tuple[list[int], str]]
    """Request id -> token ids, and the stop string at the end; "" for an end token."""
    shape: Shape
    hardware: Hardware
    max_num_seqs: int
    unit: int
    max_step_s: float = float("inf")
    sends_parts: bool = False
    """True: each step returns the tokens sampled so far (for requests that may be aborted). False: full turns only."""
    busy_s: float = 0.0
    num_steps: int = 0
    num_sampled: int = 0
    """Tokens decoded."""
    prefilled: float = 0.0
    """Tokens prefilled."""
    running: dict[str, Request] = field(default_factory=dict)
    cut: dict[str, Request] = field(default_factory=dict)
    """Aborted requests."""
    cached: set[str] = field(default_factory=set)
    """Prompts and trajectories with tokens in the prefix cache."""
    contexts: dict[str, float] = field(default_factory=dict)
    """Trajectory -> number of tokens up to the end of the last finished turn."""

    @property
    def num_running(self) -> int:
        return len(self.running)

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        prompt_id, path, turn = request_id.split("|")
        owner = f"{prompt_id}|{path}"
        request = self.cut.pop(request_id, None)
        if request:
            assert len(token_ids) == request.num_prompt_ids + request.num_sent, f"{request_id}: tokens were lost"
            request.spec = spec
            request.num_sent_before = request.num_sent
            request.uncached = request.context
        else:
            is_first_turn = turn == "0"
            # in real tokens: a result has fewer than its ids would stand for
            new = len(token_ids) * self.unit if is_first_turn else self.tools.result_tokens
            context = float(self.contexts.get(owner, 0.0) + new)
            if (prompt_id if is_first_turn else owner) not in self.cached:
                uncached = context
            else:
                uncached = 0.0 if is_first_turn else new
            sampled, stop = self.script(request_id)
            request = Request(
                token_ids=sampled,
                num_left=len(sampled) * self.unit,
                context=context,
                uncached=uncached,
                spec=spec,
                finish=stop,
                num_prompt_ids=len(token_ids),
            )
            request.part_at = request.num_left - self.unit if self.sends_parts else 0
        self.cached |= {prompt_id, owner}
        self.running[request_id] = request

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            request = self.running.pop(request_id, None)
            if request:
                self.cut[request_id] = request

    def sync(self) -> None:
        """Empty the prefix cache, as new weights do."""
        self.cached.clear()

    def __post_init__(self) -> None:
        decode_s = partial(decode_seconds, self.shape, self.hardware)
        self.weights_s = decode_s(0, 0)
        self.sequence_s = decode_s(1, 0) - self.weights_s
        self.cached_s = decode_s(0, 1) - self.weights_s
        flops = forward_flops(self.shape, 1.0, 0.0)
        self.prefill_s = flops / (self.hardware.prefill_share * self.hardware.bf16_tflops * 1e12)

    def seconds(self, batch: list[Request], num_steps: int) -> float:
        """Seconds of `num_steps` decode steps of the batch. The caches grow by a token per step."""
        cached = sum([request.context for request in batch]) + len(batch) * (num_steps - 1) / 2
        return num_steps * (self.weights_s + len(batch) * self.sequence_s + cached * self.cached_s)

    def steps_until_event(self, batch: list[Request]) -> int:
        """Decode steps until the first request of the batch ends."""
        return min([request.num_left for request in batch])

    def step(self) -> list[Chunk]:
        batch = list(islice(self.running.values(), self.max_num_seqs))
        num_steps = self.steps_until_event(batch)
        until_s = min(self.tools.next_s - self.time.now[self.rank], self.max_step_s)
        spent = self.seconds(batch, num_steps)
        if spent > until_s:
            num_steps = max(1, min(num_steps, int(until_s / self.seconds(batch, 1))))
            spent = self.seconds(batch, num_steps)
        uncached = sum([request.uncached for request in batch])
        spent += uncached * self.prefill_s
        self.prefilled += uncached
        self.busy_s += spent
        self.num_steps += num_steps
        self.num_sampled += num_steps * len(batch)
        self.time.sleep(self.rank, spent)
        for request in batch:
            request.uncached = 0.0
            request.num_left -= num_steps
            request.context += num_steps
        ready = [(key, request) for key, request in self.running.items() if request.num_left <= request.part_at]
        return [self.chunk(key, request) for key, request in ready]

    def chunk(self, request_id: str, request: Request) -> Chunk:
        """Return the ids sampled since the request's last chunk, in full units."""
        until = len(request.token_ids) - ceil(request.num_left / self.unit)
        ids = request.token_ids[request.num_sent : until]
        num_entropies = request.spec.num_entropy_tokens - (request.num_sent - request.num_sent_before)
        entropies = [1.0] * min(len(ids), max(num_entropies, 0))
        request.num_sent = until
        request.part_at = (len(request.token_ids) - until - 1) * self.unit
        if request.num_left > 0:
            return Chunk(request_id, ids, [-0.5] * len(ids), entropies)
        del self.running[request_id]
        self.contexts[request_id.rpartition("|")[0]] = request.context
        finish = "stop" if request.finish else "eos"
        return Chunk(request_id, ids, [-0.5] * len(ids), entropies, finish=finish, stop_string=request.finish or None)


class VirtualTools:
    """Has the interface of a ToolRunner. A call takes `latency_s(call_id)` seconds and returns `text`."""

    def __init__(self, time: VirtualTime, rank: int, latency_s: Callable[[str], float], text: str, result_tokens: int):
        self.time = time
        self.rank = rank
        self.latency_s = latency_s
        self.text = text
        self.result_tokens = result_tokens
        self.tools = {"search": None}
        self.sessions = NoSessions()
        self.pending: list[tuple[float, str]] = []
        """A heap of calls, by the virtual time of the end."""
        self.parked: list[tuple[float, str]] = []

    @property
    def num_pending(self) -> int:
        return len(self.pending)

    @property
    def next_s(self) -> float:
        """Virtual time at which the next call ends."""
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


def cost_of_tokens(shape: Shape, hw: Hardware, num_tokens: float, *, start: float, batch: int) -> float:
    """Seconds that `num_tokens` tokens cost an engine. The sequence decodes in a batch of `batch`, after `start` tokens
    in its cache."""
    alone = BF16 * shape.parameters / (hw.memory_share * hw.memory_gb_s * 1e9) + hw.step_overhead_ms / 1e3
    cache = (start + num_tokens / 2) * kv_bytes_per_token(shape) / (hw.memory_share * hw.memory_gb_s * 1e9)
    return num_tokens * (alone / batch + hw.overhead_ms_per_sequence / 1e3 + cache)
