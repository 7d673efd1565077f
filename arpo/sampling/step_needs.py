"""How many trajectories a step needs: what the noise of its gradient and the likeness of its branches say. Pure.

Both classes pool over a window of at least ten steps and 80 groups, and report at its end:

- `GradientNoise` compares the gradients of prompts. What they have in common is signal, the rest is noise (the gradient
  noise scale, arXiv 1812.06162). The same with half of each group's trajectories says what a smaller group would lose.
- `BranchWorth` compares the outcomes of branches and roots. A branch that ends as its parent does has shown nothing.
  The formula for the best number of branches per root is that of cluster sampling (Cochran, Sampling Techniques).

A window gives advice only where its whole 95 % interval says the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from arpo.advantages import z_scores
from arpo.log import Console
from arpo.model.sketch import SKETCH_RANK
from arpo.options import AdvantageConfig
from arpo.selection import is_dead
from arpo.trajectory import Group, Trajectory

NUM_STEPS, NUM_GROUPS = 10, 80
"""Least steps and groups of a window."""
UNIT_PROMPTS = 8
"""Prompts whose gradients are compared with each other, in order: those of small updates together with the next."""
NUM_NUMBERS = SKETCH_RANK**2
LEAST_UNITS = 8
"""Least units of a window that say anything."""
NUM_SPLITS = 4
"""Random halves of each group."""
NUM_RESAMPLES = 200
"""Bootstrap samples of a window's groups."""
ENOUGH, TOO_FEW = 1.25, 1.3
"""Half the group is advised where it needs less than ENOUGH times the steps, and advised against above TOO_FEW."""
MIXED = 0.5
"""Share of groups with different rewards, below which larger groups are advised."""


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def named(name: str, interval: Interval) -> dict[str, float]:
    """Return the metrics NAME, NAME_low and NAME_high."""
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


# ---- the noise of a step's gradient


def likeness(gradients: np.ndarray) -> float | None:
    """Return the mean product of two prompts' gradients over the mean square of one. (P, R) -> -1/(P-1) .. 1

    It estimates |E g|^2 / E |g|^2 without bias in both parts. None where all gradients are 0.
    Gradients [1, 0], [1, 0] -> 1; [1, 0], [0, 1] -> 0.
    """
    num_prompts = len(gradients)
    squares = float((gradients**2).sum())
    if not squares:
        return None
    products = float((gradients.sum(0) ** 2).sum()) - squares
    return products / (num_prompts - 1) / squares


def signal_share(like: float, num_prompts: int) -> float:
    """Return the share of signal in the square of an update's gradient, from the likeness of two prompts' gradients.

    (0.5, 2 prompts) -> 0.667; (0, 8) -> 0; (1, 8) -> 1
    """
    like = min(max(like, 1e-9), 1.0)
    return num_prompts * like / (1 + (num_prompts - 1) * like)


