"""The worth of a branch: how differently branches end, and the best number of roots. Pure.

`BranchWorth` compares the outcomes of branches and roots over a window of steps. A branch with the outcome of its
parent has shown nothing new. The formula for the best number of branches per root is that of cluster sampling (Cochran,
Sampling Techniques). `BranchWorth` advises only if the present number of roots lies outside the 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from arpo.sampling.estimates import MIN_WINDOW_GROUPS, MIN_WINDOW_STEPS, Interval
from arpo.trajectory import Group, Trajectory

NUM_RESAMPLES = 200
"""Bootstrap samples of a window's groups."""


class GroupPairs(NamedTuple):
    """The pairs and calls of a group. Their sums over groups give the worth of a branch."""

    num_within: int
    """Pairs of a branch and its parent."""
    differ_within: int
    """Pairs of a branch and its parent with different outcomes."""
    num_between: int
    """Pairs of trajectories from different roots."""
    differ_between: int
    """Pairs of trajectories from different roots with different outcomes."""
    num_roots: int
    root_calls: float
    """Tool calls of all roots."""
    num_branches: int
    branch_calls: float
    """Tool calls of all branches after their forks."""


class Worth(NamedTuple):
    """The worth of a branch, from the pairs of many groups."""

    rho: float
    """1 - P(branch and parent differ) / P(two roots differ): how alike a branch and its parent are, 0.001 .. 0.999."""
    branch_cost: float
    """Tool calls of a branch over those of a root."""
    best_per_root: float
    """K*, the best number of trajectories per root, the root included.

    K* = sqrt(c_prefix / c_leaf * (1 - rho) / rho), where a branch makes c_leaf calls and shares c_prefix with its root.
    """


def outcome(t: Trajectory) -> float | bool:
    """Return True for a right answer and False for a wrong one; the reward itself if it does not say which is right."""
    return t.reward if t.is_solved is None else t.is_solved


def pairs_of(group: Group) -> GroupPairs:
    """Count the pairs and calls of a group."""
    judged = [t for t in group.trajectories if t.is_judged]
    by_id = {t.trajectory_id: t for t in judged}
    root_id = {t.trajectory_id: t.trajectory_id.partition(".")[0] for t in judged}
    within = [(t, by_id[t.parent_id]) for t in judged if t.parent_id in by_id]
    between = [(a, b) for a, b in combinations(judged, 2) if root_id[a.trajectory_id] != root_id[b.trajectory_id]]
    roots = [t for t in judged if t.parent_id is None]
    branches = [t for t in judged if t.parent_id is not None]
    return GroupPairs(
        num_within=len(within),
        differ_within=sum(outcome(a) != outcome(b) for a, b in within),
        num_between=len(between),
        differ_between=sum(outcome(a) != outcome(b) for a, b in between),
        num_roots=len(roots),
        root_calls=sum(len(t.own_tool_calls) for t in roots),
        num_branches=len(branches),
        branch_calls=sum(len(t.own_tool_calls) for t in branches),
    )


def worth(totals: np.ndarray) -> Worth | None:
    """Return the worth of a branch from the sums (8,) of the groups' `GroupPairs`.

    None if no two roots differ, there are no branches, or no call was made.
    """
    total = GroupPairs(*map(float, totals))
    if not (total.num_within and total.differ_between and total.root_calls and total.branch_calls):
        return None
    rho = 1 - (total.differ_within / total.num_within) / (total.differ_between / total.num_between)
    rho = min(max(rho, 0.001), 0.999)
    cost = (total.branch_calls / total.num_branches) / (total.root_calls / total.num_roots)
    return Worth(rho, cost, math.sqrt(max(1 / cost - 1, 0.0) * (1 - rho) / rho))


class BranchWorth:
    """Watches how differently branches end."""

    def __init__(self, group_size: int):
        self.group_size = group_size
        self.warning = ""
        """Advice for the user, if the newest step ended a window that allows any; else ""."""
        self.num_steps = 0
        self.pairs: list[GroupPairs] = []

    def state(self) -> dict:
        """Return the open window for `resume`, as JSON can hold it."""
        return {"num_steps": self.num_steps, "pairs": self.pairs}

    def resume(self, state: dict) -> None:
        """Continue the window of a `state`. An empty dict begins a new one."""
        if not state:
            return
        self.num_steps = state["num_steps"]
        self.pairs = [GroupPairs(*numbers) for numbers in state["pairs"]]

    def add(self, groups: Sequence[Group]) -> dict[str, float]:
        """Add a step's scored groups. Return the metrics of the window that it ends."""
        self.warning = ""
        self.num_steps += 1
        self.pairs += [pairs_of(group) for group in groups if len(group.trajectories) > 1]
        if self.num_steps < MIN_WINDOW_STEPS or len(self.pairs) < MIN_WINDOW_GROUPS:
            return {}
        table = np.array(self.pairs, dtype=float)  # (groups, 8)
        num_roots_now = float(np.mean([pairs.num_roots for pairs in self.pairs]))
        self.num_steps = 0
        self.pairs = []
        estimate = worth(table.sum(0))
        if not estimate:
            return {}

        rng = np.random.default_rng(0)
        resampled = [worth(table[rng.integers(len(table), size=len(table))].sum(0)) for _ in range(NUM_RESAMPLES)]
        samples = np.array([sample for sample in resampled if sample])  # (<= NUM_RESAMPLES, 3), columns as in Worth
        rho = Interval(estimate.rho, *np.quantile(samples[:, 0], (0.025, 0.975)))
        # the more trajectories per root, the fewer roots: the ends of the interval change places
        most_per_root, least_per_root = np.quantile(samples[:, 2], (0.975, 0.025))
        roots = Interval(*map(self._num_roots, (estimate.best_per_root, most_per_root, least_per_root)))
        self.warning = self._advice(rho, roots, estimate.branch_cost, num_roots_now)
        return {
            "branching/branch_cost": estimate.branch_cost,
            **rho.metrics("branching/rho"),
            **roots.metrics("branching/roots_advised"),
        }

    def _num_roots(self, trajectories_per_root: float) -> float:
        return min(max(self.group_size / max(trajectories_per_root, 1e-9), 1.0), float(self.group_size))

    def _advice(self, rho: Interval, roots: Interval, cost: float, now: float) -> str:
        """Return the advice, or "" if the run's number of roots `now` is within the interval."""
        low, best, high = round(roots.low), round(roots.value), round(roots.high)
        if low <= round(now) <= high:
            return ""
        more = "more" if now < low else "fewer"
        return (
            f"a branch resembles its parent (rho {rho}) and costs {cost:.2f} of a root's calls: {more} roots than "
            f"{now:.0f} would teach more per call ({best} [{low}, {high}] of {self.group_size}; docs/branching.md)"
        )
