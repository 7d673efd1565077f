"""A recorded trace on the virtual clock: our scheduler, the released lock-step loop, and GRPO without branching.

    python benchmarks/play_trace.py [--quick] [--record RUN ...]

First, what the cost model gives of eight numbers that others have published (shared/published.py). Three are fits. Of
the other five it predicts three within 15 %, and not one of them under all assumptions about what is not published:
lengths of later turns (verl-tool), how unlike the lengths of a prompt are (verl), what a draft costs (SkyRL). So its
seconds say nothing of other people's machines, only what one schedule takes against another on the same engine.

Then the trace: what six real runs of a 135M model sampled on the long GSM8K task (shared/recorded_trace.py), tokens of
prompts, turns and results, seconds of calls, entropies, and where trajectories were forked.

The scheduler is the real one (arpo/rollout.py under arpo/sampling/driver.py). Pretended are engine, tools and clock
(shared/virtual_engine.py), as fast as shared/cost_model.py says of one H100. What is played:

ours            forks where the record has them, once the parent's first 20 tokens behind the result are there
ours, top_h     forks when the selector that was at work takes them: in two rounds, after all have ended. The real top_h
                on the recorded entropies; it is checked that it grows the recorded trees
lock-step       the released loop: all generate until all have stopped, all calls run, then all go on. It gets the same
                forks, at the result; of its refills one by one, its retries and its endless calls nothing is counted
GRPO            what the runs without branching sampled on the same questions; by our scheduler, and in lock step

A step is rollout, update (a forward and a backward pass, with recomputation, over what is trained) and weight sync.
`trained`: tokens that the update computes, of which `unique` are different. `waits`: how often an engine without work
waits for tools. Waits of the host for a GPU: host_waits.py. synced_mb: the weights once, in bfloat16. Decoded tokens
are exactly those that the runs counted; calls 1 % fewer (those whose result found no room), prefilled a quarter fewer
than vLLM counted.
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
from benchmarks.shared.cost_model import BF16, Shape, forward_flops
from benchmarks.shared.hardware import HARDWARE, Hardware
from benchmarks.shared.published import print_table
from benchmarks.shared.recorded_trace import (
    ENTROPY_TOKENS,
    MOST_TOKENS,
    Played,
    PlayedEngine,
    PlayedTools,
    read,
    record,
)
from benchmarks.shared.shapes import SHAPES
from benchmarks.shared.tiny_model import write_tokenizer
from benchmarks.shared.virtual_ranks import VirtualTime

GPU = HARDWARE["1xH100-80GB"]
OF_THE_TRACE = Shape(576, 1536, 30, 9, 3, 64, 49_152, tied=True)


class Setting(NamedTuple):
    """The model, the hardware and the tools on which the trace is played."""

    shape: Shape = OF_THE_TRACE
    hw: Hardware = GPU
    at_once: bool = False
    """All prompts of a run are one step; without top_h, as each recorded step has random numbers of its own."""
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
"""Of the update, in forward passes: forward, recomputed, backward."""


# ---- the loops


class AsRecorded(Rollout):
    """Forks where the record says so, when the first tokens behind the result are there."""

    played: Played

    def decide(self, live: Live) -> None:
        name, path = live.owner
        for child in self.played.children(name, path, live.turn_index):
            self.fork(live.group, live.path, live.turn_index, tuple(map(int, child.split("."))))

    def grow(self, group: GroupState) -> None:
        """Start nothing: the record names all forks."""


def ours(played: Played, engine: PlayedEngine, tools: PlayedTools, *, selector: str) -> None:
    """Run our scheduler. `selector`: "" = forks as recorded, at once; else that of the package."""
    trees = list(played.trees.values())
    size, roots = len(trees[0].paths), sum(not path.parent for path in trees[0].paths.values())
    cfg = RolloutConfig(size, max_response_tokens=MOST_TOKENS, max_tool_calls=MAX_CALLS)
    branching = BranchingConfig(selector or "none", num_initial_rollouts=roots, entropy_tokens=ENTROPY_TOKENS)
    loop = (Rollout if selector else AsRecorded)(engine, tools, played.codec, cfg, branching)
    loop.played = played
    source = Source(loop, played.prompts, played.seed)
    drive(source)
    for place, tree in enumerate(trees):
        found = {t.trajectory_id: t for t in source.groups[place].trajectories}
        assert found.keys() == tree.paths.keys(), f"another tree than the recorded one: {sorted(found)}"
        for name, path in tree.paths.items():
            assert len(found[name].token_ids) == sum(turn.sampled + turn.result for turn in path.turns), name


def lock_step(played: Played, engine: PlayedEngine, tools: PlayedTools) -> None:
    """Generate, wait for all; call, wait for all; fork."""
    lengths = {
        (name, path, 0): tree.prompt
        for name, tree in played.trees.items()
        for path, one in tree.paths.items()
        if not one.parent
    }
    while lengths:
        for (name, path, turn), length in lengths.items():
            engine.submit(f"{name}|{path}|{turn}", [0] * length, SamplingSpec(MOST_TOKENS))
        while engine.num_running:
            engine.step()
        going = {key: length for key, length in lengths.items() if played.turn("|".join(map(str, key))).result}
        for key in going:
            tools.start("|".join(map(str, key)), "search", "")
        while tools.num_pending:
            tools.collect(block=True)
        lengths = {}
        for (name, path, turn), length in going.items():
            read = played.turn(f"{name}|{path}|{turn}")
            for one in [path, *played.children(name, path, turn + 1)]:
                lengths[name, one, turn + 1] = length + read.sampled + read.result


# ---- what a step takes


@dataclass
class Counters:
    """Sums over the steps that one system played: virtual seconds, and numbers that no hardware changes."""

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
        time, shape, hw = VirtualTime(1), on.shape, on.hw
        tools = PlayedTools(time, played, on.call_scale)
        engine = tools.engine = PlayedEngine(time, 0, tools, played, shape, hw, max_num_seqs=1024, unit=1)
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
    """Let the systems play all steps; print and return what they took per step."""
    names = [field.name for field in fields(Counters)]
    print(f"| | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    found = {}
    for name, (runs, loop, is_tree) in SYSTEMS.items():
        if name == "ours, top_h" and on.at_once:
            continue
        total = Counters()
        for played in steps[runs]:
            total.add(played, on, loop, is_tree=is_tree)
        found[name] = Counters(**{key: value / len(steps[runs]) for key, value in vars(total).items()})
        numbers = [f"{v:.2f}" if key.endswith("_s") else f"{v:,.0f}" for key, v in vars(found[name]).items()]
        print(f"| {name} | {' | '.join(numbers)} |", flush=True)
    return found


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
    found = {}
    for name, on in SETTINGS.items():
        steps = steps_of(codec, is_quick=args.quick, at_once=on.at_once)
        print(f"\n{name}: per step of {len(steps['top_h'][0].trees)} prompts x 8, on the virtual clock")
        found[name] = play(steps, on)
    ratios = {name: of["lock-step"].step_s / of["ours"].step_s for name, of in found.items()}
    ratio, ratio_instant, ratio_slow, ratio_7b = ratios.values()
    mine, released, grpo, afterwards = (
        vars(next(iter(found.values()))[name]) for name in ("ours", "lock-step", "GRPO, ours", "ours, top_h")
    )
    result = {"name": "play_trace", "ratio": ratio, "ours": mine["step_s"], "baseline": released["step_s"]}
    result |= {
        "unit": "virtual s",
        "ratio_instant_calls": ratio_instant,
        "ratio_slow_engine": ratio_slow,
        "ratio_7b": ratio_7b,
    }
    result |= {"grpo_ratio": grpo["step_s"] / mine["step_s"], "top_h_ratio": afterwards["step_s"] / mine["step_s"]}
    for key in ("decoded", "decode_steps", "prefilled", "trained", "synced_mb", "calls"):
        result |= {f"{key}_ratio": released[key] / mine[key], f"grpo_{key}_ratio": grpo[key] / mine[key]}
    result |= {"waits": mine["waits"], "baseline_waits": released["waits"], "grpo_waits": grpo["waits"]}
    result |= {"published_reproduced": num_within, "published_predicted": num_predicted, "published": num_published}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
