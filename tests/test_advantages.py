import pytest
import torch

from arpo.advantages import assign_advantages, gae_advantages, group_advantages, is_dead
from arpo.options import AdvantageConfig
from arpo.trajectory import Group, Prompt, StopReason, Trajectory


def test_group_advantages_are_as_published():
    advantages = group_advantages(torch.tensor([1.1, 0.0, -1.0, 0.0]), torch.zeros(4))
    torch.testing.assert_close(advantages, torch.tensor([1.2532, -0.0291, -1.1949, -0.0291]), atol=1e-4, rtol=0)


def test_groups_are_normalised_apart_whatever_the_order():
    rewards, ids = [1.0, 10.0, 0.0, 30.0], ["a", "b", "a", "b"]
    expected = group_advantages([1.0, 0.0], ["a", "a"]), group_advantages([10.0, 30.0], ["b", "b"])
    advantages = group_advantages(rewards, ids)
    assert torch.equal(advantages[[0, 2]], expected[0]) and torch.equal(advantages[[1, 3]], expected[1])


def test_equal_rewards_with_different_ids_are_different_groups():
    assert group_advantages([0.1, 0.1, 0.1], [0, 1, 2]).tolist() == pytest.approx([0.1, 0.1, 0.1], rel=1e-4)


@pytest.mark.parametrize("reward", [0.0, 0.1, -1.0, 1.1])
def test_constant_rewards_give_exactly_zero(reward):
    assert group_advantages([reward] * 7, [0] * 7).tolist() == [0.0] * 7


def test_without_std_only_the_mean_is_subtracted():
    assert group_advantages([1, 0, 1, 1], [0] * 4, normalize_std=False).tolist() == [0.25, -0.75, 0.25, 0.25]


def naive_gae(rewards, values, gamma, lam):
    """Sum of discounted deltas, straight from the definition."""
    n = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


def test_gae_equals_its_definition():
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(3, 6, generator=g), torch.randn(3, 6, generator=g)
    advantages, returns = gae_advantages(rewards, values, torch.ones(3, 6), gamma=0.9, lam=0.8)
    expected = torch.tensor([naive_gae(r, v, 0.9, 0.8) for r, v in zip(rewards.tolist(), values.tolist(), strict=True)])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values)


def test_gae_skips_tool_output_as_if_it_were_not_there():
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0]])
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(1, 7, generator=g) * mask, torch.randn(1, 7, generator=g)
    advantages, returns = gae_advantages(rewards, values, mask, gamma=0.9, lam=0.8)
    own = mask[0].bool()
    short = gae_advantages(rewards[:, own], values[:, own], torch.ones(1, 4), gamma=0.9, lam=0.8)
    torch.testing.assert_close(advantages[:, own], short[0])
    assert (advantages[:, ~own] == 0).all() and (returns[:, ~own] == 0).all()


def test_gae_does_not_lose_a_reward_that_lies_on_tool_output():
    values = torch.zeros(1, 3)
    on_tool = gae_advantages(torch.tensor([[0.0, 0.0, 1.0]]), values, torch.tensor([[1, 1, 0]]))[0]
    assert on_tool.tolist() == [[1.0, 1.0, 0.0]]


def groups_with(rewards: list[list[float]]) -> list[Group]:
    prompt = Prompt("same", [], [])
    return [Group(prompt, [Trajectory("same", str(i), reward=r) for i, r in enumerate(rs)]) for rs in rewards]


def test_assigned_advantages_are_per_group_and_leave_the_reward_alone():
    groups = groups_with([[1.0, 0.0], [5.0, 5.0]])
    assign_advantages(groups, AdvantageConfig(normalize_std=False))
    assert [[t.advantage for t in g.trajectories] for g in groups] == [[0.5, -0.5], [0.0, 0.0]]
    assert groups[0].trajectories[0].reward == 1.0


def test_a_trajectory_that_broke_counts_for_nothing():
    [group] = groups_with([[1.0, 0.0, 0.0]])
    group.trajectories[2].stop_reason = StopReason.ERROR
    assign_advantages([group], AdvantageConfig(normalize_std=False))
    assert [t.advantage for t in group.trajectories] == [0.5, -0.5, None]


def test_a_dead_group_is_one_with_equal_rewards():
    assert [is_dead(g) for g in groups_with([[1.0, 0.0], [5.0, 5.0], [1.0]])] == [False, True, False]