def half_advantages(trajectories: Sequence[Trajectory], rng: random.Random, cfg: AdvantageConfig) -> np.ndarray | None:
    """Return (2, N): each trajectory's advantage in the random half of the group that it is in, 0 in the other half.

    None where a half would have fewer than two.
    """
    size = len(trajectories) // 2
    if size < 2:
        return None
    order = rng.sample(range(len(trajectories)), len(trajectories))
    advantages = np.zeros((2, len(trajectories)))
    for half in (0, 1):
        chosen = order[half * size : (half + 1) * size]
        advantages[half, chosen] = z_scores(np.array([trajectories[i].reward for i in chosen]), cfg, ddof=1)
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

    def __init__(self, advantage: AdvantageConfig, num_prompts: int, log: Console):
        """num_prompts: of an update. The advice goes to the log."""
        self.advantage = advantage
        self.num_prompts = num_prompts
        self.log = log
        self.can_halve = advantage.kind == "grpo" and advantage.tree == "soft" and advantage.normalize != "batch"
        self.rng = random.Random(0)
        self.full: list[np.ndarray] = []
        """Of each prompt since the last unit: its gradient (R,)."""
        self.halves: list[np.ndarray] = []
        """The same with half of its trajectories (2 * NUM_SPLITS, R)."""
        self.units: list[tuple[float, float | None]] = []
        """Likeness of the prompts of each unit of the window, with the groups as they are and with half of each."""
        self.num_steps = self.num_groups = self.num_mixed = 0

    def of_step(self, step: int, groups: Sequence[Group], minibatches: Sequence[SketchedMinibatch]) -> dict[str, float]:
        """Add the updates of a step with these groups. Return the metrics of the window that it ends, and log what
        follows from them. A group that no update was made of has a gradient of 0."""
        members: dict[int, list[tuple[Trajectory, np.ndarray]]] = {}
        for minibatch in minibatches:
            for row, (index, t) in enumerate(minibatch.trajectories):
                if row in minibatch.rows:
                    members.setdefault(id(minibatch.groups[index]), []).append((t, minibatch.rows[row]))
        for group in groups:
            self._add(group, members.get(id(group), []))
        self.num_steps += 1
        if self.num_steps < NUM_STEPS or self.num_groups < NUM_GROUPS:
            return {}
        values, advice = self._close_window()
        if advice:
            self.log.line(f"step {step}: {advice} (docs/branching.md)")
        return values

    def _add(self, group: Group, members: Sequence[tuple[Trajectory, np.ndarray]]) -> None:
        full = np.zeros(NUM_NUMBERS)
        halves = np.zeros((2 * NUM_SPLITS, NUM_NUMBERS))
        if members:
            sketches = np.stack([sketch for _, sketch in members])  # (N, 2, R)
            full = sketches[:, 0].sum(0)
            splits = [self._halves([t for t, _ in members]) for _ in range(NUM_SPLITS)]
            if splits[0] is not None:
                halves = np.concatenate(splits) @ sketches[:, 1]
        self.full.append(full)
        self.halves.append(halves)
        self.num_groups += 1
        self.num_mixed += not is_dead(group)
        if len(self.full) >= UNIT_PROMPTS:
            self._close_unit()

    def _halves(self, trajectories: list[Trajectory]) -> np.ndarray | None:
        return half_advantages(trajectories, self.rng, self.advantage) if self.can_halve else None

    def _close_unit(self) -> None:
        like = likeness(np.stack(self.full))
        if like is not None:
            by_half = (likeness(half) for half in np.stack(self.halves, 1))
            known = [value for value in by_half if value is not None]
            self.units.append((like, float(np.mean(known)) if known else None))
        self.full, self.halves = [], []

    def _close_window(self) -> tuple[dict[str, float], str]:
        units = self.units
        mixed = self.num_mixed / self.num_groups
        self.units = []
        self.num_steps = self.num_groups = self.num_mixed = 0
        if mixed < MIXED:
            advice = f"only {mixed:.0%} of the groups have different rewards: more roots, or larger groups, teach more"
        else:
            advice = ""
        if len(units) < LEAST_UNITS:
            return {}, advice
        if np.mean([like for like, _ in units]) <= 0:  # an estimate around 0 may be negative: no signal was seen
            return {"gradient/signal_share": 0.0}, advice
        share = jackknife([like for like, _ in units], lambda like: signal_share(like, self.num_prompts))
        values = {
            "gradient/signal_share": share.value,
            "gradient/noise_scale": self.num_prompts * (1 / share.value - 1),
        }
        pairs = [pair for pair in units if pair[1] is not None]
        if len(pairs) < LEAST_UNITS or np.mean([half for _, half in pairs]) <= 0:
            return values, advice
        steps = jackknife(pairs, self._steps_with_half)
        return values | named("gradient/half_group_steps", steps), advice or noise_advice(share, steps)

    def _steps_with_half(self, means: np.ndarray) -> float:
        """Return how many times the steps half the group would need, from the mean likeness with all and with half.

        Adam's steps have the same length whatever the noise, so the part of a step that goes along the signal is the
        square root of the share.
        """
        full, half = (signal_share(like, self.num_prompts) for like in means)
        return math.sqrt(full / half)


def jackknife(samples: Sequence[float] | Sequence[tuple[float, ...]], function) -> Interval:
    """Return function(mean of the samples), a positive number, with its 95 % interval on a logarithmic scale.

    The interval comes from leaving out one sample at a time.
    """
    values = np.asarray(samples, dtype=float)
    count = len(values)
    centre = function(values.mean(0))
    without = np.log([function(np.delete(values, i, axis=0).mean(0)) for i in range(count)])
    degrees = count - 1
    t = 1.96 + 2.372 / degrees + 2.822 / degrees**2  # Student's quantile, to 1 % from seven degrees of freedom on
    half = t * math.sqrt(degrees * without.var())
    return Interval(centre, centre * math.exp(-half), centre * math.exp(half))


def noise_advice(share: Interval, steps: Interval) -> str:
    """Return a line that says what follows, or "" where the interval allows both."""
    said = f"{share.value:.0%} of a step's gradient is signal"
    calls = Interval(*(value / 2 for value in steps))
    if steps.high < ENOUGH:
        return (
            f"{said}: half the group would teach as much, with {calls} of the calls; then try twice the learning rate"
        )
    if steps.low > TOO_FEW:
        return f"{said}: half the group would need {steps} times the steps, so it saves nothing"
    return ""


# ---- the worth of a branch


