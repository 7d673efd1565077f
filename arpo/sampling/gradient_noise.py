"""The noise of a step's gradient, and the cost of a smaller group.

The gradients of two prompts have the signal in common; the rest is noise (the gradient noise scale, arXiv 1812.06162).
`GradientNoise` compares the prompts of a window of steps with each other, and does the same with half of each group's
trajectories. This shows what a smaller group would lose. `GradientNoise` advises on half the group only if the whole
95 % interval lies on one side of a bound.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from arpo.advantages import z_scores
from arpo.log import Console
from arpo.model.sketch import SKETCH_RANK
from arpo.options import AdvantageConfig
from arpo.sampling.estimates import (
    MIN_WINDOW_GROUPS,
    MIN_WINDOW_STEPS,
    Interval,
    array_to_text,
    jackknife,
    text_to_array,
)
from arpo.selection import is_dead
from arpo.trajectory import Group, Trajectory

SKETCH_SIZE = SKETCH_RANK**2
"""R: numbers in the sketch of a gradient."""
UNIT_PROMPTS = 8
"""Prompts in a unit. A unit holds successive prompts, whose gradients are compared with each other. An update of fewer
prompts shares its unit with the next update."""
MIN_UNITS = 8
"""A window of fewer units reports nothing."""
NUM_SPLITS = 4
"""Each group is split into two random halves this many times."""
ENOUGH = 1.25
"""Half the group is advised if it needs less than this many times the steps."""
TOO_FEW = 1.3
"""Half the group is advised against if it needs more than this many times the steps."""
MIN_MIXED_SHARE = 0.5
"""If a smaller share of the groups has different rewards, the log says so."""


def prompt_similarity(gradients: np.ndarray) -> float | None:
    """Return the mean product of two prompts' gradients over the mean square of one. (P, R) -> -1/(P-1) .. 1

    It estimates |E g|^2 / E |g|^2; numerator and denominator have no bias. None if all gradients are 0.
    Gradients [1, 0], [1, 0] -> 1; [1, 0], [0, 1] -> 0.
    """
    num_prompts = len(gradients)
    squares = float((gradients**2).sum())
    if not squares:
        return None
    products = float((gradients.sum(0) ** 2).sum()) - squares
    return products / (num_prompts - 1) / squares


def signal_share(similarity: float, num_prompts: int) -> float:
    """Return the share of signal in the squared gradient of an update, from the similarity of two prompts' gradients.

    (0.5, 2 prompts) -> 0.667; (0, 8) -> 0; (1, 8) -> 1
    """
    similarity = min(max(similarity, 1e-9), 1.0)
    return num_prompts * similarity / (1 + (num_prompts - 1) * similarity)


def half_advantages(trajectories: Sequence[Trajectory], rng: random.Random, cfg: AdvantageConfig) -> np.ndarray | None:
    """Split a group into two random halves. Return each trajectory's advantage in its half, 0 in the other half: (2, N)

    If N is odd, one trajectory is in neither half, and has 0 in both. None if a half would have fewer than two
    trajectories.
    """
    size = len(trajectories) // 2
    if size < 2:
        return None
    order = rng.sample(range(len(trajectories)), len(trajectories))
    advantages = np.zeros((2, len(trajectories)))
    for half in (0, 1):
        chosen = order[half * size : (half + 1) * size]
        rewards = np.array([trajectories[i].reward - trajectories[i].kl_penalty for i in chosen])
        advantages[half, chosen] = z_scores(rewards, cfg, ddof=1)
    return advantages


class SketchedMinibatch(NamedTuple):
    """The groups of an update, and the sketches of their gradients."""

    groups: list[Group]
    trajectories: list[tuple[int, Trajectory]]
    """(index in `groups`, trajectory) of each row."""
    rows: dict[int, np.ndarray]
    """Row -> its sketch (2, R): with the tokens' advantages, and without (model/sketch.py)."""


