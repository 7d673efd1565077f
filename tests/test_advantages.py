import pytest
import torch

from arpo.advantages import TREE_CREDITS, CriticEvidence, GroupEvidence, assign_advantages, gae, grpo
from arpo.options import AdvantageConfig
from arpo.selection import groups_to_train_on, is_dead, training_trajectories
from arpo.trajectory import Group, Prompt, StopReason, Trajectory, Turn


def group_advantages(rewards: torch.Tensor, group_ids: list, **options) -> torch.Tensor:
    return grpo(GroupEvidence(rewards, group_ids, []), AdvantageConfig(**options))


def gae_advantages(rewards, values, mask, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return gae(CriticEvidence(rewards, values, mask.bool()), AdvantageConfig(kind="gae", **options))


def test_group_advantages_are_as_published():
    advantages = group_advantages(torch.tensor([1.1, 0.0, -1.0, 0.0]), [0] * 4)
    torch.testing.assert_close(advantages, torch.tensor([1.2532, -0.0291, -1.1949, -0.0291]), atol=1e-4, rtol=0)


def test_groups_are_normalised_apart_whatever_the_order():
    rewards = torch.tensor([1.0, 10.0, 0.0, 30.0])
    expected = group_advantages(rewards[::2], ["a", "a"]), group_advantages(rewards[1::2], ["b", "b"])
    advantages = group_advantages(rewards, ["a", "b", "a", "b"])
    assert torch.equal(advantages[[0, 2]], expected[0]) and torch.equal(advantages[[1, 3]], expected[1])


@pytest.mark.parametrize("reward", [0.0, 0.1, -1.0, 1.1])
def test_constant_rewards_give_exactly_zero(reward):
    assert group_advantages(torch.full((7,), reward), [0] * 7).tolist() == [0.0] * 7


# REINFORCE++ with baseline, as verl computes it: rewards [1, 0] and [2, 0] in two groups, responses of 1, 3, 2, 2 loss
# tokens. Less the group's mean: 0.5, -0.5, 1, -1. Over the 8 tokens: sum 0.5 - 1.5 + 2 - 2 = -1, mean -0.125; squares
# 4 x 1/4 + 4 x 1 = 5, variance (5 - 8 / 64) / 7 = 0.696429, deviation 0.834523, (0.5 + 0.125) / 0.834523 = 0.748931.
def group_of_masks(masks: list[list[int]], rewards: list[float]) -> Group:
    trajectories = [
        Trajectory("p", str(i), m, m, reward=r) for i, (m, r) in enumerate(zip(masks, rewards, strict=True))
    ]
    return Group(Prompt("p", [], []), trajectories)


WHITENED = [0.748931, -0.449358, 1.348076, -1.048503]


def two_groups() -> list[Group]:
    return [group_of_masks([[1], [1, 1, 0, 1]], [1.0, 0.0]), group_of_masks([[1, 1], [0, 1, 1]], [2.0, 0.0])]


def test_over_the_batch_a_reward_is_compared_with_all_loss_tokens_of_the_groups_that_are_trained_on():
    dropped, kept = ([*two_groups(), group_of_masks([[1] * 9] * 2, [0.1, 0.1])] for _ in range(2))
    assign_advantages(dropped, AdvantageConfig(normalize="batch", dead_groups="drop"))
    assert [t.advantage for g in dropped[:2] for t in g.trajectories] == pytest.approx(WHITENED, abs=1e-6)
    assign_advantages(kept, AdvantageConfig(normalize="batch"))
    advantages = [t.advantage for g in kept for t in g.trajectories for _ in range(t.num_sampled_tokens)]
    assert sum(advantages) == pytest.approx(0, abs=1e-9) and torch.tensor(advantages).std().item() == pytest.approx(1)


def test_a_batch_in_which_no_reward_differs_teaches_nothing():
    groups = [group_of_masks([[1], [1, 1]], [0.1, 0.1]), group_of_masks([[0], [0]], [0.3, 0.3])]
    assign_advantages(groups, AdvantageConfig(normalize="batch"))
    assert [t.advantage for g in groups for t in g.trajectories] == [0.0] * 4


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


def test_advantages_are_assigned_per_group_after_the_kl_penalty_and_without_what_broke():
    groups = groups_with([[1.0, 0.0], [5.0, 5.0], [1.0, 0.0], [1.0, 0.0, 0.0]])
    groups[2].trajectories[0].kl_penalty = 0.5
    groups[3].trajectories[2].stop_reason = StopReason.ERROR
    assign_advantages(groups, AdvantageConfig(normalize="none"))
    advantages = [[t.advantage for t in g.trajectories] for g in groups]
    assert advantages == [[0.5, -0.5], [0.0, 0.0], [0.25, -0.25], [0.5, -0.5, None]]
    assert groups[2].trajectories[0].reward == 1.0


@pytest.mark.parametrize("reward", [-1.0, 1.0])
def test_one_that_failing_tools_left_alone_learns_nothing_and_a_group_of_one_does(reward):
    """Three of four broke: the fourth has nothing to be compared with, and its raw reward is no advantage."""
    [group, single] = groups_with([[reward, 0.5, 0.0, -1.0], [reward]])
    for t in group.trajectories[1:]:
        t.stop_reason = StopReason.ERROR
    assign_advantages([group, single], AdvantageConfig())
    assert [t.advantage for t in group.trajectories] == [0.0, None, None, None]
    assert single.trajectories[0].advantage == pytest.approx(reward)
    assert is_dead(group) and not is_dead(single)


# (id, parent, fork_at, number of tokens, advantage). "0.0.0" forks off a branch, "0.0.1" within what that branch has
# from "0", "0.2" before the first branch did; "0.3" broke: it teaches nothing, though "0.3.0" shares its tokens.
TREE = [
    ("0", None, 0, 6, 1.0),
    ("0.0", "0", 3, 7, -2.0),
    ("0.1", "0", 5, 6, 0.5),
    ("0.0.0", "0.0", 5, 8, 3.0),
    ("0.0.1", "0.0", 2, 5, 0.1),
    ("0.2", "0", 2, 4, -1.5),
    ("0.3", "0", 4, 9, None),
    ("0.3.0", "0.3", 6, 7, 0.25),
    ("1", None, 0, 5, -0.75),
]


def branched_group() -> Group:
    """Tokens name their writer and place, so that two trajectories share a prefix exactly where they are equal. Each is
    a turn, as a fork is possible in front of a turn only."""
    tokens: dict[str, list] = {}
    trajectories = []
    for name, parent, fork_at, length, advantage in TREE:
        tokens[name] = (tokens[parent][:fork_at] if parent else []) + [f"{name}/{i}" for i in range(fork_at, length)]
        stop = StopReason.EOS if advantage is not None else StopReason.ERROR
        t = Trajectory("p", name, tokens[name], [1] * length, parent_id=parent, fork_at=fork_at, stop_reason=stop)
        t.advantage = t.reward = advantage
        t.turns = [Turn(i, i + 1, i + 1) for i in range(length)]
        trajectories.append(t)
    return Group(Prompt("p", [], []), trajectories)


def test_hard_advantages_are_means_over_all_trajectories_that_share_the_token():
    group = branched_group()
    taught = [t for t in group.trajectories if t.advantage is not None]
    hard = TREE_CREDITS["hard"](group, AdvantageConfig())
    assert hard.keys() == {t.trajectory_id for t in taught}
    for t in taught:
        for i, token in enumerate(t.token_ids):
            sharers = [s.advantage for s in taught if i < len(s.token_ids) and s.token_ids[i] == token]
            assert hard[t.trajectory_id][i] == pytest.approx(sum(sharers) / len(sharers)), (t.trajectory_id, i)
    assert hard["1"].tolist() == [-0.75] * 5 and len(set(hard["0.0.0"])) == 4


def test_a_credit_that_starts_from_the_rewards_refuses_another_estimator(tmp_path):
    rloo = f"{tmp_path}/mine.py:rloo"
    (tmp_path / "mine.py").write_text("def rloo(evidence, cfg): ...\n")
    assert AdvantageConfig(kind=rloo, tree="hard").tree == "hard"
    with pytest.raises(
        ValueError, match=r"tree=node starts from the rewards, .*kind=.*:rloo .*set advantage\.kind=grpo or"
    ):
        AdvantageConfig(kind=rloo, tree="node")


def test_soft_credit_is_the_advantage_at_every_token_of_what_teaches():
    group = branched_group()
    taught = [t for t in group.trajectories if t.advantage is not None]
    soft = TREE_CREDITS["soft"](group, AdvantageConfig())
    assert {name: list(values) for name, values in soft.items()} == {
        t.trajectory_id: [t.advantage] * len(t.token_ids) for t in taught
    }


def test_who_needs_a_critic_is_known_by_where_the_estimator_is_listed():
    assert AdvantageConfig(kind="gae").needs_critic and not AdvantageConfig(kind="grpo").needs_critic


def test_a_dead_group_is_one_with_equal_rewards_after_the_kl_penalty():
    groups = groups_with([[1.0, 0.0], [5.0, 5.0], [1.0], [1.0, 1.0]])
    groups[3].trajectories[0].kl_penalty = 0.25
    assert [is_dead(g) for g in groups] == [False, True, False, False]


def test_training_leaves_out_what_cannot_teach():
    def trajectory(name: str, reward: float, mask: list[int], stop: StopReason = StopReason.EOS) -> Trajectory:
        n = len(mask)
        return Trajectory("p", name, list(range(n)), mask, [0.0] * n, stop_reason=stop, reward=reward)

    prompt = Prompt("p", [], [], token_ids=(1, 2))
    mixed = Group(prompt, [trajectory("0", 1.0, [1, 0, 1]), trajectory("1", 0.0, [1]), trajectory("2", 0.0, [0])])
    mixed.trajectories.append(trajectory("3", 1.0, [1, 1], StopReason.ERROR))
    dead = Group(prompt, [trajectory("0", 1.0, [1, 1, 1, 1]), trajectory("1", 1.0, [1, 1, 1, 1, 1])])
    for cfg, expected in ((AdvantageConfig(), [3, 1, 4, 5]), (AdvantageConfig(dead_groups="drop"), [3, 1])):
        assert [len(t.token_ids) for _, t in training_trajectories([mixed, dead], cfg)] == expected


@pytest.mark.parametrize(
    "share, dead_groups, kept",
    [
        (1.0, "keep", [0, 1, 2, 3]),
        (0.91, "keep", [0, 1, 3]),
        (0.9, "keep", [1, 3]),
        (0.6, "keep", [1, 3]),
        (0.5, "keep", [1]),
        (0.9, "resample", [1, 3]),
    ],
)
def test_the_groups_that_hold_a_share_of_the_spread_are_trained_on(share, dead_groups, kept):
    groups = groups_with([[0.0, 0.2], [0.0, 1.0], [1.0, 1.0], [0.0, 0.8]])  # deviations 0.1, 0.5, 0, 0.4
    cfg = AdvantageConfig(keep_variance=share, dead_groups=dead_groups)
    assert groups_to_train_on(groups, 4, cfg) == [groups[i] for i in kept]


def test_nothing_is_trained_on_if_no_group_has_a_spread_or_but_one_reward():
    groups = groups_with([[1.0, 1.0], [0.0, 0.0]])
    assert groups_to_train_on(groups, 2, AdvantageConfig(keep_variance=0.9)) == []
    groups[0].trajectories[0].stop_reason = StopReason.ERROR
    assert groups_to_train_on(groups, 2, AdvantageConfig(keep_variance=0.9)) == []
    with pytest.raises(ValueError, match="keep_variance=0 would train on nothing"):
        AdvantageConfig(keep_variance=0.0)


LIVE, DEAD = [1.0, 0.0], [1.0, 1.0]
RESAMPLE = AdvantageConfig(dead_groups="resample", max_resample=2)


def test_under_resample_the_first_mixed_groups_are_trained_on():
    groups = groups_with([DEAD, LIVE, DEAD, LIVE, LIVE])
    assert groups_to_train_on(groups, 2, RESAMPLE) == [groups[1], groups[3]]
    assert groups_to_train_on(groups, 4, RESAMPLE) == [groups[1], groups[3], groups[4]]
    assert groups_to_train_on(groups, 5, AdvantageConfig(dead_groups="drop")) == groups
    for t in groups[0].trajectories + groups[1].trajectories:
        t.loss_mask = [1]
    assert [g for g, _ in training_trajectories(groups[:2], RESAMPLE)] == [1, 1]
