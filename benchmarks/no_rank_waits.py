"""How long a step's rollout waits for its slowest rank: prompts dealt out, pulled, or carried over; 8 to 1,024 ranks.

    python benchmarks/no_rank_waits.py [--quick] [--ranks 8 64] [--workload short long]

The rollout loop, the sampler, the queue, the refill of dead groups and the carried groups are the real ones, and steps
follow each other as in train_rl.py. Pretended are the engine, the tools and the clock (shared/virtual_ranks.py): each
rank decodes as fast as shared/cost_model.py says of an H100 (a 14B model with 16 sequences of 5,000 tokens: 28 ms a
token, alone 21 ms), and one after the other they do what comes first in virtual time. New weights empty the prefix
caches; updates and collectives take no time. No model is there, so this says nothing of learning. The numbers do not
depend on the machine. Two real ranks: unequal_ranks.py.

What is drawn, from seeds (shared/drawn_work.py): response lengths log-normal with a deviation of 1.0 in ln(tokens), so
that the 99th percentile is ten times the median (as published of reasoning RL), half of the variance between prompts
and half within a group; 0 to 3 calls of a tool at even distances, each log-uniform from 0.05 to 2 s (as in
rollout_streaming.py). Where dead groups are resampled, half of the prompts have one.

ideal     all tokens of all ranks at the price they have in a full engine / ranks: no tail, no tool, no wait. Where
          groups are carried: what is sampled in the measured steps, which begin after NUM_STEPS_BEFORE others
validates NUM_VALID questions after each step (not in the ideal)
critical  the longest trajectory with its tool calls, alone on an engine, over the ideal. No step that finishes all its
          trajectories takes less; and one that does not know beforehand which it is may begin it last
idle      share of the ranks' time in which their engines do nothing
stale     share of the trained tokens that an older policy has sampled; by how many steps it is older, over all tokens

`ours` is the step over the ideal where prompts are pulled, and groups carried over two steps; `baseline` that of fixed:
long contexts, 64 ranks.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import AutoTokenizer

from arpo.config.sections import RunConfig
from arpo.engine.team import Team
from arpo.log import Console, RunLog
from arpo.metrics import staleness
from arpo.options import AdvantageConfig, BranchingConfig, RolloutConfig
from arpo.protocol import Codec, TagsCodec
from arpo.sampling.carry_over import CarryOver
from arpo.sampling.sampler import Sampler
from arpo.sampling.sources import OneRollout, Refilled
from arpo.sampling.validation import Validation
from arpo.trajectory import Group, Prompt
from benchmarks.shared.cost_model import MODELS
from benchmarks.shared.drawn_work import GPU, MAX_CALLS, RESULT_TOKENS, SEED, Script, Workload, call_s, is_dead
from benchmarks.shared.tiny_model import write_model
from benchmarks.shared.virtual_engine import VirtualEngine, VirtualTools
from benchmarks.shared.virtual_ranks import VirtualRanks, VirtualStore, VirtualTime

REQUEST_S = 0.0003
"""A request to the store over the network: 18 us on one machine, as measured, and a round trip."""
LOOK_S, LOOK_PER_RANK_S = 1.0, 0.004
"""Virtual seconds after which an engine's step ends where the ranks look at the store in between (at least, and per
rank): the real ones look twenty times as often, and a step takes a quarter of an hour."""
WORKLOADS = {
    # the defaults of train_rl.py on 16 GPUs: a rank's trajectories all fit into its engine at once
    "short": Workload("Qwen2.5-7B", 8, 16, median_tokens=600, max_tokens=4096, max_num_seqs=256, unit=16, ranks=(16,)),
    # long contexts: four times more trajectories than the KV cache of an engine holds at once
    "long": Workload("Qwen3-14B", 8, 8, 4000, 32_768, max_num_seqs=16, unit=128, ranks=(8, 64, 1024)),
    "uneven": Workload("Qwen3-14B", 8, 8, 4000, 32_768, max_num_seqs=16, unit=128, slow_speed=0.7, ranks=(16,)),
}
NUM_STEPS = {8: 8, 16: 4, 64: 4, 1024: 1}
NUM_VALID = 512
NUM_STEPS_BEFORE = 3
"""Steps before those that are measured, where groups are carried: the first ones carry less than later ones."""
MOST_RANKS_OF_ALL_MODES = 64


class Mode(NamedTuple):
    """A way to get a step's groups."""

    rollout: dict
    dead_groups: str = "keep"
    validates: bool = False


