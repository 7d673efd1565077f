"""Tree credits that start from the rewards: golden numbers of a small tree, a naive count on a large one."""

from itertools import combinations

import numpy as np
import pytest
from helpers.sample_groups import sample_groups

from arpo.advantages import TREE_CREDITS, turn_nodes
from arpo.options import AdvantageConfig
from arpo.selection import trained_on
from arpo.trajectory import Group, Prompt, StopReason, Trajectory, Turn

FROM_REWARDS = ("node", "node_parent", "inter_intra")

# (id, parent, starts of its turns, number of tokens, reward). A branch forks in front of its last turn. "0.2" broke: it
# neither teaches nor counts, and its turn at 4 is no sibling of the others there.
TREE = [
    ("0", None, [0, 2, 4], 6, 1.0),
    ("0.0", "0", [0, 2], 4, 0.0),
    ("0.1", "0", [0, 2, 4], 7, 0.0),
    ("0.2", "0", [0, 2, 4], 5, None),
    ("1", None, [0], 3, 1.0),
]


def small_group() -> Group:
    trajectories = []
    for name, parent, starts, length, reward in TREE:
        t = Trajectory("p", name, [0] * length, [1] * length, parent_id=parent, reward=reward)
        t.fork_at = starts[-1] if parent else 0
        t.turns = [Turn(start, inherited=start < t.fork_at) for start in starts]
        t.stop_reason = StopReason.ERROR if reward is None else StopReason.EOS
        trajectories.append(t)
    return Group(Prompt("p", [], []), trajectories)


def turn_credits(group: Group, tree: str, **options) -> dict[str, list[float]]:
    """The credit of each turn, which all its tokens have."""
    credits, turns = TREE_CREDITS[tree](group, AdvantageConfig(tree=tree, **options)), {}
    for t in trained_on(group):
        values = credits[t.trajectory_id]
        assert len(values) == len(t.token_ids)
        parts = np.split(values, [turn.start for turn in t.turns[1:]])
        assert all((part == part[0]).all() for part in parts)
        turns[t.trajectory_id] = [float(part[0]) for part in parts]
    return turns


# Rewards 1, 0, 0, 1: mean 1/2, deviation 1/2 in the population, so z is 1, -1, -1, 1 (eps takes 2e-6 off). Upwards:
#   at 4: 0 has 1, 0.1 has -1       at 2: 0 has (1 - 1) / 2 = 0, 0.0 has -1
#   at 0: 0 has (0 - 1) / 2 = -1/2 (the mean over its three leaves were -1/3), 1 has 1
#   the prompt: (-1/2 + 1) / 2 = 1/4
# inter_intra: among all (mean 1/2, unbiased deviation 0.57735) z = 0.86603 or its negative; in tree 0 (rewards 1, 0, 0:
# mean 1/3, deviation 0.57735) z = 1.15470, -0.57735, -0.57735; tree 1 is one leaf, 0.
GOLDEN = {
    "node": {"0": [-0.5, 0, 1], "0.0": [-0.5, -1], "0.1": [-0.5, 0, -1], "1": [1]},
    "node_parent": {"0": [-0.75, 0.5, 1], "0.0": [-0.75, -0.5], "0.1": [-0.75, 0.5, -1], "1": [0.75]},
    "inter_intra": {"0": [2.02073] * 3, "0.0": [-1.44338] * 2, "0.1": [-1.44338] * 3, "1": [0.86603]},
}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("tree", FROM_REWARDS)
def test_credits_are_those_computed_by_hand_whatever_the_order_of_the_trajectories(tree, order):
    group = small_group()
    credits = turn_credits(Group(group.prompt, group.trajectories[::order]), tree)
    assert credits.keys() == GOLDEN[tree].keys()
    for name, expected in GOLDEN[tree].items():
        assert credits[name] == pytest.approx(expected, abs=1e-5), name


@pytest.mark.parametrize("tree", FROM_REWARDS)
def test_a_kl_penalty_comes_off_the_reward_first(tree):
    group = small_group()
    group.trajectories[0].reward, group.trajectories[0].kl_penalty = 1.75, 0.75
    assert turn_credits(group, tree) == turn_credits(small_group(), tree)


def test_without_std_values_are_means_of_centred_rewards():
    """Leaves 1/2, -1/2, -1/2, 1/2: all of GOLDEN["node"] is halved."""
    credits = turn_credits(small_group(), "node", normalize="none")
    assert credits == {name: [value / 2 for value in values] for name, values in GOLDEN["node"].items()}


@pytest.mark.parametrize("tree", FROM_REWARDS)
def test_equal_rewards_and_a_single_leaf_teach_nothing(tree):
    dead, alone = small_group(), small_group()
    for t in dead.trajectories:
        t.reward = 0.1
    alone.trajectories = alone.trajectories[:1]
    assert not any(
        value for group in (dead, alone) for values in turn_credits(group, tree).values() for value in values
    )


def test_trajectories_of_a_rollout_share_a_turn_exactly_where_they_share_its_tokens():
    """Each search of the script names its writer; last turns are always different ones."""
    [group] = sample_groups(1)  # two roots, four branches
    compared = []
    for a, b in combinations(group.trajectories, 2):
        names = list(zip(turn_nodes(a, group), turn_nodes(b, group), strict=False))
        for (x, y), turn_a, turn_b in zip(names[:-1], a.turns, b.turns, strict=False):
            assert (x == y) == (a.token_ids[: turn_a.end] == b.token_ids[: turn_b.end])
            compared.append(x == y)
        assert names[-1][0] != names[-1][1]
    assert True in compared and False in compared
