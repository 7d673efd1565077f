"""Estimators and tree credits, which turn rewards into advantages, and the choice of the trajectories to train on.

A new estimator is one function and one line: in GROUP_ESTIMATORS if it compares trajectories with each other, in
CRITIC_ESTIMATORS if it compares tokens with a critic's values (a critic is loaded for these, and for no others). A new
way to share a trajectory's advantage among its tokens is one function and one line in TREE_CREDITS. A knob is a field
of AdvantageConfig.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arpo.errors import check_name
from arpo.options import AdvantageConfig
from arpo.trajectory import Group, StopReason, Trajectory


@dataclass(frozen=True)
class GroupEvidence:
    """Everything that a group estimator may look at: the N trajectories of a step that did not end in an error."""

    rewards: Tensor
    """(N,) float64, each trajectory's reward less its KL penalty (loss.kl_in=reward)."""
    group_ids: list[int]
    """(N,) index of the group that each trajectory belongs to."""
    trajectories: list[Trajectory]
    """(N,) the trajectories themselves."""


@dataclass(frozen=True)
class CriticEvidence:
    """Everything that an estimator with a critic may look at: B trajectories of T response tokens."""

    rewards: Tensor
    """(B, T) trajectory's reward at the last token that the policy wrote, else 0; less each token's KL penalty."""
    values: Tensor
    """(B, T) the critic's values before the update."""
    mask: Tensor
    """(B, T) bool, True where the policy sampled the token."""


def grpo(evidence: GroupEvidence, cfg: AdvantageConfig) -> Tensor:
    """Return `group_advantages`; without cfg.normalize_std this is Dr.GRPO."""
    return group_advantages(evidence.rewards, evidence.group_ids, normalize_std=cfg.normalize_std)


