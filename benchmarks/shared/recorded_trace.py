"""The recorded trace (benchmarks/trace.json.gz): token counts and times of six real runs; and an engine that plays it.

Each run: a 135M model on the long GSM8K task, 12 steps of 5 prompts x 8 trajectories. Three runs fork by top_h, with
two roots per group; three do not fork (GRPO). Recorded on two CPU cores, calls of the Python sandbox included.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arpo.engine import Chunk, SamplingSpec
from arpo.protocol import Codec
from arpo.tools.base import ToolResult
from arpo.trajectory import Prompt
from arpo.tree import num_unique
from benchmarks.shared.virtual_engine import Request, VirtualEngine, VirtualTools
from benchmarks.shared.virtual_ranks import VirtualTime

TRACE = Path(__file__).resolve().parents[1] / "trace.json.gz"
ENTROPY_TOKENS = 20
MAX_TOKENS = 4096
BLOCK = 16
"""Tokens of a block of the prefix cache. Only full blocks are kept."""


class Turn(NamedTuple):
    """One turn of a trajectory."""

    sampled: int
    """Tokens."""
    result: int
    """Tokens of the tool result; 0 without a call."""
    ms: float | None
    """Duration of the call; None if no tool ran."""
    entropy: float


@dataclass
class Branch:
    """A trajectory."""

    parent: str
    """Its parent's id; "" for a root."""
    fork: int
    """Turns inherited from the parent."""
    turns: list[Turn]
    """All turns, the inherited ones included."""


class Tree(NamedTuple):
    """The trajectories of a prompt."""

    name: str
    """The prompt's id. It seeds the random numbers."""
    prompt: int
    """Tokens of the prompt."""
    unique: int
    """Tokens of all rows; a prefix that rows share counts once (arpo/tree.py)."""
    paths: dict[str, Branch]
    """Trajectory id -> trajectory."""

    @property
    def row_tokens(self) -> int:
        response_tokens = sum(turn.sampled + turn.result for path in self.paths.values() for turn in path.turns)
        return response_tokens + self.prompt * len(self.paths)


def record(runs: list[str]) -> None:
    """Write the trace of all trajectories that these runs dumped."""
    from transformers import AutoTokenizer

    trace: dict[str, list] = {}
    for run in map(Path, runs):
        tokenizer = AutoTokenizer.from_pretrained(run / "hf")
        for file in sorted(run.glob("trajectories/step_*.jsonl.gz")):
            groups = defaultdict(list)
            for t in map(json.loads, gzip.decompress(file.read_bytes()).splitlines()):
                groups[t["prompt_id"]].append(t)
            trace.setdefault(run.name, []).append([recorded(group, tokenizer) for group in groups.values()])
    TRACE.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0))


def recorded(group: list[dict], tokenizer) -> list:
    """Return a dumped group as numbers. A call does not count if its result did not fit into the context."""
    ids = tokenizer.apply_chat_template(group[0]["messages"], add_generation_prompt=True, return_dict=False)
    rows = []
    for t in group:
        fork = sum(turn["inherited"] for turn in t["turns"])
        turns = []
        for turn in t["turns"][fork:]:
            result = turn["result_end"] - turn["end"]
            ms = [round(1000 * c["seconds"], 1) for c in turn["tool_calls"] if c["executed"] and result]
            turns.append([turn["end"] - turn["start"], result, ms[0] if ms else None, turn["entropy"]])
        rows.append([t["trajectory_id"], t["parent_id"] or "", fork, turns])
    unique = num_unique([np.array([*ids, *t["token_ids"]]) for t in group])
    return [group[0]["prompt_id"], len(ids), unique, rows]


def read() -> dict[str, list[list[Tree]]]:
    """Return run -> steps -> trees. A run's name is ALGORITHM_seedN."""
    trace = json.loads(gzip.decompress(TRACE.read_bytes()))
    return {run: [[tree_of(*tree) for tree in step] for step in steps] for run, steps in trace.items()}


def tree_of(name: str, prompt: int, unique: int, rows: list[list]) -> Tree:
    paths: dict[str, Branch] = {}
    # parents first: an id has one dot more than its parent's
    for path, parent, fork, new_turns in sorted(rows, key=lambda row: row[0].count(".")):
        inherited = paths[parent].turns[:fork] if parent else []
        paths[path] = Branch(parent, fork, [*inherited, *(Turn(*turn) for turn in new_turns)])
    return Tree(name, prompt, unique, paths)


