"""Whether the cost model gives what others have published of their systems, from what they say of the workload.

No run of theirs was repeated. `fitted`: the overhead of an engine step is chosen so that a source's first number comes
out; then the source's other numbers are a test, and that one is not.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from benchmarks.shared.cost_model import BF16, decode_seconds
from benchmarks.shared.drawn_work import CALL_S, DEVIATION
from benchmarks.shared.hardware import HARDWARE, Hardware
from benchmarks.shared.shapes import SHAPES

H100 = HARDWARE["8xH100-80GB"]
TOLERANCE = 0.15


def lengths(count: int, median: float, most: int) -> list[float]:
    """Return so many log-normal lengths, ascending."""
    rng = random.Random(0)
    return sorted(min(median * math.exp(DEVIATION * rng.gauss()), most) for _ in range(count))


@functools.cache
def median_for(mean: float, most: int) -> float:
    """Return the median of lengths with this mean, when they are cut at `most`."""
    low, high = 1.0, float(most)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(4096, middle, most)) / 4096 < mean else (low, middle)
    return low


def drain(tokens: list[float], context: float, step_s: Callable[[float, float], float]) -> float:
    """Return the seconds of one engine that decodes these lengths side by side, behind `context` tokens each, until the
    longest has ended. step_s: of a step, by batch and by tokens in the cache."""
    seconds = before = 0.0
    for i, length in enumerate(tokens):
        batch = len(tokens) - i
        seconds += (length - before) * step_s(batch, batch * (context + (length + before) / 2))
        before = length
    return seconds


# ---- the sources


def verl_tool(turns: int, *, is_async: bool, hw: Hardware) -> float:
    """Rollout of 2,048 trajectories of a 1.5B model on 4 H100, with up to this many calls."""

    def step_s(batch: float, cached: float) -> float:
        return decode_seconds(SHAPES["1.5b"], hw, batch, cached)

    rng, (low, high) = random.Random(0), CALL_S
    parts = [lengths(512, 600 / (turns + 1), 3072 // (turns + 1)) for _ in range(turns + 1)]
    if is_async:  # which turns belong together is drawn; the longest trajectory waits for calls of mean length
        totals = sorted(map(sum, zip(*(rng.sample(part, 512) for part in parts), strict=True)))
        return drain(totals, 400, step_s) + turns * (high - low) / math.log(high / low)
    mean = sum(parts[0]) / 512
    return sum(drain(part, 400 + turn * mean, step_s) for turn, part in enumerate(parts)) + turns * high


def verl(*, carries: bool, hw: Hardware) -> float:
    """150 steps of 512 trajectories of a 35B mixture with 3B at work, on 32 GPUs: 8 engines of 4, tensor parallel."""
    tokens_per_step, gpus = 512 * 12_720, 4

    def step_s(batch: float, cached: float) -> float:
        read = 2e9 + 33e9 * (1 - (1 - 8 / 256) ** batch)  # parameters
        return (BF16 * read + 20_480 * cached) / (gpus * hw.memory_share * hw.memory_gb_s * 1e9) + (
            hw.step_overhead_ms + batch * hw.overhead_ms_per_sequence
        ) / 1e3

    train_s = 5 * tokens_per_step * 2 * 3e9 / (32 * hw.train_share * hw.bf16_tflops * 1e12)
    if carries:  # 64 more prompts are under way, so the engines stay full
        rollout_s = tokens_per_step / 8 / 128 * step_s(128, 128 * 6500)
    else:
        rollout_s = drain(lengths(64, median_for(12_720, 32_768), 32_768), 150, step_s)
    return 150 * (rollout_s + train_s)


def skyrl(*, drafts: bool, hw: Hardware) -> float:
    """A step with 256 samples of a 9B model on 8 H100; all but the rollout as published."""
    rate = hw.memory_share * hw.memory_gb_s * 1e9

    def step_s(batch: float, cached: float) -> float:
        plain = (18e9 + 32_768 * cached) / rate + (hw.step_overhead_ms + batch * hw.overhead_ms_per_sequence) / 1e3
        return (plain + 3 * 2.3e9 / rate) / 3.32 if drafts else plain

    return drain([8192.0] * 32, 150, step_s) + (246.8 - 152.4 if drafts else 400.7 - 310.1)


class Case(NamedTuple):
    """A published number, and the model's."""

    name: str
    published: float
    seconds: Callable[[Hardware], float]


