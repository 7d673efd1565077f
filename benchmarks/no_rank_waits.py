"""How long a rollout waits for its slowest rank: prompts dealt out, pulled, or carried over, on up to 1,024 ranks.

    python benchmarks/no_rank_waits.py [--quick] [--ranks 8 64] [--workload short long]

Real: the rollout loop, the sampler, the queue, the refill of dead groups, and the carried groups. Steps follow each
other as in train_rl.py. Simulated: the engine, the tools and the clock (shared/virtual_ranks.py). Each rank decodes as
fast as shared/cost_model.py says of an H100 (a 14B model with 16 sequences of 5,000 tokens: 28 ms a token; with one: 21
ms). New weights empty the prefix caches. Updates and collectives take no time. There is no model, so this says nothing
of learning. The numbers do not depend on the machine.

Drawn from seeds (shared/drawn_work.py): response lengths are log-normal with a standard deviation of 1.0 in ln(tokens).
So the 99th percentile is ten times the median, as published of reasoning RL. Half of the variance is between prompts,
half within a group. A trajectory makes 0 to 3 tool calls at even distances, each log-uniform from 0.05 to 2 s (as in
rollout_streaming.py). Where dead groups are resampled, half of the prompts have a dead group.

ideal     seconds if all tokens were decoded in full engines on all ranks: no tail, no tool, no wait. With carried
          groups: of the tokens sampled in the measured steps, which follow NUM_STEPS_BEFORE other steps
validates NUM_VALID questions after each step (not in the ideal)
critical  the longest trajectory with its tool calls, alone on an engine, over the ideal. A step that finishes all its
          trajectories cannot be shorter. It may be longer: this trajectory is not known beforehand, and may start last
idle      share of the ranks' time in which their engines do nothing
cut off   groups that were started and not needed, per step
stale     share of the trained tokens sampled by an older policy; then by how many steps it is older: mean, largest

`ours`: step / ideal if prompts are pulled and groups carried over two steps. `baseline`: prompts are dealt out (fixed).
Both: long contexts, 64 ranks.
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
from benchmarks.shared.drawn_work import GPU, MAX_CALLS, RESULT_TOKENS, SEED, Script, Workload, call_s, is_dead
from benchmarks.shared.shapes import MODELS
from benchmarks.shared.tiny_model import write_model
from benchmarks.shared.virtual_engine import VirtualEngine, VirtualTools
from benchmarks.shared.virtual_ranks import VirtualRanks, VirtualStore, VirtualTime

REQUEST_S = 0.0003
"""A request to the store over the network: 18 us on one machine, as measured, and a round trip."""
POLL_S = 1.0
POLL_PER_RANK_S = 0.004
"""An engine's step ends after this many virtual seconds (the larger of POLL_S and POLL_PER_RANK_S * ranks) if the ranks
poll the store in between. Real ranks poll twenty times as often, but here a step takes a quarter of an hour."""
WORKLOADS = {
    # the defaults of train_rl.py on 16 GPUs: all trajectories of a rank fit into its engine at once
    "short": Workload(
        model="Qwen2.5-7B",
        prompts_per_rank=8,
        group_size=16,
        median_tokens=600,
        max_tokens=4096,
        max_num_seqs=256,
        unit=16,
        ranks=(16,),
    ),
    # long contexts: four times more trajectories than the KV cache of an engine holds at once
    "long": Workload(
        model="Qwen3-14B",
        prompts_per_rank=8,
        group_size=8,
        median_tokens=4000,
        max_tokens=32_768,
        max_num_seqs=16,
        unit=128,
        ranks=(8, 64, 1024),
    ),
}
NUM_STEPS = {8: 8, 16: 4, 64: 4, 1024: 1}
"""Ranks -> measured steps."""
NUM_VALID = 512
NUM_STEPS_BEFORE = 3
"""Steps before the measured steps, where groups are carried: the first steps carry less than later steps."""
MAX_RANKS_OF_ALL_MODES = 64
MIN_STEPS_CARRIED = 2
"""At least so many measured steps where groups are carried: if many groups end in one step, few do in the next."""


class Mode(NamedTuple):
    """A way to get the groups of a step."""

    rollout: dict
    """Options of RolloutConfig."""
    dead_groups: str = "keep"
    validates: bool = False


NO_BRANCHES = BranchingConfig("none")
MODES = {
    "fixed": Mode({}),
    "pull": Mode({"dispatch": "pull"}),
    "pull, carry_over 1": Mode({"dispatch": "pull", "carry_over": 1}),
    "pull, carry_over 2": Mode({"dispatch": "pull", "carry_over": 2}),
    "fixed, validates": Mode({}, validates=True),
    "fixed, resample": Mode({}, "resample"),
    "pull, resample": Mode({"dispatch": "pull"}, "resample"),
}
OURS = "pull, carry_over 2"
MODES_OF_MOST_RANKS = ("fixed", "pull", "pull, carry_over 1")


# ---- steps on all ranks


class Score:
    """Rewards that do not depend on the sampled tokens."""

    on_group = None

    def __call__(self, groups: list[Group]) -> None:
        for group in groups:
            for index, t in enumerate(group.trajectories):
                t.reward = float(index % 2 and not is_dead(group.prompt.prompt_id))


@dataclass
class Step:
    """Sums over all ranks for one step. Times are virtual seconds."""

    end_s: float = 0.0
    trained_s: float = 0.0
    """Cost of the trained trajectories in a full engine."""
    carried_s: float = 0.0
    """Cost in a full engine of the tokens that unfinished (carried) groups have at the end of the step."""
    busy_s: float = 0.0
    """Busy time of all engines since the start of the run."""
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
        self.cfg = RolloutConfig(
            group_size=self.work.group_size,
            max_response_tokens=4096,
            max_tool_calls=MAX_CALLS,
            **self.mode.rollout,
        )
        self.advantage = AdvantageConfig(dead_groups=self.mode.dead_groups)
        self.num_prompts = self.work.prompts_per_rank * self.num_ranks
        max_drawn_per_step = 3 if self.mode.dead_groups == "resample" else 1
        num_drawn = max_drawn_per_step * self.num_steps + 1
        self.prompts = self.work.prompts(num_drawn * self.num_prompts, self.codec)
        self.steps = [Step() for _ in range(self.num_steps)]
        self.draws: dict[tuple[int, int], list[Prompt]] = {}

    def __call__(self) -> list[Step]:
        self.time.run(self.on_rank)
        return self.steps

    def make_sampler(self, rank: int) -> Sampler:
        time = self.time
        work = self.work
        polls = self.mode.dead_groups == "resample" or self.cfg.carry_over
        max_step_s = max(POLL_S, POLL_PER_RANK_S * self.num_ranks) if polls else math.inf
        tools = VirtualTools(
            time, rank, latency_s=call_s, text="b" * (RESULT_TOKENS // work.unit), result_tokens=RESULT_TOKENS
        )
        engine = VirtualEngine(
            time=time,
            rank=rank,
            tools=tools,
            script=Script(work, self.codec),
            shape=MODELS[work.model],
            hardware=GPU,
            max_num_seqs=work.max_num_seqs,
            unit=work.unit,
            max_step_s=max_step_s,
            sends_parts=self.cfg.carry_over > 0,
        )

        def sleep(seconds: float) -> None:
            # a rank without requests polls as rarely as one with requests
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
        questions = self.work.prompts(NUM_VALID, self.codec)
        return Validation(sampler, log, questions, run=run, num_steps=self.num_steps + 1)

    def draw(self, num_drawn: int, count: int) -> list[Prompt]:
        """Return the next prompts; the same list object on all ranks."""
        if (num_drawn, count) not in self.draws:
            self.draws[num_drawn, count] = [self.prompts[i] for i in range(num_drawn, num_drawn + count)]
        return self.draws[num_drawn, count]

    def on_rank(self, rank: int) -> None:
        """Run the steps of one rank as train_rl.py does, each up to the groups to train on."""
        sampler = self.make_sampler(rank)
        num_drawn = 0
        carry = CarryOver(sampler, self.num_prompts) if self.cfg.carry_over else None
        refills = self.advantage.dead_groups == "resample"
        validation = self.make_validation(sampler) if self.mode.validates else None
        for step_number, record in enumerate(self.steps, start=1):
            count = self.num_prompts * (1 + self.advantage.max_resample * refills)
            if carry:
                # never the last step: the simulated training would continue
                count = carry.num_to_draw(steps_left=2)
            prompts = self.draw(num_drawn, count)
            if carry:
                source = carry.begin_step(step_number, prompts)
            elif refills:
                source = Refilled(sampler, prompts, step_number, num_wanted=self.num_prompts)
            else:
                source = OneRollout(sampler, prompts, step_number)
            sampler.run(source, "rollout", self.num_prompts)
            sampler.score(source.to_score)
            groups = source.exchange()
            num_drawn += len(groups) if refills else count
            sampler.engine.sync()
            if validation:
                validation.after(step_number)
            record.busy_s += sampler.engine.busy_s
            if carry:
                unfinished = (t for c in carry.carried for t in c.state.trajectories.values())
                record.carried_s += sum(map(self.work.fair_s, unfinished))
            if rank == 0:
                self.note(record, step_number, groups, getattr(source, "num_cut_off", 0))

    def note(self, record: Step, step_number: int, groups: list[Group], num_cut_off: int) -> None:
        trajectories = [t for group in groups for t in group.trajectories]
        record.end_s = self.time.now[0]
        record.num_cut_off = num_cut_off
        record.trained_s = sum(map(self.work.fair_s, trajectories))
        record.critical_s = max(map(self.work.alone_s, trajectories))
        record.num_tokens = sum(t.num_sampled_tokens for t in trajectories)
        record.stale = staleness(groups, step_number).values()


class Measured(NamedTuple):
    """Means over the measured steps."""

    step_s: float
    over_ideal: float
    critical_over_ideal: float
    idle: float
    num_cut_off: float
    stale_share: float
    staleness: float
    staleness_max: float


def measure(work: Workload, mode: Mode, *, num_ranks: int, num_steps: int, codec: Codec) -> Measured:
    num_before = NUM_STEPS_BEFORE if mode.rollout.get("carry_over") else 0
    steps = Run(work, mode, num_ranks=num_ranks, num_steps=num_before + num_steps, codec=codec)()
    before = [Step(), *steps][num_before]
    last = steps[-1]
    counted = steps[num_before:]
    seconds = last.end_s - before.end_s
    num_tokens = sum(step.num_tokens for step in counted)
    ideal_s = (sum(step.trained_s for step in counted) + last.carried_s - before.carried_s) / num_ranks
    busy_s = (last.busy_s - before.busy_s) / num_ranks
    stale = [(step.num_tokens, step.stale) for step in counted if step.stale]
    return Measured(
        step_s=seconds / num_steps,
        over_ideal=seconds / ideal_s,
        critical_over_ideal=sum(step.critical_s for step in counted) / ideal_s,
        idle=1 - busy_s / seconds,
        num_cut_off=sum(step.num_cut_off for step in counted) / num_steps,
        stale_share=sum(values["carry_over/tokens"] for _, values in stale) / num_tokens,
        staleness=sum(count * values["carry_over/staleness"] for count, values in stale) / num_tokens,
        staleness_max=max((values["carry_over/staleness_max"] for _, values in stale), default=0.0),
    )


def table(workloads: list[str], ranks: list[int], *, quick: bool, codec: Codec) -> dict[tuple[str, int, str], Measured]:
    """Measure and print all modes of the workloads on each number of ranks."""
    results: dict[tuple[str, int, str], Measured] = {}
    columns = "workload | ranks | prompts | step s | over ideal | critical | idle | cut off | stale | steps | at most"
    print(f"| {columns} |\n{'|---' * (columns.count('|') + 1)}|")
    for workload in workloads:
        work = WORKLOADS[workload]
        sizes = [size for size in work.ranks if size in ranks]
        if quick:
            sizes = work.ranks[:1]
            work = replace(work, prompts_per_rank=2)
        for num_ranks in sizes:
            for name, mode in MODES.items():
                if num_ranks > MAX_RANKS_OF_ALL_MODES and name not in MODES_OF_MOST_RANKS:
                    continue
                min_steps = MIN_STEPS_CARRIED if mode.rollout.get("carry_over") else 1
                num_steps = 1 if quick else max(NUM_STEPS[num_ranks], min_steps)
                m = measure(work, mode, num_ranks=num_ranks, num_steps=num_steps, codec=codec)
                results[workload, num_ranks, name] = m
                times = f"{m.step_s:.0f} | {m.over_ideal:.2f} | {m.critical_over_ideal:.2f} | {m.idle:.0%}"
                stale = f"{m.stale_share:.0%} | {m.staleness:.2f} | {m.staleness_max:.0f}"
                print(f"| {workload} | {num_ranks} | {name} | {times} | {m.num_cut_off:.0f} | {stale} |", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one step, two prompts a rank, long contexts, the least ranks"
    )
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(NUM_STEPS), choices=list(NUM_STEPS))
    args = parser.parse_args()
    if "long" not in args.workload:
        parser.error("--workload must name long: the last line is about it")
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        codec = TagsCodec(AutoTokenizer.from_pretrained(folder))
        results = table(["long"] if args.quick else args.workload, args.ranks, quick=args.quick, codec=codec)
    print(json.dumps(summary(results)))


def summary(results: dict[tuple[str, int, str], Measured]) -> dict[str, float | str]:
    """Return the last line: long contexts, on the most ranks that ran all modes, and some modes on the most ranks."""
    sizes = [ranks for workload, ranks, _ in results if workload == "long"]
    size = max(ranks for ranks in sizes if ranks <= MAX_RANKS_OF_ALL_MODES)
    largest = max(sizes)
    by_mode = {name: results["long", size, name] for name in MODES}
    ours = by_mode[OURS]
    fixed = by_mode["fixed"]
    result = {
        "name": "no_rank_waits",
        "ratio": fixed.over_ideal / ours.over_ideal,
        "ours": ours.over_ideal,
        "baseline": fixed.over_ideal,
        "unit": "step / ideal",
        "pull": by_mode["pull"].over_ideal,
        "critical": fixed.critical_over_ideal,
        "staleness": ours.staleness,
        "idle": ours.idle,
        "idle_fixed": fixed.idle,
        "refill_ratio": by_mode["fixed, resample"].step_s / by_mode["pull, resample"].step_s,
        # seconds that a validation adds, over a step without it
        "validation": by_mode["fixed, validates"].step_s / fixed.step_s - 1,
    }
    if largest > size:
        result[f"pull_{largest}"] = results["long", largest, "pull"].over_ideal
        result[f"carried_{largest}"] = results["long", largest, "pull, carry_over 1"].over_ideal
        result[f"baseline_{largest}"] = results["long", largest, "fixed"].over_ideal
    return result


if __name__ == "__main__":
    main()