# ---- engine and tools that play the trace


class Played:
    """A step of the trace, addressed by request ids "prompt|trajectory|turn"."""

    def __init__(self, trees: list[Tree], seed: str, codec: Codec):
        self.trees = {tree.name: tree for tree in trees}
        self.seed = seed
        self.codec = codec
        encode = partial(codec.tokenizer.encode, add_special_tokens=False)
        [self.opening_tag] = encode("<search>")
        [self.closing_tag] = encode("</search>")
        [self.letter] = encode("a")
        # tokens of the tags around a result
        self.num_around = len(codec.encode_result("b", MAX_TOKENS)[1]) - 1

    @property
    def prompts(self) -> list[Prompt]:
        return [
            Prompt(name, [], [""], tools=("search",), token_ids=(self.letter,) * tree.prompt)
            for name, tree in self.trees.items()
        ]

    def turn(self, request_id: str) -> Turn:
        name, path, turn = request_id.split("|")[:3]
        return self.trees[name].paths[path].turns[int(turn)]

    def __call__(self, request_id: str) -> tuple[list[int], str]:
        """Return the token ids of a turn, and the stop string that they end in ("" for an end token)."""
        turn = self.turn(request_id)
        if turn.result:
            return [self.opening_tag, *[self.letter] * (turn.sampled - 2), self.closing_tag], "</search>"
        return [*[self.letter] * (turn.sampled - 1), self.codec.tokenizer.eos_token_id], ""

    def result(self, call_id: str) -> ToolResult:
        return ToolResult("b" * (self.turn(call_id).result - self.num_around), ok=True)

    def children(self, name: str, path: str, turn: int) -> list[str]:
        """Return the trajectories forked from this one right before this turn."""
        paths = self.trees[name].paths
        return [key for key, branch in paths.items() if (branch.parent, branch.fork) == (path, turn)]


class PlayedTools(VirtualTools):
    """Counts the calls, and how often an engine without work waits for calls."""

    num_calls = 0
    engine: PlayedEngine

    def __init__(self, time: VirtualTime, played: Played, scale: float = 1.0):
        super().__init__(
            time,
            rank=0,
            latency_s=lambda call_id: scale * (played.turn(call_id).ms or 0.0) / 1000,
            text="",
            result_tokens=0,
        )
        self.played = played
        self.waited_at: set[int] = set()
        """A wait is counted once per number of decode steps done so far."""

    def start(self, call_id: str, *args) -> None:
        self.num_calls += self.played.turn(call_id).ms is not None
        super().start(call_id, *args)

    def collect(self, *, block: bool) -> list[tuple[str, ToolResult]]:
        if block:
            self.waited_at.add(self.engine.num_steps)
        return [(call_id, self.played.result(call_id)) for call_id, _ in super().collect(block=block)]


class PlayedEngine(VirtualEngine):
    """Plays a step of the trace, with one token per token id.

    A turn that may branch returns two chunks: its first ENTROPY_TOKENS tokens, and the rest.
    """

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        sampled, stop = self.script(request_id)
        name, path, turn_text = request_id.split("|")
        turn = int(turn_text)
        branch = self.script.trees[name].paths[path]
        length = len(token_ids)
        num_cached = length if name in self.cached else 0
        # a branch's first request finds the last result in the cache, since its parent has read it
        is_first_of_branch = branch.parent and turn == branch.fork
        if turn and not is_first_of_branch:
            num_cached = length - branch.turns[turn - 1].result - 1
        self.cached.add(name)
        request = Request(
            token_ids=sampled,
            num_left=len(sampled),
            context=length,
            uncached=length - min(num_cached, length - 1) // BLOCK * BLOCK,
            spec=spec,
            finish=stop,
            num_prompt_ids=length,
        )
        request.part_at = max(len(sampled) - ENTROPY_TOKENS, 0) if turn else 0
        self.running[request_id] = request

    def steps_until_event(self, batch: list[Request]) -> int:
        """Decode steps until the first request of the batch has a chunk to return."""
        return min(request.num_left - request.part_at for request in batch)

    def chunk(self, request_id: str, request: Request) -> Chunk:
        chunk = super().chunk(request_id, request)
        request.part_at = 0
        return replace(chunk, entropies=[self.script.turn(request_id).entropy] * len(chunk.entropies))
