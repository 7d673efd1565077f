"""From scored groups to gradients, on real gloo ranks: nothing depends on how the rows are cut, ordered or spread."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.models import assert_close_by_name, build_tiny_model, cfg_of, random_rows
from helpers.ranks import mesh_of_one, run_ranks
from helpers.updates import CASES, GRPO, filled, make_groups, take_step

from arpo import losses
from arpo.advantages import GroupEvidence, grpo
from arpo.batch import collate
from arpo.config.sections import UpdateConfig
from arpo.model import load_policy
from arpo.model.attention import resolve_layout
from arpo.options import AdvantageConfig, LossConfig
from arpo.ranks import Ranks, Timers
from arpo.ranks.ranks import make_group
from arpo.trajectory import Group, Prompt
from arpo.update import (
    Minibatch,
    drop_if_no_gradient,
    entropy_statistics,
    fill_advantages,
    fill_old_logprobs,
    first_update_computes_old_logprobs,
    make_minibatches,
)
from train_rl import fill_model_outputs

CPU = torch.device("cpu")
# world size, tokens per micro-batch, order of groups and trajectories, layout
LAYOUTS = {
    "whole": (1, 500, 1, "packed"),
    "split": (1, 40, 1, "packed"),
    "reversed": (1, 70, -1, "packed"),
    "2 ranks": (2, 40, 1, "packed"),
    "trees": (1, 70, 1, "tree"),
    "trees on 2 ranks": (2, 40, 1, "tree"),
}


@pytest.mark.parametrize(
    "layout, group_size, chosen",
    [("auto", 4, "tree"), ("auto", 1, "packed"), ("packed", 4, "packed"), ("tree", 1, "tree")],
)
def test_auto_is_tree_where_a_group_shares_something(layout, group_size, chosen):
    cfg = UpdateConfig(num_epochs=3, layout=layout)
    assert resolve_layout(cfg, group_size) == UpdateConfig(num_epochs=3, layout=chosen)


def load(ranks, folder: str):
    policy = load_policy(cfg_of(folder), ranks.mesh, device=CPU)
    policy.head_chunk_tokens = 16
    return policy


def updates(ranks, folder: str, other: str, layouts: list[tuple[int, int, str]]) -> list[dict[str, tuple]]:
    """Per layout and case: metrics and full gradients of an update of a policy that is far from the sampling one."""
    policy, old = load(ranks, folder), load(ranks, other)
    optimizer, seen = torch.optim.SGD(policy.parameters(), lr=0.0), {}
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.full_tensor().numpy() for name, p in policy.hf_parameters()})
    )
    outcomes = []
    for max_tokens, order, layout in layouts:
        outcome = {}
        for case, (_, loss) in CASES.items():
            minibatch, metrics = filled(ranks, old, policy, case, max_tokens, order, layout)
            metrics.merge(take_step(policy, optimizer, minibatch, loss, ranks))
            outcome[case] = (ranks.reduce_metrics(metrics).values(), dict(seen))
        outcomes.append(outcome)
    return outcomes


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("other"), seed=5)


@pytest.fixture(scope="module")
def outcomes(tiny_model_dir, other_model_dir) -> dict[str, dict]:
    """layout -> case -> (metrics, gradients), on rank 0; all ranks agree."""
    by_layout = {}
    for world_size in (1, 2):
        names = [name for name, layout in LAYOUTS.items() if layout[0] == world_size]
        by_rank = run_ranks(
            world_size, updates, str(tiny_model_dir), str(other_model_dir), [LAYOUTS[name][1:] for name in names]
        )
        for i, name in enumerate(names):
            by_layout[name] = by_rank[0][i]
            assert all(rank[i][case][0] == by_rank[0][i][case][0] for rank in by_rank for case in CASES)
    return by_layout


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "whole"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_same_however_rows_are_cut_ordered_and_spread(outcomes, case, layout):
    (metrics, gradients), (expected_metrics, expected) = outcomes[layout][case], outcomes["whole"][case]
    for name in expected_metrics.keys() - {"tokens/trained", "train/tree_token_ratio"}:
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5, abs=1e-7), name
    assert_close_by_name(gradients, expected)


def test_the_token_ratio_says_what_the_trees_saved(outcomes):
    for name, layout in LAYOUTS.items():
        metrics = outcomes[name]["gae"][0]
        num_row_tokens = metrics["tokens/trained"] * metrics["train/tree_token_ratio"]
        assert num_row_tokens == pytest.approx(outcomes["whole"]["gae"][0]["tokens/trained"])
        assert (metrics["train/tree_token_ratio"] > 1) == (layout[-1] == "tree")


def test_every_clip_and_mask_of_the_cases_bites(outcomes):
    """Else the test above would compare nothing."""
    assert 0.1 < outcomes["whole"]["ppo, token_mean"][0]["loss/clip_fraction"] < 0.9
    assert 0 < outcomes["whole"]["gae"][0]["mismatch/truncated_share"] < 1
    for case in ("everything in the loss", "parents, sequence mis", "inter intra, geometric mis"):
        assert 0 < outcomes["whole"][case][0]["mismatch/masked_share"] < 1


# ---------------------------------------------------------------------------------------- advantages of a mini-batch


@pytest.fixture(scope="module")
def ranks():
    with mesh_of_one() as mesh:
        yield Ranks(0, 1, CPU, mesh)


@pytest.fixture(scope="module")
def models(ranks, tiny_model_dir, other_model_dir):
    return load(ranks, str(tiny_model_dir)), load(ranks, str(other_model_dir))


def rows_of(minibatch, field: str):
    """(trajectory, its row of the field without padding)"""
    for micro in minibatch.micros:
        for b, row_id in enumerate(micro.row_ids):
            t = minibatch.trajectories[row_id][1]
            yield t, getattr(micro, field)[b, : len(t.token_ids)].tolist()


def masks_of(minibatch):
    return (mask for _, mask in rows_of(minibatch, "loss_mask"))


def test_minibatches_are_whole_groups_without_what_cannot_teach(ranks):
    groups = [*make_groups(), *make_groups()]
    for t in [*groups[2].trajectories, *groups[3].trajectories]:
        t.reward = 0.5
    cfg = UpdateConfig(num_prompts_per_minibatch=2, max_tokens_per_microbatch=40, layout="packed")
    first, second = make_minibatches(groups, cfg, GRPO, ranks)
    assert first.groups == groups[:2] and second.groups == groups[2:]
    assert [(i, t.trajectory_id) for i, t in first.trajectories] == [(i, str(n)) for i in range(2) for n in range(3)]
    [only] = make_minibatches(groups, cfg, AdvantageConfig(dead_groups="drop"), ranks)
    assert only.groups == groups[:2]


def test_a_kl_in_the_reward_is_summed_over_the_trajectory_and_taken_off_before_the_group_is_compared(ranks, models):
    minibatch, metrics = filled(ranks, *models, "kl in the reward", 40, 1)
    old = {id(t): row for t, row in rows_of(minibatch, "old_logprobs")}
    for t, row in rows_of(minibatch, "ref_logprobs"):
        expected = 0.1 * sum(a - b for a, b, m in zip(old[id(t)], row, t.loss_mask, strict=True) if m)
        assert t.kl_penalty == pytest.approx(expected, rel=1e-5)
    trajectories = [t for _, t in minibatch.trajectories]
    shaped = torch.tensor([t.reward - t.kl_penalty for t in trajectories])
    expected = grpo(GroupEvidence(shaped, [i for i, _ in minibatch.trajectories], trajectories), AdvantageConfig())
    assert [t.advantage for t in trajectories] == pytest.approx(expected.tolist())
    assert metrics["reward/kl_penalty"] == pytest.approx(sum(t.kl_penalty for t in trajectories) / len(trajectories))
    assert [t.reward for g in minibatch.groups for t in g.trajectories] == [
        t.reward for g in make_groups() for t in g.trajectories
    ]


def test_gae_gives_the_reward_to_the_last_sampled_token_and_whitens_over_the_minibatch(ranks, models):
    """Against a loop over the loss tokens of each trajectory."""
    minibatch, _ = filled(ranks, *models, "gae", 40, 1)
    columns = {name: dict() for name in ("old_logprobs", "ref_logprobs", "old_values", "returns", "advantages")}
    for name, by_trajectory in columns.items():
        for t, row in rows_of(minibatch, name):
            by_trajectory[id(t)] = [x for x, m in zip(row, t.loss_mask, strict=True) if m]
    expected_advantages, advantages = [], []
    for _, t in minibatch.trajectories:
        old, ref, values, returns, whitened = (columns[name][id(t)] for name in columns)
        rewards = [-0.1 * abs(a - b) for a, b in zip(old, ref, strict=True)]
        rewards[-1] += t.reward
        advantage, expected = 0.0, []
        for i in reversed(range(len(values))):
            next_value = values[i + 1] if i + 1 < len(values) else 0.0
            advantage = rewards[i] + 0.9 * next_value - values[i] + 0.9 * 0.8 * advantage
            expected.append(advantage)
        expected = expected[::-1]
        assert returns == pytest.approx([a + v for a, v in zip(expected, values, strict=True)], rel=1e-4, abs=1e-5)
        expected_advantages += expected
        advantages += whitened
    flat = torch.tensor(expected_advantages)
    assert advantages == pytest.approx(((flat - flat.mean()) / flat.std()).tolist(), rel=1e-4, abs=1e-4)


def test_tool_output_has_no_advantage_and_nothing_is_filled_that_nobody_reads(ranks, models):
    for case in ("everything in the loss", "gae", "ppo, token_mean"):
        minibatch, _ = filled(ranks, *models, case, 40, 1)
        for micro in minibatch.micros:
            assert not micro.advantages[~micro.loss_mask].any() and micro.advantages[micro.loss_mask].any()
    assert all(m.ref_logprobs is None and m.rollout_weights is None and m.returns is None for m in minibatch.micros)


def test_ratios_against_the_rollout_are_those_of_the_engines_logprobs(ranks, models):
    policy, _ = models
    cfg = LossConfig(old_logprobs="rollout")
    [minibatch] = make_minibatches(
        make_groups(), UpdateConfig(num_prompts_per_minibatch=2, layout="packed"), GRPO, ranks
    )
    fill_old_logprobs(policy, minibatch.micros, cfg, 0.9)
    assert all(torch.equal(micro.old_logprobs, micro.rollout_logprobs) for micro in minibatch.micros)


def test_the_mismatch_is_k3_of_the_engine_to_the_trainer_over_the_sampled_tokens(ranks, models):
    minibatch, metrics = filled(ranks, *models, "ppo, token_mean", 40, 1)
    differences = [
        float(trainer) - engine
        for (t, logprobs), mask in zip(rows_of(minibatch, "old_logprobs"), masks_of(minibatch), strict=True)
        for trainer, engine, sampled in zip(logprobs, t.rollout_logprobs, mask, strict=True)
        if sampled
    ]
    k3 = [math.exp(difference) - 1 - difference for difference in differences]
    assert metrics.values()["mismatch/kl"] == pytest.approx(sum(k3) / len(k3), rel=1e-5)


@pytest.mark.parametrize("layout", ["packed", "tree"])
@pytest.mark.parametrize("has_one_root", [True, False])
def test_what_a_whole_group_shares_gets_no_gradient_from_its_rewards(ranks, models, layout, has_one_root):
    """A parent and its branch share five tokens. Beside a second root these tokens are taught again."""
    policy, _ = models
    [group, _] = make_groups()
    group.trajectories = group.trajectories[1 if has_one_root else 0 : 3]
    for t in group.trajectories:
        t.loss_mask = [1] * 5 + [0] * (len(t.token_ids) - 5)
    update = UpdateConfig(num_prompts_per_minibatch=1, layout=layout)
    [minibatch] = make_minibatches([group], update, GRPO, ranks)
    fill_old_logprobs(policy, minibatch.micros, LossConfig(), 0.9)
    fill_advantages([group], [minibatch], GRPO, LossConfig(), ranks)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    norm = take_step(policy, optimizer, minibatch, LossConfig(), ranks).values()["optim/grad_norm"]
    assert norm < 1e-5 if has_one_root else norm > 0.01


def test_aepo_compares_with_the_entropies_of_the_policy_that_is_updated_now(ranks, models):
    """The old ones are those of the first update: after it the policy has changed."""
    policy, old = models
    minibatch, _ = filled(ranks, old, policy, "aepo", 40, 1)
    [[old_mean, _], [mean, std]] = [
        entropy_statistics(policy, minibatch.micros, temperature=0.9, is_first=is_first, ranks=ranks)
        for is_first in (True, False)
    ]
    with torch.no_grad():
        now = torch.cat([micro.at_loss_tokens(policy(micro, 0.9)[1]) for micro in minibatch.micros])
    assert mean == pytest.approx(now.mean().item(), rel=1e-5) and abs(mean - old_mean) > 1e-4
    assert std == pytest.approx(now.std().item(), rel=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_first_update_of_a_rollout_needs_no_pass_before_it_unless_a_loss_looks_at_all_tokens(ranks, models, case):
    """The same metrics and gradients to the bit, with `fill_old_logprobs` and without."""
    (policy, reference), (advantage, loss) = models, CASES[case]
    assert first_update_computes_old_logprobs(loss) == (case not in ("aepo", "kl in the reward", "gae"))
    optimizer, outcomes, seen = torch.optim.SGD(policy.parameters(), lr=0.0), [], {}
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.full_tensor().numpy().copy() for name, p in policy.hf_parameters()})
    )
    for without in (False, first_update_computes_old_logprobs(loss)):
        minibatch, metrics = filled(ranks, policy, reference, case, 40, 1)
        if without:
            metrics = fill_advantages(minibatch.groups, [minibatch], advantage, loss, ranks)
            for micro in minibatch.micros:
                micro.old_logprobs = micro.old_entropies = micro.rollout_weights = None
        metrics.merge(take_step(policy, optimizer, minibatch, loss, ranks, is_first=True))
        outcomes.append((metrics.values(), dict(seen)))
        assert all(micro.old_entropies is not None for micro in minibatch.micros)
    (metrics, gradients), (expected_metrics, expected) = outcomes
    assert metrics == expected_metrics and "mismatch/kl" in metrics and metrics["loss/approx_kl"] < 1e-12
    assert all(np.array_equal(gradients[name], expected[name]) for name in expected)


def trained_tokens(ranks, folder: str, prompt: tuple[int, ...]) -> float:
    """What a rank counts in the update of a trajectory that is spread over two ranks."""
    ranks = replace(ranks, group=make_group(2))
    policy = load_policy(cfg_of(folder, context_parallel=2), ranks.mesh, device=CPU)
    group = Group(Prompt("p", [], [], token_ids=prompt), make_groups()[0].trajectories[:1])
    cfg = UpdateConfig(num_prompts_per_minibatch=1, max_tokens_per_microbatch=500, layout="packed")
    [minibatch] = make_minibatches([group], cfg, GRPO, ranks)
    fill_advantages([group], [minibatch], GRPO, LossConfig(), ranks)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    metrics = take_step(policy, optimizer, minibatch, LossConfig(), ranks, is_first=True)
    return metrics.values().get("tokens/trained", 0)


def test_a_rank_whose_share_is_of_the_prompt_alone_counts_its_tokens(tiny_model_dir):
    """With parts of rows others count too few or too many: pytorch/torchtitan#2983, areal-project/AReaL#627."""
    length = len(make_groups()[0].trajectories[0].token_ids)
    half = (length + 100) // 2
    counts = run_ranks(2, trained_tokens, str(tiny_model_dir), tuple(range(2 * half - length)))
    assert counts == [half, half]