def group_advantages(
    rewards: Tensor | Sequence[float],
    group_ids: Tensor | Sequence[Hashable],
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """(reward - mean) / (std + eps) within each group; without normalize_std only reward - mean. (N,), (N,) -> (N,)

    std is unbiased. A constant group gives zeros; a group of one has mean 0 and std 1, so it keeps its reward.
    Rewards [1, 0, 1, 1] in one group -> [0.5, -1.5, 0.5, 0.5].
    """
    rewards = torch.as_tensor(rewards)
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    advantages = torch.empty_like(rewards)
    for indices in members(group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids):
        group = rewards[indices].double()
        alone = len(indices) == 1
        centred = group if alone else group - group.mean()
        if not alone and (group == group[0]).all():
            centred = torch.zeros_like(group)  # exactly: eps would blow up the rounding of the mean
        std = 1.0 if alone else group.std(unbiased=True)
        advantages[indices] = (centred / (std + eps) if normalize_std else centred).to(rewards.dtype)
    return advantages


def members(group_ids: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of each group, in the order in which groups first occur. ["a", "b", "a"] -> [[0, 2], [1]]"""
    by_id: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        by_id.setdefault(group_id, []).append(index)
    return list(by_id.values())


def gae(evidence: CriticEvidence, cfg: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return `gae_advantages`."""
    return gae_advantages(evidence.rewards, evidence.values, evidence.mask, gamma=cfg.gamma, lam=cfg.lam)


def gae_advantages(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), returns = advantages + values. All (B, T), 0 off the mask.

    Only the policy's own tokens are steps: tool results are passed over. A reward on a mask-0 position counts for the
    last own token before it. Rewards [0, 1], values [0.5, 0.25], gamma = lam = 1 -> [0.5, 0.75], returns [1, 1].
    """
    assert token_rewards.shape == values.shape == mask.shape, (token_rewards.shape, values.shape, mask.shape)
    own = mask.bool()
    next_value = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(next_value)
    late_reward = torch.zeros_like(next_value)
    columns = []
    for t in reversed(range(values.shape[1])):
        reward = late_reward + token_rewards[:, t]
        delta = reward + gamma * next_value - values[:, t]
        advantage = torch.where(own[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(own[:, t], values[:, t], next_value)
        late_reward = torch.where(own[:, t], 0.0, reward)
        columns.append(torch.where(own[:, t], advantage, 0.0))
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, torch.where(own, advantages + values, 0.0)


GROUP_ESTIMATORS: dict[str, Callable[[GroupEvidence, AdvantageConfig], Tensor]] = {
    "grpo": grpo,
}
"""Each returns one advantage for each trajectory, (N,)."""
CRITIC_ESTIMATORS: dict[str, Callable[[CriticEvidence, AdvantageConfig], tuple[Tensor, Tensor]]] = {
    "gae": gae,
}
"""Each returns (B, T) advantages, which are whitened afterwards, and (B, T) returns, which the critic learns."""


def assign_advantages(groups: list[Group], cfg: AdvantageConfig) -> None:
    """Fill `trajectory.advantage` with the group estimator `cfg.kind`.

    A trajectory that ended in an error of ours keeps None, and its group's mean ignores it.
    """
    trajectories = [(index, t) for index, group in enumerate(groups) for t in teaching(group)]
    assert all(t.reward is not None for _, t in trajectories), "assign_advantages needs scored trajectories"
    rewards = torch.tensor([t.reward - t.kl_penalty for _, t in trajectories], dtype=torch.float64)
    evidence = GroupEvidence(rewards, [index for index, _ in trajectories], [t for _, t in trajectories])
    for t, advantage in zip(evidence.trajectories, GROUP_ESTIMATORS[cfg.kind](evidence, cfg).tolist(), strict=True):
        t.advantage = advantage


def soft(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """Every token gets its trajectory's own advantage."""
    return {t.trajectory_id: np.full(len(t.token_ids), t.advantage) for t in teaching(group)}


def hard(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """A token that d trajectories of the tree share gets the mean of their d advantages (ARPO sec. 3)."""
    taught = teaching(group)
    sums = {t.trajectory_id: np.zeros(len(t.token_ids)) for t in group.trajectories}  # by who wrote the token
    counts = {t.trajectory_id: np.zeros(len(t.token_ids)) for t in group.trajectories}
    pieces = {t.trajectory_id: written_by(t, group) for t in taught}
    for t in taught:
        for writer, start, end in pieces[t.trajectory_id]:
            sums[writer][start:end] += t.advantage
            counts[writer][start:end] += 1
    return {
        name: np.concatenate([sums[w][start:end] / counts[w][start:end] for w, start, end in parts] or [np.zeros(0)])
        for name, parts in pieces.items()
    }


TREE_CREDITS: dict[str, Callable[[Group, AdvantageConfig], dict[str, np.ndarray]]] = {"soft": soft, "hard": hard}
"""Each returns trajectory_id -> (T,) advantage of every response token, for the trajectories that teach, from the
group's tree and their `advantage` (and `reward`). A (advantage 1) and its branch B (advantage -1, forked at 2), three
tokens each: soft A [1, 1, 1], B [-1, -1, -1]; hard A [0, 0, 1], B [0, 0, -1]."""


def token_advantages(group: Group, tree: str, cfg: AdvantageConfig | None = None) -> dict[str, np.ndarray]:
    """Return TREE_CREDITS[tree] of a group. Raises ValueError for a name that is not there."""
    check_name("advantage.tree", tree, "advantages", "TREE_CREDITS")
    return TREE_CREDITS[tree](group, cfg or AdvantageConfig())


def written_by(trajectory: Trajectory, group: Group) -> list[tuple[str, int, int]]:
    """Return the pieces of the response, in order, as (trajectory_id that wrote it, start, end)."""
    by_id = {t.trajectory_id: t for t in group.trajectories}
    pieces, writer, end = [], trajectory, len(trajectory.token_ids)
    while end > 0:
        start = writer.fork_at if writer.parent_id is not None else 0
        if start < end:
            pieces.append((writer.trajectory_id, start, end))
        end = min(start, end)
        writer = by_id[writer.parent_id] if writer.parent_id is not None else writer
    return pieces[::-1]


def teaching(group: Group) -> list[Trajectory]:
    """The group's trajectories that are trained on."""
    return [t for t in group.trajectories if t.stop_reason != StopReason.ERROR]


def is_dead(group: Group) -> bool:
    """Return whether all rewards are equal, so that GRPO learns nothing. A group of one is not dead."""
    rewards = [t.reward for t in teaching(group)]
    return len(rewards) > 1 and len(set(rewards)) == 1


def num_to_sample(groups: list[Group], num_prompts: int, cfg: AdvantageConfig) -> int:
    """Return how many prompts a step samples next, after these groups of it; 0 where it has enough.

    First all `num_prompts`. Under dead_groups=resample then as many as should make up for the dead groups, by the share
    of mixed ones so far: at most `num_prompts` at once, and no more in all than cfg.max_resample allows. Whatever the
    number of ranks. 8 prompts, 2 groups of them dead -> 3
    """
    if not groups or cfg.dead_groups != "resample":
        return 0 if groups else num_prompts
    num_mixed = sum(not is_dead(group) for group in groups)
    expected = math.ceil((num_prompts - num_mixed) * len(groups) / max(num_mixed, 1))
    left = (1 + cfg.max_resample) * num_prompts - len(groups)
    return max(0, min(expected, num_prompts, left))


def groups_to_train_on(groups: list[Group], num_prompts: int, cfg: AdvantageConfig) -> list[Group]:
    """Return the groups of a step for its mini-batches; under dead_groups=resample its first mixed ones."""
    if cfg.dead_groups != "resample":
        return groups
    return [group for group in groups if not is_dead(group)][:num_prompts]


def training_trajectories(groups: list[Group], cfg: AdvantageConfig) -> list[tuple[int, Trajectory]]:
    """Return (group index, trajectory) of all that are trained on, in order: no error of ours, at least one loss token.

    Without the trajectories of dead groups, unless dead_groups=keep.
    """
    return [
        (index, t)
        for index, group in enumerate(groups)
        if cfg.dead_groups == "keep" or not is_dead(group)
        for t in teaching(group)
        if any(t.loss_mask)
    ]
