"""A recorded trace on the virtual clock: our scheduler, the released lock-step loop, and GRPO without branching.

    python benchmarks/play_trace.py [--quick] [--record RUN ...]

First table: the cost model against eight published step times (shared/published.py). Three times are used for fits.
Of the other five the model predicts three within 15 %. None of the three holds under all assumptions about the
unpublished facts: lengths of later turns (verl-tool), spread of lengths within a prompt (verl), the cost of a draft
(SkyRL). So the model's seconds say nothing of other people's machines, but compare schedules on the same engine.

Then the trace: six real runs of a 135M model on the long GSM8K task (shared/recorded_trace.py). It has the tokens of
prompts, turns and results, the seconds of calls, entropies, and the places of forks.

The scheduler is the real one (arpo/rollout.py under arpo/sampling/driver.py). Engine, tools and clock are simulated
(shared/virtual_engine.py), as fast as shared/cost_model.py says of one H100. These systems play the trace:

ours            forks at the recorded places, as soon as the parent has sampled 20 tokens after the result
ours, top_h     forks when the recorded selector does: in two rounds, after all trajectories have ended. The real top_h
                reads the recorded entropies; an assertion checks that it grows the recorded trees
lock-step       the released loop: all generate until all have stopped, all calls run, then all continue. It makes the
                same forks, at the result. Its refills one by one, its retries and its endless calls are not counted
GRPO            the runs without branching on the same questions; by our scheduler, and in lock step

A step is the rollout, the update (forward and backward pass over the trained tokens, with recomputation) and the weight
sync. `trained`: tokens that the update computes; `unique`: different ones among them. `waits`: how often an engine
without work waits for tools (for waits of the host for a GPU see host_waits.py). `synced_mb`: the weights once, in
bfloat16. The decoded tokens are exactly those of the runs. There are 1 % fewer calls (those whose result did not fit),
and a quarter fewer prefilled tokens than vLLM counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.engine import SamplingSpec
from arpo.growing import GroupState, Live
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import Codec, TagsCodec
from arpo.rollout import Rollout
from arpo.sampling.driver import Source, drive
from benchmarks.shared.cost_model import BF16, forward_flops
from benchmarks.shared.hardware import HARDWARE, Hardware
from benchmarks.shared.published import print_table
from benchmarks.shared.recorded_trace import (
    ENTROPY_TOKENS,
    MAX_TOKENS,
    Played,
    PlayedEngine,
    PlayedTools,
    read,
    record,
)
from benchmarks.shared.shapes import OTHER_MODELS, SHAPES, Shape
from benchmarks.shared.tiny_model import write_tokenizer
from benchmarks.shared.virtual_ranks import VirtualTime

GPU = HARDWARE["1xH100-80GB"]


class Setting(NamedTuple):
    """The model, the hardware and the tools on which the trace is played."""

    shape: Shape = OTHER_MODELS["SmolLM2-135M"]
    """The default is the model of the trace."""
    hw: Hardware = GPU
    at_once: bool = False
    """All prompts of a run are one step. Then top_h is not played, as each recorded step has its own random numbers."""
    call_scale: float = 1.0
    """Factor of the recorded seconds of calls."""


SETTINGS = {
    "135M, the model of the trace": Setting(),
    "135M, calls that answer at once": Setting(call_scale=0.0),
    "135M, 24 ms a decode step (fitted to SkyRL's)": Setting(hw=replace(GPU, step_overhead_ms=24)),
    "7B, all steps of a run at once": Setting(SHAPES["7b"], at_once=True),
}
MAX_CALLS = 8
PASSES = 4
"""Cost of the update in forward passes: forward (1), recomputation (1), backward (2)."""


# ---- the loops


class AsRecorded(Rollout):
    """Forks at the recorded places, as soon as the first tokens after the result are there."""

    played: Played

    def take_branch_decision(self, live: Live) -> None:
        name, path = live.owner
        for child in self.played.children(name, path, live.turn_index):
            self.fork(live.group, live.path, turn=live.turn_index, path=tuple(map(int, child.split("."))))

    def grow(self, group: GroupState) -> None:
        """Start no further trajectories: the record names all forks."""


def ours(played: Played, engine: PlayedEngine, tools: PlayedTools, *, selector: str) -> None:
    """Run our scheduler. `selector`: "" = fork as recorded, at once; else a selector of the package."""
    trees = list(played.trees.values())
    group_size = len(trees[0].paths)
    num_roots = sum(not path.parent for path in trees[0].paths.values())
    cfg = RolloutConfig(group_size=group_size, max_response_tokens=MAX_TOKENS, max_tool_calls=MAX_CALLS)
    branching = BranchingConfig(selector or "none", num_initial_rollouts=num_roots, entropy_tokens=ENTROPY_TOKENS)
    loop_class = Rollout if selector else AsRecorded
    loop = loop_class(engine, tools, played.codec, cfg=cfg, branching=branching)
    loop.played = played
    source = Source(loop, played.prompts, played.seed)
    drive(source)
    for index, tree in enumerate(trees):
        trajectories = {t.trajectory_id: t for t in source.groups[index].trajectories}
        assert trajectories.keys() == tree.paths.keys(), f"not the recorded tree: {sorted(trajectories)}"
        for name, path in tree.paths.items():
            assert len(trajectories[name].token_ids) == sum(turn.sampled + turn.result for turn in path.turns), name


def lock_step(played: Played, engine: PlayedEngine, tools: PlayedTools) -> None:
    """Generate, wait for all; call, wait for all; fork."""
    # (prompt, trajectory, turn) of each request of this round -> its tokens
    lengths = {
        (name, path, 0): tree.prompt
        for name, tree in played.trees.items()
        for path, branch in tree.paths.items()
        if not branch.parent
    }
    while lengths:
        for (name, path, turn), length in lengths.items():
            engine.submit(f"{name}|{path}|{turn}", [0] * length, SamplingSpec(MAX_TOKENS))
        while engine.num_running:
            engine.step()
        calling = {key: length for key, length in lengths.items() if played.turn("|".join(map(str, key))).result}
        for key in calling:
            tools.start("|".join(map(str, key)), "search", "")
        while tools.num_pending:
            tools.collect(block=True)
        lengths = {}
        for (name, path, turn), length in calling.items():
            last = played.turn(f"{name}|{path}|{turn}")
            for next_path in [path, *played.children(name, path, turn + 1)]:
                lengths[name, next_path, turn + 1] = length + last.sampled + last.result


# ---- the cost of a step


@dataclass
class Counters:
    """Sums over the steps that one system played: virtual seconds, and counts that do not depend on the hardware."""

    step_s: float = 0.0
    rollout_s: float = 0.0
    decoded: int = 0
    decode_steps: int = 0
    prefilled: float = 0.0
    trained: int = 0
    unique: int = 0
    synced_mb: float = 0.0
    waits: int = 0
    calls: int = 0

    def add(self, played: Played, on: Setting, loop: Callable, *, is_tree: bool) -> None:
        """Play a step. is_tree: the update computes each token of a tree once."""
        time = VirtualTime(1)
        shape = on.shape
        hw = on.hw
        tools = PlayedTools(time, played, on.call_scale)
        engine = PlayedEngine(
            time=time, rank=0, tools=tools, script=played, shape=shape, hardware=hw, max_num_seqs=1024, unit=1
        )
        tools.engine = engine
        loop(played, engine, tools)
        unique = sum(tree.unique for tree in played.trees.values())
        trained = unique if is_tree else sum(tree.row_tokens for tree in played.trees.values())
        update_s = PASSES * forward_flops(shape, trained, 0.0) / (hw.train_share * hw.bf16_tflops * 1e12)
        synced = BF16 * shape.parameters
        self.rollout_s += time.now[0]
        self.step_s += time.now[0] + update_s + 3 * synced / (hw.memory_gb_s * 1e9)
        self.decoded += engine.num_sampled
        self.decode_steps += engine.num_steps
        self.prefilled += engine.prefilled
        self.trained += trained
        self.unique += unique
        self.synced_mb += synced / 1e6
        self.waits += len(tools.waited_at)
        self.calls += tools.num_calls


SYSTEMS = {
    "ours": ("top_h", partial(ours, selector=""), True),
    "ours, top_h": ("top_h", partial(ours, selector="top_h"), True),
    "lock-step": ("top_h", lock_step, False),
    "GRPO, ours": ("grpo", partial(ours, selector=""), True),
    "GRPO, lock-step": ("grpo", lock_step, False),
}
"""Name -> runs of the trace, loop, whether its update computes trees."""


def play(steps: dict[str, list[Played]], on: Setting) -> dict[str, Counters]:
    """Let each system play all steps. Print and return its means per step."""
    names = [field.name for field in fields(Counters)]
    print(f"| | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    means = {}
    for name, (runs, loop, is_tree) in SYSTEMS.items():
        if name == "ours, top_h" and on.at_once:
            continue
        total = Counters()
        for played in steps[runs]:
            total.add(played, on, loop, is_tree=is_tree)
        means[name] = Counters(**{key: value / len(steps[runs]) for key, value in vars(total).items()})
        cells = [f"{v:.2f}" if key.endswith("_s") else f"{v:,.0f}" for key, v in vars(means[name]).items()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return means


def steps_of(codec: Codec, *, is_quick: bool, at_once: bool) -> dict[str, list[Played]]:
    """Return the steps to play, by kind of run. at_once: all prompts of a run are one step."""
    steps = defaultdict(list)
    for run, trees_of_steps in read().items():
        kind, _, seed = run.rpartition("_seed")
        if is_quick and seed != "0":
            continue
        numbered = list(enumerate(trees_of_steps, 1))
        if at_once:
            trees = [tree._replace(name=f"{step}-{tree.name}") for step, trees in numbered for tree in trees]
            steps[kind].append(Played(trees, "", codec))
        else:
            steps[kind] += [Played(trees, f"{seed}|{step}", codec) for step, trees in numbered]
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of each kind instead of three: ten seconds")
    parser.add_argument("--record", nargs="+", metavar="RUN", help="first make the trace from these folders of runs")
    args = parser.parse_args()
    if args.record:
        record(args.record)
    with tempfile.TemporaryDirectory() as folder:
        codec = TagsCodec(write_tokenizer(folder))
    num_within, num_predicted, num_published = print_table()
    means = {}
    for name, on in SETTINGS.items():
        steps = steps_of(codec, is_quick=args.quick, at_once=on.at_once)
        print(f"\n{name}: per step of {len(steps['top_h'][0].trees)} prompts x 8, on the virtual clock")
        means[name] = play(steps, on)
    ratios = [systems["lock-step"].step_s / systems["ours"].step_s for systems in means.values()]
    ratio, ratio_instant, ratio_slow, ratio_7b = ratios
    systems = next(iter(means.values()))
    ours_means = vars(systems["ours"])
    lock_step_means = vars(systems["lock-step"])
    grpo_means = vars(systems["GRPO, ours"])
    result = {
        "name": "play_trace",
        "ratio": ratio,
        "ours": ours_means["step_s"],
        "baseline": lock_step_means["step_s"],
        "unit": "virtual s",
        "ratio_instant_calls": ratio_instant,
        "ratio_slow_engine": ratio_slow,
        "ratio_7b": ratio_7b,
        "grpo_ratio": grpo_means["step_s"] / ours_means["step_s"],
        "top_h_ratio": systems["ours, top_h"].step_s / ours_means["step_s"],
    }
    for key in ("decoded", "decode_steps", "prefilled", "trained", "synced_mb", "calls"):
        result[f"{key}_ratio"] = lock_step_means[key] / ours_means[key]
        result[f"grpo_{key}_ratio"] = grpo_means[key] / ours_means[key]
    result |= {
        "waits": ours_means["waits"],
        "baseline_waits": lock_step_means["waits"],
        "grpo_waits": grpo_means["waits"],
        "published_reproduced": num_within,
        "published_predicted": num_predicted,
        "published": num_published,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