NO_BRANCHES = BranchingConfig("none")
MODES = {
    "fixed": Mode({}),
    "pull": Mode({"dispatch": "pull"}),
    "fixed, carry_over 1": Mode({"carry_over": 1}),
    "pull, carry_over 1": Mode({"dispatch": "pull", "carry_over": 1}),
    "pull, carry_over 2": Mode({"dispatch": "pull", "carry_over": 2}),
    "fixed, validates": Mode({}, validates=True),
    "pull, validates": Mode({"dispatch": "pull"}, validates=True),
    "fixed, resample": Mode({}, "resample"),
    "pull, resample": Mode({"dispatch": "pull"}, "resample"),
}
OURS = "pull, carry_over 2"
OF_MOST_RANKS = ("fixed", "pull", "pull, carry_over 1")
LEAST_STEPS_CARRIED = 2
"""Measured steps where groups are carried: a step in which many of them end is followed by one in which few do."""


# ---- steps on all ranks


class Score:
    """Rewards that do not depend on what was sampled."""

    on_group = None

    def __call__(self, groups: list[Group]) -> None:
        for group in groups:
            for number, t in enumerate(group.trajectories):
                t.reward = float(number % 2 and not is_dead(group.prompt.prompt_id))


@dataclass
class Step:
    """Adds up over all ranks what a step has taken and given; times are virtual seconds."""

    end_s: float = 0.0
    trained_s: float = 0.0
    """Price of what it is trained on, in seconds of a full engine."""
    held_s: float = 0.0
    """Price of what has been sampled by its end of groups that no step was trained on."""
    busy_s: float = 0.0
    """Of all engines, since the run began."""
    critical_s: float = 0.0
    num_cut_off: int = 0
    num_tokens: int = 0
    stale: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """Some steps of a training without updates, on all ranks."""

    work: Workload
    mode: Mode
    num_ranks: int
    num_steps: int
    codec: Codec

    def __post_init__(self) -> None:
        self.time = VirtualTime(self.num_ranks)
        self.store = VirtualStore(self.time, REQUEST_S)
        sizes = {"max_response_tokens": 4096, "max_tool_calls": MAX_CALLS}
        self.cfg = RolloutConfig(self.work.group_size, **sizes, **self.mode.rollout)
        self.advantage = AdvantageConfig(dead_groups=self.mode.dead_groups)
        self.num_prompts = self.work.prompts_per_rank * self.num_ranks
        num_drawn = (3 if self.mode.dead_groups == "resample" else 1) * self.num_steps + 1  # per step, at most
        self.prompts = self.work.prompts(num_drawn * self.num_prompts, self.codec)
        self.steps = [Step() for _ in range(self.num_steps)]
        self.draws: dict[tuple[int, int], list[Prompt]] = {}

    def __call__(self) -> list[Step]:
        self.time.run(self.on_rank)
        return self.steps

    def make_sampler(self, rank: int) -> Sampler:
        time, work = self.time, self.work
        looks = self.mode.dead_groups == "resample" or self.cfg.carry_over
        max_step_s = max(LOOK_S, LOOK_PER_RANK_S * self.num_ranks) if looks else math.inf
        tools = VirtualTools(time, rank, call_s, "b" * (RESULT_TOKENS // work.unit), RESULT_TOKENS)
        engine = VirtualEngine(
            time, rank, tools, Script(work, self.codec), MODELS[work.model], GPU, work.max_num_seqs, work.unit,
            max_step_s, sends_parts=self.cfg.carry_over > 0, speed=work.slow_speed if rank % 8 == 7 else 1.0,
        )  # fmt: skip

        def sleep(seconds: float) -> None:  # a rank without requests looks as rarely as one that has some
            more_s = min(tools.next_s - time.now[rank], max_step_s) if self.cfg.carry_over else 0.0
            time.sleep(rank, max(seconds, more_s))

        return Sampler(
            engine=engine,
            tools=tools,
            codec=self.codec,
            team=Team(VirtualRanks.make(rank, time, self.store)),
            log=Console(is_main=False),
            seed=SEED,
            rollout=self.cfg,
            branching=NO_BRANCHES,
            max_num_seqs=work.max_num_seqs,
            score=Score(),
            clock=functools.partial(time.now.__getitem__, rank),
            sleep=sleep,
        )

    def make_validation(self, sampler: Sampler) -> Validation:
        run = RunConfig(validate_every=1)
        log = RunLog(Path(), run, is_main=False)
        return Validation(sampler, log, self.work.prompts(NUM_VALID, self.codec), run, self.num_steps + 1)

    def draw(self, num_drawn: int, count: int) -> list[Prompt]:
        """Return the next prompts; the same list on all ranks."""
        if (num_drawn, count) not in self.draws:
            self.draws[num_drawn, count] = [self.prompts[i] for i in range(num_drawn, num_drawn + count)]
        return self.draws[num_drawn, count]

    def on_rank(self, rank: int) -> None:
        """Run the steps of one rank as train_rl.py does, each up to the groups that it would train on."""
        sampler, num_drawn = self.make_sampler(rank), 0
        carry = CarryOver(sampler, self.num_prompts) if self.cfg.carry_over else None
        refills = self.advantage.dead_groups == "resample"
        validation = self.make_validation(sampler) if self.mode.validates else None
        for number, record in enumerate(self.steps, start=1):
            count = self.num_prompts * (1 + self.advantage.max_resample * refills)
            if carry:
                count = carry.num_to_draw(steps_left=2)  # the training goes on behind what is simulated
            prompts = self.draw(num_drawn, count)
            if carry:
                source = carry.begin_step(number, prompts)
            elif refills:
                source = Refilled(sampler, prompts, number, num_wanted=self.num_prompts)
            else:
                source = OneRollout(sampler, prompts, number)
            sampler.run(source, "rollout", self.num_prompts)
            sampler.score(source.to_score)
            sampled = source.exchange()
            num_drawn += len(sampled) if refills else count
            sampler.engine.sync()
            if validation:
                validation.after(number)
            record.busy_s += sampler.engine.busy_s
            held = (t for c in (carry.carried if carry else ()) for t in c.state.trajectories.values())
            record.held_s += sum(map(self.work.fair_s, held))
            if rank == 0:
                self.note(record, number, sampled, getattr(source, "num_cut_off", 0))

    def note(self, record: Step, number: int, groups: list[Group], num_cut_off: int) -> None:
        trajectories = [t for group in groups for t in group.trajectories]
        record.end_s, record.num_cut_off = self.time.now[0], num_cut_off
        record.trained_s = sum(map(self.work.fair_s, trajectories))
        record.critical_s = max(map(self.work.alone_s, trajectories))
        record.num_tokens = sum(t.num_sampled_tokens for t in trajectories)
        record.stale = staleness(groups, number).values()


class Measured(NamedTuple):
    """The means over a number of simulated steps."""

    step_s: float
    over_ideal: float
    critical_over_ideal: float
    idle: float
    num_cut_off: float
    stale_share: float
    staleness: float
    staleness_max: float


def measure(work: Workload, mode: Mode, num_ranks: int, num_steps: int, codec: Codec) -> Measured:
    num_before = NUM_STEPS_BEFORE if mode.rollout.get("carry_over") else 0
    steps = Run(work, mode, num_ranks, num_before + num_steps, codec)()
    before, last, counted = [Step(), *steps][num_before], steps[-1], steps[num_before:]
    seconds, num_tokens = last.end_s - before.end_s, sum(step.num_tokens for step in counted)
    ideal_s = (sum(step.trained_s for step in counted) + last.held_s - before.held_s) / num_ranks
    busy_s = (last.busy_s - before.busy_s) / num_ranks
    stale = [(step.num_tokens, step.stale) for step in counted if step.stale]
    return Measured(
        seconds / num_steps,
        seconds / ideal_s,
        sum(step.critical_s for step in counted) / ideal_s,
        1 - busy_s / seconds,
        sum(step.num_cut_off for step in counted) / num_steps,
        sum(values["carry_over/tokens"] for _, values in stale) / num_tokens,
        sum(count * values["carry_over/staleness"] for count, values in stale) / num_tokens,
        max((values["carry_over/staleness_max"] for _, values in stale), default=0.0),
    )


def table(workloads: list[str], ranks: list[int], quick: bool, codec: Codec) -> dict[tuple[str, int, str], Measured]:
    """Measure and print all modes of these workloads on these numbers of ranks."""
    found: dict[tuple[str, int, str], Measured] = {}
    columns = "workload | ranks | prompts | step s | over ideal | critical | idle | cut off | stale | steps | at most"
    print(f"| {columns} |\n{'|---' * (columns.count('|') + 1)}|")
    for workload in workloads:
        work = replace(WORKLOADS[workload], prompts_per_rank=2) if quick else WORKLOADS[workload]
        for num_ranks in work.ranks[:1] if quick else [number for number in work.ranks if number in ranks]:
            for name, mode in MODES.items():
                if num_ranks > MOST_RANKS_OF_ALL_MODES and name not in OF_MOST_RANKS:
                    continue
                least = LEAST_STEPS_CARRIED if mode.rollout.get("carry_over") else 1
                num_steps = 1 if quick else max(NUM_STEPS[num_ranks], least)
                m = found[workload, num_ranks, name] = measure(work, mode, num_ranks, num_steps, codec)
                numbers = f"{m.step_s:.0f} | {m.over_ideal:.2f} | {m.critical_over_ideal:.2f} | {m.idle:.0%}"
                stale = f"{m.stale_share:.0%} | {m.staleness:.2f} | {m.staleness_max:.0f}"
                print(f"| {workload} | {num_ranks} | {name} | {numbers} | {m.num_cut_off:.0f} | {stale} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one step, two prompts a rank, long contexts, the least ranks"
    )
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(NUM_STEPS), choices=list(NUM_STEPS))
    args = parser.parse_args()
    if "long" not in args.workload:
        parser.error("--workload must name long, of which the last line is")
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        workloads = ["long"] if args.quick else args.workload
        found = table(workloads, args.ranks, args.quick, TagsCodec(AutoTokenizer.from_pretrained(folder)))
    print(json.dumps(summary(found)))


def summary(found: dict[tuple[str, int, str], Measured]) -> dict[str, float | str]:
    """Return the last line: long contexts on the most ranks of all modes, and two of the modes on the most ranks."""
    numbers = [ranks for workload, ranks, _ in found if workload == "long"]
    size, largest = max(ranks for ranks in numbers if ranks <= MOST_RANKS_OF_ALL_MODES), max(numbers)
    of = {name: found["long", size, name] for name in MODES}
    ours, baseline = of[OURS].over_ideal, of["fixed"].over_ideal
    result = {"name": "no_rank_waits", "ratio": baseline / ours, "ours": ours, "baseline": baseline}
    result |= {"unit": "step / ideal", "pull": of["pull"].over_ideal}
    result["critical"] = of["fixed"].critical_over_ideal
    result |= {"staleness": of[OURS].staleness, "idle": of[OURS].idle, "idle_fixed": of["fixed"].idle}
    result["refill_ratio"] = of["fixed, resample"].step_s / of["pull, resample"].step_s
    # what a validation adds to a step, over a step without
    result["validation"] = of["fixed, validates"].step_s / of["fixed"].step_s - 1
    names = {"pull": "pull", "carried": "pull, carry_over 1", "baseline": "fixed"}
    for word, name in names.items():
        result |= {f"{word}_{largest}": found["long", largest, name].over_ideal} if largest > size else {}
    return result


if __name__ == "__main__":
    main()
