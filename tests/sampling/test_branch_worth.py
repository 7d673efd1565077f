"""The worth of a branch, on groups whose branches resemble their parents to a known degree."""

import json
import random

import pytest

from arpo.sampling.branch_worth import BranchWorth, pairs_of
from arpo.trajectory import Group, Prompt, StopReason, ToolCall, Trajectory, Turn


def group_of(num_roots: int, num_branches: int, rho: float, rng: random.Random, p: float = 0.5) -> Group:
    """Roots of eight calls, and branches of two of their own, which end as their root does with probability rho or
    else anyhow."""
    trajectories = []

    def add(name: str, parent: Trajectory | None, num_calls: int) -> Trajectory:
        right = rng.random() < p
        if parent and rng.random() < rho:
            right = parent.reward > 0
        turns = [Turn(0, tool_calls=[ToolCall("search", "q", "r", ok=True)]) for _ in range(num_calls)]
        parent_id = parent.trajectory_id if parent else None
        t = Trajectory("p", name, turns=turns, parent_id=parent_id, stop_reason=StopReason.EOS, reward=float(right))
        trajectories.append(t)
        return t

    roots = [add(str(i), None, 8) for i in range(num_roots)]
    for i in range(num_branches):
        root = roots[i % num_roots]
        add(f"{root.trajectory_id}.{i}", root, 2)
    return Group(Prompt("p", [], []), trajectories)


def watched(num_roots: int, num_branches: int, rho: float, num_steps: int = 10) -> tuple[dict[str, float], str]:
    rng, watch = random.Random(0), BranchWorth(num_roots + num_branches)
    for _ in range(num_steps):
        values = watch.add([group_of(num_roots, num_branches, rho, rng) for _ in range(64)])
    return values, watch.warning


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9])
def test_rho_and_the_number_of_roots_are_those_of_cluster_sampling(rho):
    values, _ = watched(2, 6, rho)
    assert values["branching/rho_low"] < values["branching/rho"] < values["branching/rho_high"]
    assert values["branching/rho"] == pytest.approx(rho, abs=0.1)
    assert values["branching/branch_cost"] == pytest.approx(0.25)
    known = values["branching/rho"]
    leaves = (6 / 2 * (1 - known) / known) ** 0.5  # c_prefix = 8 - 2 calls, c_leaf = 2
    assert values["branching/roots_advised"] == pytest.approx(min(max(8 / leaves, 1), 8), rel=1e-3)


@pytest.mark.parametrize(
    ("num_roots", "rho", "said"),
    [(2, 0.95, "more roots than 2"), (6, 0.02, "fewer roots than 6"), (2, 0.3, ""), (3, 0.3, "")],
)
def test_it_advises_more_roots_where_branches_show_nothing_and_fewer_where_they_show_all(num_roots, rho, said):
    """At rho 0.3 K* is 2.6: three roots of eight, and two are within the interval."""
    values, line = watched(num_roots, 8 - num_roots, rho)
    assert said in line and bool(line) is bool(said)
    assert values["branching/roots_advised_low"] <= values["branching/roots_advised"]


def test_a_window_that_shows_nothing_is_silent():
    values, said = watched(2, 6, 0.5, num_steps=9)
    assert not values and not said
    values, said = watched(8, 0, 0.5)
    assert not values and not said


def test_a_groups_pairs_are_counted_by_right_and_wrong_where_the_reward_says_it():
    group = group_of(2, 2, 0.0, random.Random(3))
    for t, accuracy in zip(group.trajectories, (1.0, 1.0, 0.0, 1.0), strict=True):
        t.reward = random.random()  # rewards with a part for the format, say: all are different
        t.reward_parts = {"accuracy": accuracy}
    found = pairs_of(group)
    assert (found.num_within, found.differ_within, found.num_between) == (2, 1, 4)
    assert found.differ_between == 2  # 0.0 is wrong: it differs from 1 and from 1.1


def test_a_resumed_window_ends_as_the_undisturbed_one():
    rng = random.Random(0)
    steps = [[group_of(2, 6, 0.5, rng) for _ in range(16)] for _ in range(10)]
    undisturbed, before, after = (BranchWorth(8) for _ in range(3))
    expected = [undisturbed.add(groups) for groups in steps]
    first = [before.add(groups) for groups in steps[:4]]
    after.resume(json.loads(json.dumps(before.state())))
    assert first + [after.add(groups) for groups in steps[4:]] == expected and expected[-1]
