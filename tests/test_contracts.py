"""The signatures that scripts of other people may rely on: names, defaults, and a number of each."""

import math

import pytest
import torch
from helpers.scripted_rollout import prompt

from arpo.advantages import gae_advantages, group_advantages, token_advantages
from arpo.batch import row_of
from arpo.branching import branch_probability, initial_rollouts
from arpo.config.tools import PythonConfig
from arpo.data import load_prompts
from arpo.engine import Engine
from arpo.evals import pass_at_k
from arpo.losses import LossInputs, policy_loss
from arpo.model import Policy
from arpo.options import LossConfig
from arpo.rewards import RewardResult, score
from arpo.tools.python import PythonTool
from arpo.trajectory import Group, Trajectory
from arpo.tree import TreeBatch, tree_microbatches


def tree() -> Group:
    """A root of three tokens, advantage 1, and its branch that leaves it at 2, advantage -1."""
    root = Trajectory("p", "0", [5, 6, 7], [1, 1, 1], [0.0] * 3, reward=1.0, advantage=1.0)
    branch = Trajectory("p", "0.0", [5, 6, 8], [1, 1, 1], [0.0] * 3, reward=0.0, advantage=-1.0)
    branch.parent_id, branch.fork_at = "0", 2
    return Group(prompt(), [root, branch])


def test_policy_loss_takes_inputs_a_config_and_global_sums():
    one = torch.ones(1, 1)
    inputs = LossInputs(1.5 * one, 0 * one, one, one, entropy=one)
    loss, metrics = policy_loss(inputs, LossConfig(), denominator=2.0, entropy_statistics=None)
    assert loss.item() == pytest.approx(-0.6) and metrics["clip_fraction"] == 1.0
    cfg = LossConfig(entropy_balanced_advantage=True)  # A (1 + 0.2 (1 - 0) / 0.5) = 1.4 A
    assert policy_loss(inputs, cfg, entropy_statistics=(0.0, 0.5))[0].item() == pytest.approx(-1.2 * 1.4)


def test_group_advantages():
    assert group_advantages([1, 0, 1, 1], ["q"] * 4).tolist() == pytest.approx([0.5, -1.5, 0.5, 0.5], abs=1e-5)
    centred = group_advantages(torch.tensor([1.1, 0.0, 3.0]), torch.tensor([0, 0, 1]), normalize_std=False, eps=0.1)
    assert centred.tolist() == pytest.approx([0.55, -0.55, 3.0])


def test_gae_advantages():
    rewards, values, mask = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]]), torch.ones(1, 2)
    advantages, returns = gae_advantages(rewards, values, mask, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[0.5, 0.75]] and returns.tolist() == [[1.0, 1.0]]


def test_token_advantages_by_the_name_of_a_tree_credit():
    assert {k: v.tolist() for k, v in token_advantages(tree(), "soft").items()} == {"0": [1] * 3, "0.0": [-1] * 3}
    assert {k: v.tolist() for k, v in token_advantages(tree(), "hard").items()} == {"0": [0, 0, 1], "0.0": [0, 0, -1]}
    with pytest.raises(ValueError, match="did you mean 'hard'"):
        token_advantages(tree(), "hart")


def test_branch_probability_and_initial_rollouts():
    assert branch_probability(0.5, base=0.5, weight=0.2, consecutive=0, penalty=0.0) == pytest.approx(0.6)
    assert initial_rollouts(16, 0.2, 0.2, beta=0.5) == 9


def test_trees_hold_each_token_once_and_give_it_back_to_each_row():
    group = tree()
    rows = [row_of(group, trajectory) for trajectory in group.trajectories]
    [micro] = tree_microbatches(rows, rank=0, world_size=1, max_tokens=1000)
    assert isinstance(micro, TreeBatch) and micro.input_ids.numel() == len(prompt().token_ids) + 4
    first = len(prompt().token_ids)
    rows = micro.gather(torch.arange(float(micro.input_ids.numel())))
    assert rows.tolist() == [[first, first + 1, first + 2], [first, first + 1, first + 3]]


def test_score():
    result = score(r"<think>t</think><answer>\boxed{4}</answer>", ["4"], "gsm8k", compat="paper")
    assert isinstance(result, RewardResult) and result.total == 1.0 and result.parts["accuracy"] == 1.0
    assert score("no tags", ["4"], "gsm8k", compat="upstream").total == -1.0


def test_load_prompts(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    [loaded] = load_prompts(str(path))
    assert loaded.answers == ["2"] and loaded.messages[-1] == {"role": "user", "content": "1 + 1?"}


def test_pass_at_k():
    assert pass_at_k(4, 1, 2) == 0.5 and math.isclose(pass_at_k(5, 2, 1), 0.4)
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(2, 1, 3)


def test_a_tool_has_a_tag_run_and_aclose():
    for name in ("tag", "run", "aclose"):
        assert hasattr(PythonTool, name)
    assert PythonConfig().wall_s > 0 and Policy.__module__ == "arpo.model.policy" and Engine.step