class GradientNoise:
    """Watches the gradients of a run's updates."""

    def __init__(self, advantage: AdvantageConfig, num_prompts: int, log: Console, *, sizes_vary: bool = False):
        """num_prompts: number of prompts of an update. The advice goes to the log.

        sizes_vary: the rewards decide how large a group is (branching.until_mixed). Then half of a group says nothing.
        """
        self.advantage = advantage
        self.num_prompts = num_prompts
        self.log = log
        is_from_rewards = advantage.kind == "grpo" and advantage.tree == "soft" and advantage.normalize != "batch"
        self.can_halve = is_from_rewards and not sizes_vary
        """False if the advantages of half a group cannot be computed from its rewards alone, or if sizes vary."""
        self.full: list[np.ndarray] = []
        """Gradient (R,) of each prompt since the last unit."""
        self.halves: list[np.ndarray] = []
        """Gradients (2 * NUM_SPLITS, R) of each prompt since the last unit, each with half of the trajectories."""
        self.units: list[tuple[float, float | None]] = []
        """Similarity of the prompts of each unit in the window: with full groups, and with half of each."""
        self.num_steps = 0
        self.num_groups = 0
        self.num_mixed = 0

    def state(self) -> dict:
        """Return the open window for `resume`, as JSON can hold it."""
        return {
            "num_steps": self.num_steps,
            "num_groups": self.num_groups,
            "num_mixed": self.num_mixed,
            "units": self.units,
            "full": array_to_text(np.array(self.full)),
            "halves": array_to_text(np.array(self.halves)),
        }

    def resume(self, state: dict) -> None:
        """Continue the window of a `state`. An empty dict begins a new one."""
        if not state:
            return
        self.num_steps = state["num_steps"]
        self.num_groups = state["num_groups"]
        self.num_mixed = state["num_mixed"]
        self.units = [(similarity, half) for similarity, half in state["units"]]
        self.full = list(text_to_array(state["full"], (-1, SKETCH_SIZE)))
        self.halves = list(text_to_array(state["halves"], (-1, 2 * NUM_SPLITS, SKETCH_SIZE)))

    def of_step(self, step: int, groups: Sequence[Group], minibatches: Sequence[SketchedMinibatch]) -> dict[str, float]:
        """Add the updates of a step. If this ends a window, return its metrics, and log the advice.

        `groups` are all groups of the step. The gradient of a group without an update is 0.
        """
        # by id(group), since a Group cannot be a key; a row without a sketch had no update (critic.warmup_steps)
        members: dict[int, list[tuple[Trajectory, np.ndarray]]] = {}
        for minibatch in minibatches:
            for row, (index, t) in enumerate(minibatch.trajectories):
                if row in minibatch.rows:
                    members.setdefault(id(minibatch.groups[index]), []).append((t, minibatch.rows[row]))
        # the splits depend on the step alone, so that a resumed run draws the same
        rng = random.Random(step)
        for group in groups:
            self._add(group, members.get(id(group), []), rng)
        self.num_steps += 1
        if self.num_steps < MIN_WINDOW_STEPS or self.num_groups < MIN_WINDOW_GROUPS:
            return {}
        values, advice = self._close_window()
        if advice:
            self.log.line(f"step {step}: {advice} (docs/branching.md)")
        return values

    def _add(self, group: Group, members: Sequence[tuple[Trajectory, np.ndarray]], rng: random.Random) -> None:
        full = np.zeros(SKETCH_SIZE)
        halves = np.zeros((2 * NUM_SPLITS, SKETCH_SIZE))
        if members:
            # float64, as in a checkpoint: else a resumed run would differ in the last digit
            sketches = np.stack([sketch for _, sketch in members]).astype(np.float64)  # (N, 2, R)
            full = sketches[:, 0].sum(0)
            splits = [self._halves([t for t, _ in members], rng) for _ in range(NUM_SPLITS)]
            if splits[0] is not None:
                halves = np.concatenate(splits) @ sketches[:, 1]  # (2 * NUM_SPLITS, N) @ (N, R)
        self.full.append(full)
        self.halves.append(halves)
        self.num_groups += 1
        self.num_mixed += not is_dead(group)
        if len(self.full) >= UNIT_PROMPTS:
            self._close_unit()

    def _halves(self, trajectories: list[Trajectory], rng: random.Random) -> np.ndarray | None:
        return half_advantages(trajectories, rng, self.advantage) if self.can_halve else None

    def _close_unit(self) -> None:
        similarity = prompt_similarity(np.stack(self.full))
        if similarity is not None:
            of_each_half = [prompt_similarity(gradients) for gradients in np.stack(self.halves, 1)]
            defined = [value for value in of_each_half if value is not None]
            self.units.append((similarity, float(np.mean(defined)) if defined else None))
        self.full = []
        self.halves = []

    def _close_window(self) -> tuple[dict[str, float], str]:
        """Return the metrics of the window and the advice, and begin a new window."""
        units = self.units
        mixed_share = self.num_mixed / self.num_groups
        self.units = []
        self.num_steps = 0
        self.num_groups = 0
        self.num_mixed = 0
        advice = ""
        if mixed_share < MIN_MIXED_SHARE:
            advice = f'only {mixed_share:.0%} of the groups have different rewards; "What to choose" says what helps'
        if len(units) < MIN_UNITS:
            return {}, advice
        # an estimate around 0 may be negative: no signal was seen
        if np.mean([similarity for similarity, _ in units]) <= 0:
            return {"gradient/signal_share": 0.0}, advice

        share = jackknife(
            [similarity for similarity, _ in units], lambda similarity: signal_share(similarity, self.num_prompts)
        )
        values = {
            "gradient/signal_share": share.value,
            "gradient/noise_scale": self.num_prompts * (1 / share.value - 1),
        }
        pairs = [(similarity, half) for similarity, half in units if half is not None]
        if len(pairs) < MIN_UNITS or np.mean([half for _, half in pairs]) <= 0:
            return values, advice
        steps = jackknife(pairs, self._steps_with_half)
        return values | steps.metrics("gradient/half_group_steps"), advice or noise_advice(share, steps)

    def _steps_with_half(self, similarities: np.ndarray) -> float:
        """Return how many times the steps half the group would need, from the similarities (full groups, half groups).

        Adam's steps have the same length whatever the noise. The part of a step along the signal is therefore the
        square root of the signal's share.
        """
        full, half = (signal_share(similarity, self.num_prompts) for similarity in similarities)
        return math.sqrt(full / half)


def noise_advice(share: Interval, steps: Interval) -> str:
    """Return the advice for the log, or "" if the interval allows both sizes.

    steps: how many times the steps half the group would need.
    """
    intro = f"{share.value:.0%} of a step's gradient is signal"
    # half the trajectories in a step, and so half the calls
    calls = Interval(*(value / 2 for value in steps))
    if steps.high < ENOUGH:
        return f"{intro}: half the group would teach as much, with {calls} of the calls"
    if steps.low > TOO_FEW:
        return f"{intro}: half the group would need {steps} times the steps, so it saves nothing"
    return ""
