"""What the policy of a simulated step would sample: lengths and calls drawn from seeds, and what they cost."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

from arpo.protocol import Codec
from arpo.trajectory import Prompt, Trajectory
from benchmarks.shared.cost_model import MODELS
from benchmarks.shared.hardware import HARDWARE
from benchmarks.shared.virtual_engine import cost_of_tokens

GPU = HARDWARE["8xH100-80GB"]
PROMPT_TOKENS, RESULT_TOKENS, MAX_CALLS = 400, 192, 3
CALL_S = (0.05, 2.0)
DEVIATION, SHARE_OF_PROMPT = 1.0, 0.5
DEAD_SHARE = 0.5
SEED = 0


@dataclass(frozen=True)
class Workload:
    """A step's trajectories, per rank."""

    model: str
    prompts_per_rank: int
    group_size: int
    median_tokens: int
    max_tokens: int
    max_num_seqs: int
    unit: int
    """Tokens that a token id of the simulation stands for; all times are of real tokens."""
    slow_speed: float = 1.0
    """Speed of every eighth rank."""
    ranks: tuple[int, ...] = (8,)
    """Numbers of ranks for which it is measured."""

    # ---- lengths and latencies

    def tokens_of(self, prompt_id: str, path: str) -> tuple[int, int]:
        """Return (units that the trajectory samples, calls that it makes)."""
        rng = random.Random(f"{SEED}|1|{prompt_id}|{path}")
        z = math.sqrt(SHARE_OF_PROMPT) * difficulty(prompt_id) + math.sqrt(1 - SHARE_OF_PROMPT) * rng.gauss()
        tokens = min(self.median_tokens * math.exp(DEVIATION * z), self.max_tokens)
        units = max(3, round(tokens / self.unit))
        return units, min(rng.randint(0, MAX_CALLS), units // 3 - 1)  # a call has three tokens: tags and a letter

    def prompts(self, count: int, codec: Codec) -> list[Prompt]:
        ids = tuple(codec.tokenizer.encode("a" * (PROMPT_TOKENS // self.unit), add_special_tokens=False))
        return [Prompt(f"{i}", [], [""], tools=("search",), token_ids=ids) for i in range(count)]

    # ---- what it costs

    @property
    def batch(self) -> int:
        """Trajectories that a full engine decodes at once."""
        return min(self.max_num_seqs, self.prompts_per_rank * self.group_size)

    def alone_s(self, t: Trajectory) -> float:
        """Seconds of a trajectory that has an engine to itself, with its calls."""
        units, calls = self.tokens_of(t.prompt_id, t.trajectory_id)
        waits = sum(call_s(f"{t.prompt_id}|{t.trajectory_id}|{turn}|0") for turn in range(calls))
        return cost_of_tokens(MODELS[self.model], GPU, units * self.unit, PROMPT_TOKENS, batch=1) + waits

    def fair_s(self, t: Trajectory) -> float:
        """Seconds that what it has sampled so far costs a full engine."""
        start = PROMPT_TOKENS + (len(t.turns) - 1) * RESULT_TOKENS / 2
        return cost_of_tokens(MODELS[self.model], GPU, t.num_sampled_tokens * self.unit, start, self.batch)


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
        [self.opened], [self.closed] = encode("<search>"), encode("</search>")
        [self.letter] = encode("a")
        self.work, self.eos = work, codec.tokenizer.eos_token_id

    def __call__(self, request_id: str) -> tuple[list[int], str]:
        prompt_id, path, turn = request_id.split("|")
        prompt_id = prompt_id.rsplit(" ")[-1]  # of a validation: its number
        units, calls = self.work.tokens_of(prompt_id, path)
        count = units * (int(turn) + 1) // (calls + 1) - units * int(turn) // (calls + 1)
        if int(turn) == calls:
            return [*[self.letter] * (count - 1), self.eos], ""
        return [self.opened, *[self.letter] * (count - 2), self.closed], "</search>"
