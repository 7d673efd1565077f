"""How long a step's rollout waits for its slowest rank: prompts dealt out, or pulled from a queue; 8 to 1,024 ranks.

    python benchmarks/no_rank_waits.py [--quick] [--virtual] [--ranks 8 64] [--workload short long]

The rollout loop, the sampler, the queue and the refill of dead groups are the real ones. Pretended are the engine, the
tools and the clock (shared/virtual_ranks.py): each rank decodes as fast as shared/cost_model.py says of an H100 (a 14B
model with 16 sequences of 5,000 tokens: 28 ms a token, alone 21 ms), and one after the other they do what comes first
in virtual time. No model is there, so this says nothing of learning. At the end two real ranks with vLLM on the CPU
sample prompts of which every other one is long (shared/unequal_ranks.py).

What is drawn, from seeds: response lengths log-normal with a deviation of 1.0 in ln(tokens), so that the 99th
percentile is ten times the median (as published of reasoning RL), half of the variance between prompts and half within
a group; 0 to 3 calls of a tool at even distances, each log-uniform from 0.05 to 2 s (as in rollout_streaming.py). Where
dead groups are resampled, half of the prompts have one.

ideal     all tokens of all ranks at the price they have in a full engine / ranks: no tail, no tool, no wait
critical  the longest trajectory with its tool calls, alone on an engine, over the ideal. No step that finishes all its
          trajectories takes less; and one that does not know beforehand which it is may begin it last
idle      share of the ranks' time in which their engines do nothing

`ours` is the step over the ideal under pull + longest first, `baseline` that of fixed: long contexts, 64 ranks.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoTokenizer

from arpo.dispatch import ExpectedLengths, PromptQueue, RefilledQueue
from arpo.engine.team import Team
from arpo.log import Console
from arpo.options import AdvantageConfig, BranchingConfig, RolloutConfig
from arpo.protocol import Codec
from arpo.ranks import Ranks
from arpo.sampler import Sampler, Share
from arpo.selection import num_to_sample, refills_from_queue, until_full
from arpo.trajectory import Group, Prompt
from benchmarks.shared import unequal_ranks
from benchmarks.shared.cost_model import HARDWARE, MODELS
from benchmarks.shared.tiny_model import write_model
from benchmarks.shared.virtual_ranks import VirtualEngine, VirtualStore, VirtualTime, VirtualTools, cost_of_tokens

GPU = HARDWARE["8xH100-80GB"]
PROMPT_TOKENS, RESULT_TOKENS, MAX_CALLS = 400, 192, 3
CALL_S = (0.05, 2.0)
DEVIATION, SHARE_OF_PROMPT = 1.0, 0.5
DEAD_SHARE = 0.5
REQUEST_S = 0.0003
"""A request to the store over the network: 18 us on one machine, as measured, and a round trip."""
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
    ranks: tuple[int, ...] = (8, 64)


WORKLOADS = {
    # the defaults of train_rl.py on 16 GPUs: a rank's trajectories all fit into its engine at once
    "short": Workload("Qwen2.5-7B", 8, 16, median_tokens=600, max_tokens=4096, max_num_seqs=256, unit=16),
    # long contexts: four times more trajectories than the KV cache of an engine holds at once
    "long": Workload("Qwen3-14B", 8, 8, 4000, 32_768, max_num_seqs=16, unit=128, ranks=(8, 64, 1024)),
    "uneven": Workload("Qwen3-14B", 8, 8, 4000, 32_768, max_num_seqs=16, unit=128, slow_speed=0.7),
}
NUM_STEPS = {8: 2, 64: 1, 1024: 1}
MOST_RANKS_REFILLED = 64


class Mode(NamedTuple):
    """A way to get a step's groups."""

    rollout: dict
    dead_groups: str = "keep"


MODES = {  # carried-over trajectories would be one more line here, and steps that do not begin with empty engines
    "fixed": Mode({}),
    "pull": Mode({"dispatch": "pull"}),
    "pull, longest first": Mode({"dispatch": "pull", "pull_order": "longest_first"}),
    "fixed, resample": Mode({}, "resample"),
    "pull, resample": Mode({"dispatch": "pull"}, "resample"),
}