class GroupPairs(NamedTuple):
    """The pairs and calls of a group. Their sums over groups give the worth of a branch."""

    num_within: int
    """Pairs of a branch and its parent."""
    differ_within: int
    """Those of them with different outcomes."""
    num_between: int
    """Pairs of trajectories that have no root in common."""
    differ_between: int
    num_roots: int
    root_calls: float
    """Tool calls of all roots."""
    num_branches: int
    branch_calls: float
    """Tool calls that branches made themselves."""


def outcome(t: Trajectory) -> float | bool:
    """Return whether it is right; the reward, where that does not say."""
    return t.reward if t.is_solved is None else t.is_solved


def pairs_of(group: Group) -> GroupPairs:
    """Count a group's pairs."""
    judged = [t for t in group.trajectories if t.is_judged]
    by_id = {t.trajectory_id: t for t in judged}
    within = [(t, by_id[t.parent_id]) for t in judged if t.parent_id in by_id]
    root = {t.trajectory_id: t.trajectory_id.partition(".")[0] for t in judged}
    between = [(a, b) for a, b in combinations(judged, 2) if root[a.trajectory_id] != root[b.trajectory_id]]
    roots = [t for t in judged if t.parent_id is None]
    branches = [t for t in judged if t.parent_id is not None]
    return GroupPairs(
        len(within),
        sum(outcome(a) != outcome(b) for a, b in within),
        len(between),
        sum(outcome(a) != outcome(b) for a, b in between),
        len(roots),
        sum(len(t.own_tool_calls) for t in roots),
        len(branches),
        sum(len(t.own_tool_calls) for t in branches),
    )


def worth(totals: np.ndarray) -> tuple[float, float, float] | None:
    """Return rho, a branch's calls relative to a root's, and K*, from the sums (8,) of groups' `GroupPairs`.

    rho = 1 - P(branch and parent differ) / P(two roots differ) is how alike a branch and its parent are.
    K* = sqrt(c_prefix / c_leaf * (1 - rho) / rho) is the best number of trajectories per root: c_leaf are the calls of
    a branch, c_prefix those that it shares. None where nothing differs, or no call was made.
    """
    within, differ_within, between, differ_between, roots, root_calls, branches, branch_calls = map(float, totals)
    if not (within and differ_between and root_calls and branch_calls):
        return None
    rho = 1 - (differ_within / within) / (differ_between / between)
    rho = min(max(rho, 0.001), 0.999)
    cost = (branch_calls / branches) / (root_calls / roots)
    return rho, cost, math.sqrt(max(1 / cost - 1, 0.0) * (1 - rho) / rho)


class BranchWorth:
    """Watches how differently branches end."""

    def __init__(self, group_size: int):
        self.group_size = group_size
        self.warning = ""
        """What follows from the window that the step added last has ended; "" where nothing does."""
        self.num_steps = 0
        self.pairs: list[GroupPairs] = []

    def add(self, groups: Sequence[Group]) -> dict[str, float]:
        """Add a step's scored groups. Return the metrics of the window that it ends."""
        self.warning = ""
        self.num_steps += 1
        self.pairs += [pairs_of(group) for group in groups if len(group.trajectories) > 1]
        if self.num_steps < NUM_STEPS or len(self.pairs) < NUM_GROUPS:
            return {}
        table = np.array(self.pairs, dtype=float)  # (groups, 8)
        self.num_steps = 0
        self.pairs = []
        found = worth(table.sum(0))
        if not found:
            return {}
        rho, cost, leaves_per_root = found
        rng = np.random.default_rng(0)
        drawn = (worth(table[rng.integers(len(table), size=len(table))].sum(0)) for _ in range(NUM_RESAMPLES))
        samples = np.array([sample for sample in drawn if sample])
        rhos = Interval(rho, *np.quantile(samples[:, 0], (0.025, 0.975)))
        most, least = np.quantile(samples[:, 2], (0.975, 0.025))
        roots = Interval(*map(self._roots, (leaves_per_root, most, least)))
        self.warning = self._advice(rhos, roots, cost, now=table[:, 4].mean())
        return {"branching/branch_cost": cost} | named("branching/rho", rhos) | named("branching/roots_advised", roots)

    def _roots(self, leaves_per_root: float) -> float:
        """Return the number of roots for so many trajectories per root."""
        return min(max(self.group_size / max(leaves_per_root, 1e-9), 1.0), float(self.group_size))

    def _advice(self, rho: Interval, roots: Interval, cost: float, now: float) -> str:
        low, best, high = round(roots.low), round(roots.value), round(roots.high)
        if low <= round(now) <= high:
            return ""
        more = "more" if now < low else "fewer"
        return (
            f"a branch resembles its parent (rho {rho}) and costs {cost:.2f} of a root's calls: {more} roots than "
            f"{now:.0f} would teach more per call ({best} [{low}, {high}] of {self.group_size}; docs/branching.md)"
        )
