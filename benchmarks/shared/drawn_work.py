"""The work of a simulated step: lengths and tool calls drawn from seeds, and their cost."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

from arpo.protocol import Codec
from arpo.trajectory import Prompt, Trajectory
from benchmarks.shared.hardware import HARDWARE
from benchmarks.shared.shapes import MODELS
from benchmarks.shared.virtual_engine import cost_of_tokens

GPU = HARDWARE["8xH100-80GB"]
PROMPT_TOKENS = 400
RESULT_TOKENS = 192
MAX_CALLS = 3
CALL_S = (0.05, 2.0)
"""Seconds of a tool call: log-uniform between these."""
DEVIATION = 1.0
"""Standard deviation of ln(tokens)."""
SHARE_OF_PROMPT = 0.5
"""Share of that variance between prompts; the rest is within a group."""
DEAD_SHARE = 0.5
SEED = 0


@dataclass(frozen=True)
class Workload:
    """The trajectories of a step, per rank."""

    model: str
    prompts_per_rank: int
    group_size: int
    median_tokens: int
    max_tokens: int
    max_num_seqs: int
    unit: int
    """Tokens per token id of the simulation. All times are of real tokens."""
    ranks: tuple[int, ...] = (8,)
    """Numbers of ranks to measure."""

    # ---- lengths and latencies

    def tokens_of(self, prompt_id: str, path: str) -> tuple[int, int]:
        """Return how many units the trajectory samples, and how many calls it makes."""
        rng = random.Random(f"{SEED}|1|{prompt_id}|{path}")
        z = math.sqrt(SHARE_OF_PROMPT) * difficulty(prompt_id) + math.sqrt(1 - SHARE_OF_PROMPT) * rng.gauss()
        tokens = min(self.median_tokens * math.exp(DEVIATION * z), self.max_tokens)
        units = max(3, round(tokens / self.unit))
        # a call has at least three tokens: two tags and a letter
        return units, min(rng.randint(0, MAX_CALLS), units // 3 - 1)

    def prompts(self, count: int, codec: Codec) -> list[Prompt]:
        ids = tuple(codec.tokenizer.encode("a" * (PROMPT_TOKENS // self.unit), add_special_tokens=False))
        return [Prompt(f"{i}", [], [""], tools=("search",), token_ids=ids) for i in range(count)]

    # ---- costs

    @property
    def batch(self) -> int:
        """Trajectories that a full engine decodes at once."""
        return min(self.max_num_seqs, self.prompts_per_rank * self.group_size)

    def alone_s(self, t: Trajectory) -> float:
        """Seconds of a trajectory with all calls, alone on an engine."""
        units, calls = self.tokens_of(t.prompt_id, t.trajectory_id)
        waits = sum(call_s(f"{t.prompt_id}|{t.trajectory_id}|{turn}|0") for turn in range(calls))
        return cost_of_tokens(MODELS[self.model], GPU, units * self.unit, start=PROMPT_TOKENS, batch=1) + waits

    def fair_s(self, t: Trajectory) -> float:
        """Seconds that the tokens sampled so far cost a full engine."""
        start = PROMPT_TOKENS + (len(t.turns) - 1) * RESULT_TOKENS / 2
        return cost_of_tokens(MODELS[self.model], GPU, t.num_sampled_tokens * self.unit, start=start, batch=self.batch)


@functools.cache
def difficulty(prompt_id: str) -> float:
    """The prompt's part of ln(tokens), standard normal."""
    return random.Random(f"{SEED}|{prompt_id}").gauss()


def call_s(call_id: str) -> float:
    low, high = map(math.log, CALL_S)
    return math.exp(random.Random(f"{SEED}|{call_id}").uniform(low, high))


def is_dead(prompt_id: str) -> bool:
    return random.Random(f"{SEED}|dead|{prompt_id}").random() < DEAD_SHARE


class Script:
    """The tokens of each request: a call, or an answer and the end token."""

    def __init__(self, work: Workload, codec: Codec):
        encode = functools.partial(codec.tokenizer.encode, add_special_tokens=False)
        [self.opening_tag] = encode("<search>")
        [self.closing_tag] = encode("</search>")
        [self.letter] = encode("a")
        self.work = work
        self.eos = codec.tokenizer.eos_token_id

    def __call__(self, request_id: str) -> tuple[list[int], str]:
        prompt_id, path, turn = request_id.split("|")
        # a validation's prompt id is "LABEL NUMBER"
        prompt_id = prompt_id.rsplit(" ")[-1]
        units, calls = self.work.tokens_of(prompt_id, path)
        # calls are at even distances
        count = units * (int(turn) + 1) // (calls + 1) - units * int(turn) // (calls + 1)
        if int(turn) == calls:
            return [*[self.letter] * (count - 1), self.eos], ""
        return [self.opening_tag, *[self.letter] * (count - 2), self.closing_tag], "</search>"