# ---- what the policy would sample


@functools.cache
def difficulty(prompt_id: str) -> float:
    """The prompt's part of ln(tokens), standard normal."""
    return random.Random(f"{SEED}|{prompt_id}").gauss()


@functools.cache
def tokens_of(prompt_id: str, path: str, epoch: int = 1) -> tuple[int, int]:
    """(units that the trajectory samples, calls that it makes)."""
    rng = random.Random(f"{SEED}|{epoch}|{prompt_id}|{path}")
    z = math.sqrt(SHARE_OF_PROMPT) * difficulty(prompt_id) + math.sqrt(1 - SHARE_OF_PROMPT) * rng.gauss()
    tokens = min(WORK.median_tokens * math.exp(DEVIATION * z), WORK.max_tokens)
    units = max(3, round(tokens / WORK.unit))
    return units, min(rng.randint(0, MAX_CALLS), units // 3 - 1)  # a call has three tokens at least: tags and a letter


def call_s(call_id: str) -> float:
    low, high = map(math.log, CALL_S)
    return math.exp(random.Random(f"{SEED}|{call_id}").uniform(low, high))


def is_dead(prompt_id: str) -> bool:
    return random.Random(f"{SEED}|dead|{prompt_id}").random() < DEAD_SHARE


def alone_s(prompt_id: str, path: str) -> float:
    """Seconds of a trajectory that has an engine to itself."""
    units, calls = tokens_of(prompt_id, path)
    waits = sum(call_s(f"{prompt_id}|{path}|{turn}|0") for turn in range(calls))
    return cost_of_tokens(MODELS[WORK.model], GPU, units * WORK.unit, PROMPT_TOKENS, batch=1) + waits


def fair_s(prompt_id: str, path: str, batch: int) -> float:
    """Seconds that it costs a full engine."""
    units, calls = tokens_of(prompt_id, path)
    return cost_of_tokens(MODELS[WORK.model], GPU, units * WORK.unit, PROMPT_TOKENS + calls * RESULT_TOKENS / 2, batch)


class Script:
    """The tokens of each request: a call, or an answer and the end token."""

    def __init__(self, codec: Codec):
        encode = functools.partial(codec.tokenizer.encode, add_special_tokens=False)
        [self.opened], [self.closed] = encode("<search>"), encode("</search>")
        [self.letter] = encode("a")
        self.eos = codec.tokenizer.eos_token_id

    def __call__(self, request_id: str) -> tuple[list[int], str]:
        prompt_id, path, turn = request_id.split("|")
        units, calls = tokens_of(prompt_id, path)
        count = units * (int(turn) + 1) // (calls + 1) - units * int(turn) // (calls + 1)
        if int(turn) == calls:
            return [*[self.letter] * (count - 1), self.eos], ""
        return [self.opened, *[self.letter] * (count - 2), self.closed], "</search>"


# ---- a step on all ranks


class VirtualSampler(Sampler):
    """The real one, whose queues wait on the virtual clock."""

    def queue(self, *args) -> PromptQueue:
        queue = super().queue(*args)
        if isinstance(queue, RefilledQueue):
            time, rank = self.engine.time, self.engine.rank
            queue.clock, queue.sleep = lambda: time.now[rank], functools.partial(time.sleep, rank)
        return queue


def score(groups: list[Group]) -> None:
    for group in groups:
        for number, t in enumerate(group.trajectories):
            t.reward = float(number % 2 and not is_dead(group.prompt.prompt_id))


def make_sampler(rank: int, num_ranks: int, codec: Codec, time: VirtualTime, store: VirtualStore) -> VirtualSampler:
    text = "b" * (RESULT_TOKENS // WORK.unit)
    tools = VirtualTools(time, rank, call_s, text, RESULT_TOKENS)
    sizes = {"max_num_seqs": WORK.max_num_seqs, "unit": WORK.unit}
    speed = WORK.slow_speed if rank % 8 == 7 else 1.0
    engine = VirtualEngine(time, rank, tools, Script(codec), MODELS[WORK.model], GPU, speed=speed, **sizes)
    team = Team(Ranks(rank, num_ranks, torch.device("cpu"), mesh=None, store=store.of(rank)))
    lengths = ExpectedLengths(RolloutConfig(), {})
    return VirtualSampler(engine, tools, codec, team, Console(is_main=False), SEED, score, WORK.max_num_seqs, lengths)


def prompts_of(step: int, count: int, codec: Codec) -> list[Prompt]:
    ids = tuple(codec.tokenizer.encode("a" * (PROMPT_TOKENS // WORK.unit), add_special_tokens=False))
    return [Prompt(f"{step}.{i}", [], [""], tools=("search",), token_ids=ids) for i in range(count)]


def earlier(prompts: list[Prompt]) -> dict[str, int]:
    """The length of the responses to each prompt in an epoch before, for ExpectedLengths."""
    paths = [str(i) for i in range(WORK.group_size)]
    return {p.prompt_id: sum(tokens_of(p.prompt_id, path, epoch=0)[0] for path in paths) for p in prompts}


def everywhere(
    samplers: list[VirtualSampler], time: VirtualTime, body: Callable[[VirtualSampler], Share]
) -> list[Share]:
    """Run `body` on all ranks, which begin together, and return what each has sampled; their clocks stay apart."""
    shares: dict[int, Share] = {}
    time.now[:] = [max(time.now)] * len(time.now)

    def on_rank(rank: int) -> None:
        shares[rank] = body(samplers[rank])

    time.run(on_rank)
    return [shares[rank] for rank in range(len(samplers))]


def sample_step(
    mode: Mode, step: int, samplers: list[VirtualSampler], time: VirtualTime, codec: Codec
) -> tuple[list[Group], int]:
    """The groups of a step, in rounds where the mode has any, and the number that were cut off."""
    num_prompts = WORK.prompts_per_rank * len(samplers)
    cfg = RolloutConfig(WORK.group_size, max_response_tokens=4096, max_tool_calls=MAX_CALLS, **mode.rollout)
    advantage, none = AdvantageConfig(dead_groups=mode.dead_groups), BranchingConfig("none")
    everything = prompts_of(step, 3 * num_prompts, codec)
    wanted = num_prompts if refills_from_queue(advantage, cfg) else 0
    sampled: list[Group] = []
    num_cut_off = 0
    for sampler in samplers:
        sampler.lengths.state = earlier(everything[:num_prompts]) if cfg.pull_order == "longest_first" else {}
        sampler.engine.max_step_s = 1.0 if wanted else math.inf  # it looks at the store in between
    while count := num_to_sample(sampled, num_prompts, advantage, cfg):
        prompts = everything[len(sampled) : len(sampled) + count]
        name = f"{step}.{len(sampled)}"

        def body(sampler: VirtualSampler, prompts: list[Prompt] = prompts, name: str = name) -> Share:
            return sampler(prompts, cfg, none, description=name, num_wanted=wanted)

        begun: dict[int, Group | None] = {}
        for share in everywhere(samplers, time, body):  # what `Team.exchange` does
            score(share.groups)
            begun |= dict(
                zip([*share.places, *share.cut_off], [*share.groups, *[None for _ in share.cut_off]], strict=True)
            )
        in_order = [begun[place] for place in sorted(begun)]
        groups = until_full(in_order, wanted) if wanted else in_order
        num_cut_off += len(in_order) - len(groups)
        sampled += groups
    return sampled, num_cut_off


class Measured(NamedTuple):
    """The means over a number of simulated steps."""

    step_s: float
    over_ideal: float
    critical_over_ideal: float
    idle: float
    num_cut_off: float


def measure(mode: Mode, num_ranks: int, num_steps: int, codec: Codec) -> Measured:
    total = {"step": 0.0, "ideal": 0.0, "critical": 0.0, "busy": 0.0, "cut_off": 0}
    batch = min(WORK.max_num_seqs, WORK.prompts_per_rank * WORK.group_size)
    for step in range(1, num_steps + 1):
        time = VirtualTime(num_ranks)
        store = VirtualStore(time, REQUEST_S)
        samplers = [make_sampler(rank, num_ranks, codec, time, store) for rank in range(num_ranks)]
        groups, num_cut_off = sample_step(mode, step, samplers, time, codec)
        names = [(group.prompt.prompt_id, t.trajectory_id) for group in groups for t in group.trajectories]
        ideal = sum(fair_s(*name, batch) for name in names) / num_ranks
        total["step"] += max(time.now)
        total["ideal"] += ideal
        total["critical"] += max(alone_s(*name) for name in names)
        total["busy"] += sum(sampler.engine.busy_s for sampler in samplers) / num_ranks
        total["cut_off"] += num_cut_off
    step_s, ideal = total["step"], total["ideal"]
    idle = 1 - total["busy"] / step_s
    return Measured(step_s / num_steps, step_s / ideal, total["critical"] / ideal, idle, total["cut_off"] / num_steps)


def table(workloads: list[str], ranks: list[int], quick: bool, codec: Codec) -> dict[tuple[str, int, str], Measured]:
    """Measure and print all modes of these workloads on these numbers of ranks."""
    global WORK
    found: dict[tuple[str, int, str], Measured] = {}
    columns = ("workload", "ranks", "prompts", "step s", "over ideal", "critical", "idle", "cut off")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for workload in workloads:
        WORK = WORKLOADS[workload]
        tokens_of.cache_clear()
        for num_ranks in WORK.ranks[:1] if quick else [number for number in WORK.ranks if number in ranks]:
            for name, mode in MODES.items():
                if mode.dead_groups == "resample" and num_ranks > MOST_RANKS_REFILLED:
                    continue
                num_steps = 1 if quick else NUM_STEPS[num_ranks]
                m = found[workload, num_ranks, name] = measure(mode, num_ranks, num_steps, codec)
                numbers = f"{m.step_s:.0f} | {m.over_ideal:.2f} | {m.critical_over_ideal:.2f} | {m.idle:.0%}"
                print(f"| {workload} | {num_ranks} | {name} | {numbers} | {m.num_cut_off:.0f} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 ranks, one step, one repeat: about a minute")
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(NUM_STEPS), choices=list(NUM_STEPS))
    parser.add_argument("--virtual", action="store_true", help="without the two real ranks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        codec = Codec(AutoTokenizer.from_pretrained(folder))
        found = table(args.workload, args.ranks, args.quick, codec)
        real = {}
        if not args.virtual:
            seconds, num_long, pull_us = unequal_ranks.measure(folder, repeats=1 if args.quick else 3)
            print(f"two real ranks: dealt out {seconds['fixed']:.1f} s, pulled {seconds['pull']:.1f} s;", end=" ")
            print(f"long prompts by rank: {num_long['fixed']}, {num_long['pull']}; a pull takes {pull_us:.0f} us")
            real = {"real_ratio": seconds["fixed"] / seconds["pull"], "pull_us": pull_us}

    size = max(ranks for _, ranks, _ in found if ranks <= MOST_RANKS_REFILLED)
    of = {name: found["long", size, name] for name in MODES}
    ours, baseline = of["pull, longest first"].over_ideal, of["fixed"].over_ideal
    result = {"name": "no_rank_waits", "ratio": baseline / ours, "ours": ours, "baseline": baseline}
    result |= {"unit": "step / ideal", "pull": of["pull"].over_ideal, "critical": of["pull"].critical_over_ideal}
    refill_ratio = of["fixed, resample"].step_s / of["pull, resample"].step_s
    print(json.dumps(result | {"refill_ratio": refill_ratio} | real))


WORK = WORKLOADS["long"]
"""The workload that is being measured."""

if __name__ == "__main__":
    main()