def updates_of_a_step(ranks, rewards: list[list[float]], loss: LossConfig) -> int:
    """The mini-batches of a step of two groups that are worth an update."""
    groups = make_groups()
    for group, of_group in zip(groups, rewards, strict=True):
        for t, reward in zip(group.trajectories, of_group, strict=False):
            t.reward = reward
    cfg = UpdateConfig(num_prompts_per_minibatch=1, max_tokens_per_microbatch=40, layout="packed")
    minibatches = make_minibatches(groups, cfg, GRPO, ranks)
    fill_advantages(groups, minibatches, GRPO, LossConfig(), ranks)
    return len(drop_if_no_gradient(minibatches, loss, ranks))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_of_dead_groups_moves_nothing_and_one_mixed_group_is_enough(world_size):
    """As rasbt/reasoning-from-scratch#186 skips it, in which Adam and weight decay moved the weights. A user's loss may
    have a term of its own."""
    dead, mixed = [[1.0] * 3, [-1.0] * 3], [[1.0] * 3, [1.0, 0.0, 1.0]]
    cases = [(dead, LossConfig(), 0), (mixed, LossConfig(), 2), (dead, LossConfig(entropy_coefficient=0.1), 2)]
    cases.append((dead, LossConfig(kind=f"{losses.__file__}:reinforce"), 2))
    for rewards, loss, expected in cases:
        assert run_ranks(world_size, updates_of_a_step, rewards, loss) == [expected] * world_size


def test_a_bound_that_changes_in_the_loop_holds_for_all_minibatches():
    """The first one takes it in its update. trl #3036: schedules are edits of the loop."""
    far = lambda micro, temperature: (micro.rollout_logprobs + 1.0, micro.rollout_logprobs)  # noqa: E731
    minibatches = [Minibatch([], [], [collate(random_rows())]) for _ in range(2)]
    models = SimpleNamespace(policy=far, reference=None, critic=None)
    loss_cfg = LossConfig(rollout_correction="tis", correction_high=1.25)
    fill_model_outputs(minibatches, models, loss_cfg, temperature=1.0, timers=Timers())
    assert minibatches[0].micros[0].rollout_weights is None
    assert minibatches[1].micros[0].rollout_weights.max() == 1.25
