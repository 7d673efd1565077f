"""The recorded trace (benchmarks/trace.json.gz): what six real runs sampled, in numbers; and what plays it.

A 135M model on the long GSM8K task, 12 steps of 5 prompts x 8 trajectories in each run: three with forks by top_h, two
roots each, and three without (GRPO). Recorded on two CPU cores, calls of the Python sandbox included.
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
ENTROPY_TOKENS, MOST_TOKENS = 20, 4096
BLOCK = 16
"""Tokens of a block of the prefix cache: of a part of one nothing is kept."""


class Turn(NamedTuple):
    """Tokens that a trajectory sampled in one turn, and read back; 0 result tokens where it called nothing."""

    sampled: int
    result: int
    ms: float | None
    """Duration of the call; None where no tool ran."""
    entropy: float


@dataclass
class Branch:
    """A trajectory; `turns` are all of its turns, of which it inherited those before `fork`."""

    parent: str
    fork: int
    turns: list[Turn]


class Tree(NamedTuple):
    """The trajectories of a prompt, by their ids."""

    name: str
    """The prompt's id, which names its random numbers."""
    prompt: int
    """Tokens."""
    unique: int
    """Tokens of all rows, those that rows begin with alike counted once (arpo/tree.py)."""
    paths: dict[str, Branch]

    @property
    def row_tokens(self) -> int:
        own = sum(turn.sampled + turn.result for path in self.paths.values() for turn in path.turns)
        return own + self.prompt * len(self.paths)


def record(runs: list[str]) -> None:
    """Write the trace: of all trajectories that these runs dumped."""
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
    """Return the numbers of a dumped group. A call whose result found no room is none."""
    ids = tokenizer.apply_chat_template(group[0]["messages"], add_generation_prompt=True, return_dict=False)
    rows = []
    for t in group:
        fork, turns = sum(turn["inherited"] for turn in t["turns"]), []
        for turn in t["turns"][fork:]:
            result = turn["result_end"] - turn["end"]
            ms = [round(1000 * c["seconds"], 1) for c in turn["tool_calls"] if c["executed"] and result] or [None]
            turns.append([turn["end"] - turn["start"], result, ms[0], turn["entropy"]])
        rows.append([t["trajectory_id"], t["parent_id"] or "", fork, turns])
    unique = num_unique([np.array([*ids, *t["token_ids"]]) for t in group])
    return [group[0]["prompt_id"], len(ids), unique, rows]


def read() -> dict[str, list[list[Tree]]]:
    """Return the trees of each step of each run, by its name: ALGORITHM_seedN."""
    trace = json.loads(gzip.decompress(TRACE.read_bytes()))
    return {run: [[tree_of(*tree) for tree in step] for step in steps] for run, steps in trace.items()}


def tree_of(name: str, prompt: int, unique: int, rows: list[list]) -> Tree:
    paths: dict[str, Branch] = {}
    for path, parent, fork, own in sorted(rows, key=lambda row: row[0].count(".")):
        inherited = paths[parent].turns[:fork] if parent else []
        paths[path] = Branch(parent, fork, [*inherited, *(Turn(*turn) for turn in own)])
    return Tree(name, prompt, unique, paths)


# ---- engine and tools that play it


class Played:
    """A step of the trace, as the loops ask for it: by "prompt|trajectory|turn"."""

    def __init__(self, trees: list[Tree], seed: str, codec: Codec):
        self.trees, self.seed, self.codec = {tree.name: tree for tree in trees}, seed, codec
        encode = partial(codec.tokenizer.encode, add_special_tokens=False)
        [self.opened], [self.closed], [self.letter] = encode("<search>"), encode("</search>"), encode("a")
        self.num_around = len(codec.encode_result("b", MOST_TOKENS)[1]) - 1

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
        """Return the token ids of a turn, and the stop string that they end in."""
        turn = self.turn(request_id)
        if turn.result:
            return [self.opened, *[self.letter] * (turn.sampled - 2), self.closed], "</search>"
        return [*[self.letter] * (turn.sampled - 1), self.codec.tokenizer.eos_token_id], ""

    def result(self, call_id: str) -> ToolResult:
        return ToolResult("b" * (self.turn(call_id).result - self.num_around), ok=True)

    def children(self, name: str, path: str, turn: int) -> list[str]:
        """Return the trajectories that were forked off this one before this turn."""
        return [key for key, one in self.trees[name].paths.items() if (one.parent, one.fork) == (path, turn)]


class PlayedTools(VirtualTools):
    """Counts the calls, and how often an engine without work waits for some."""

    num_calls = 0
    engine: PlayedEngine

    def __init__(self, time: VirtualTime, played: Played, scale: float = 1.0):
        super().__init__(time, 0, lambda call_id: scale * (played.turn(call_id).ms or 0.0) / 1000, "", 0)
        self.played = played
        self.waited_at: set[int] = set()
        """Numbers of decode steps that were done."""

    def start(self, call_id: str, *args) -> None:
        self.num_calls += self.played.turn(call_id).ms is not None
        super().start(call_id, *args)

    def collect(self, *, block: bool) -> list[tuple[str, ToolResult]]:
        if block:
            self.waited_at.add(self.engine.num_steps)
        return [(call_id, self.played.result(call_id)) for call_id, _ in super().collect(block=block)]


class PlayedEngine(VirtualEngine):
    """Counts steps and tokens. A token is a token; a chunk comes once the first k tokens are there, and at the end."""

    num_steps = num_sampled = 0

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        sampled, stop = self.script(request_id)
        name, path, number = request_id.split("|")
        turn, branch = int(number), self.script.trees[name].paths[path]
        known = len(token_ids) if name in self.cached else 0
        if turn and not (branch.parent and turn == branch.fork):  # a fork's result is there since its parent read it
            known = len(token_ids) - branch.turns[turn - 1].result - 1
        self.cached.add(name)
        uncached = len(token_ids) - min(known, len(token_ids) - 1) // BLOCK * BLOCK
        request = Request(sampled, len(sampled), len(token_ids), uncached, spec, stop, len(token_ids))
        request.part_at = max(len(sampled) - ENTROPY_TOKENS, 0) if turn else 0
        self.running[request_id] = request

    def step(self) -> list[Chunk]:
        batch = list(self.running.values())
        num_steps = min(request.num_left - request.part_at for request in batch)
        until_s = self.tools.next_s - self.time.now[0]
        if self.seconds(batch, num_steps) > until_s:
            num_steps = max(1, min(num_steps, int(until_s / self.seconds(batch, 1))))
        uncached = sum(request.uncached for request in batch)
        self.num_steps += num_steps
        self.num_sampled += num_steps * len(batch)
        self.prefilled += uncached
        self.time.sleep(0, self.seconds(batch, num_steps) + uncached * self.prefill_s)
        for request in batch:
            request.uncached = 0.0
            request.num_left -= num_steps
            request.context += num_steps
        return [self.chunk(*pair) for pair in list(self.running.items()) if pair[1].num_left <= pair[1].part_at]

    def chunk(self, request_id: str, request: Request) -> Chunk:
        chunk = super().chunk(request_id, request)
        request.part_at = 0
        return replace(chunk, entropies=[self.script.turn(request_id).entropy] * len(chunk.entropies))