SOURCES = {
    "verl-tool, rollout (assets/docs/asyncRL.md)": (
        "Not published: lengths (assumed: median 600, cut at the 3,072 of its script), calls made (all that are "
        "allowed), a call's seconds (0.05 to 2), how many the tool server takes at once (all).",
        [
            Case("1 turn, sync", 127, lambda hw: verl_tool(1, is_async=False, hw=hw)),
            Case("1 turn, async", 75, lambda hw: verl_tool(1, is_async=True, hw=hw)),
            Case("3 turns, sync", 194, lambda hw: verl_tool(3, is_async=False, hw=hw)),
            Case("3 turns, async", 94, lambda hw: verl_tool(3, is_async=True, hw=hw)),
        ],
    ),
    "verl, 150 steps (docs/advance/v1_async_trainer.md)": (
        "Published: 64 prompts, mean 12,720 tokens, cut at 32,768; its tokens/s make it 8 per prompt. Not published: "
        "the GPU (assumed: H100), spread of lengths (1.0 in ln), share of peak of the update (0.4), all else "
        "of a step (nothing), how full carrying keeps the engines (128 each).",
        [
            Case("sync", 22.79 * 3600, lambda hw: verl(carries=False, hw=hw)),
            Case("colocate_async", 14.72 * 3600, lambda hw: verl(carries=True, hw=hw)),
        ],
    ),
    "SkyRL, step (docs, spec_decode.mdx)": (
        "Published: 3.32 tokens per step at draft depth 3, and all but the rollout (90.6 and 94.4 s), taken as it is. "
        "Not published: lengths (assumed: all at the limit of 8,192, more than it can be), what a draft costs (the "
        "bytes of head and draft layer).",
        [
            Case("plain", 400.7, lambda hw: skyrl(drafts=False, hw=hw)),
            Case("MTP drafts", 246.8, lambda hw: skyrl(drafts=True, hw=hw)),
        ],
    ),
}


def fitted(case: Case) -> Hardware:
    """Return the H100 with the step overhead that makes the model give this number."""
    low, high = 0.0, 200.0
    for _ in range(30):
        middle = (low + high) / 2
        is_less = case.seconds(replace(H100, step_overhead_ms=middle)) < case.published
        low, high = (middle, high) if is_less else (low, middle)
    return replace(H100, step_overhead_ms=low)


def verdict(found: float, published: float) -> str:
    off = found / published - 1
    return f"{off:+.0%} {'within 15 %' if abs(off) <= TOLERANCE else 'MISS'}"


def print_table() -> tuple[int, int, int]:
    """Print what the model gives of each number; return how many it reproduces, how many there are, and how many of
    those that nothing is fitted to it reproduces with a fitted overhead."""
    num_within = num_all = num_after_fit = 0
    for source, (facts, cases) in SOURCES.items():
        hw = fitted(cases[0])
        print(f"\n{source}. {facts}")
        print(
            f"| | published s | model s | | {hw.step_overhead_ms:.0f} ms a step fitted | |\n|---|---|---|---|---|---|"
        )
        for case in cases:
            plain, after = case.seconds(H100), case.seconds(hw)
            num_all += 1
            num_within += abs(plain / case.published - 1) <= TOLERANCE
            is_test = case is not cases[0]
            num_after_fit += is_test and abs(after / case.published - 1) <= TOLERANCE
            how = verdict(after, case.published) if is_test else "fitted to it"
            numbers = f"{case.published:.0f} | {plain:.0f} | {verdict(plain, case.published)} | {after:.0f} | {how}"
            print(f"| {case.name} | {numbers} |")
        for slow, fast in zip(cases[::2], cases[1::2], strict=True):
            ratio, plain = slow.published / fast.published, slow.seconds(H100) / fast.seconds(H100)
            after = slow.seconds(hw) / fast.seconds(hw)
            numbers = f"{ratio:.2f} | {plain:.2f} | {verdict(plain, ratio)} | {after:.2f} | {verdict(after, ratio)}"
            print(f"| {slow.name} / {fast.name} | {numbers} |")
    return num_within, num_all, num_after_fit
