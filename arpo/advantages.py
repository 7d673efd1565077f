"""From rewards to advantages. Pure functions, and `assign_advantages`, which fills the trajectories of a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from arpo.options import AdvantageConfig
from arpo.trajectory import Group, StopReason, Trajectory


def group_advantages(
    rewards: Tensor | Sequence[float],
    group_ids: Tensor | Sequence[Hashable],
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages (GRPO): (r - mean) / (std + eps) within each group; (N,), (N,) -> (N,).

    std is unbiased. A constant group gives zeros; a group of one has mean 0 and std 1, so it keeps its reward.
    normalize_std=False leaves out the division (Dr.GRPO).

    Rewards [1, 0, 1, 1] in one group -> [0.5, -1.5, 0.5, 0.5].
    """
    rewards = torch.as_tensor(rewards)
    if not rewards.is_floating_point():
        rewards = rewards.float()
    ids = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    assert rewards.ndim == 1 and len(rewards) == len(ids), (rewards.shape, len(ids))
    members: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(ids):
        members.setdefault(group_id, []).append(index)
    advantages = torch.empty_like(rewards)
    for indices in members.values():
        group = rewards[indices].double()
        alone = len(indices) == 1
        centred = group if alone else group - group.mean()
        if not alone and (group == group[0]).all():
            centred = torch.zeros_like(group)  # exactly: eps would blow up the rounding of the mean
        std = 1.0 if alone else group.std(unbiased=True)
        advantages[indices] = (centred / (std + eps) if normalize_std else centred).to(rewards.dtype)
    return advantages


def gae_advantages(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438); all (B, T) -> advantages, returns, zero where mask is 0.

    Only the policy's own tokens are steps: a tool result in between neither decays nor bootstraps anything. A reward on
    a mask-0 position counts for the last own token before it. returns = advantages + values.

    Rewards [0, 1], values [0.5, 0.25], gamma = lam = 1 -> advantages [0.5, 0.75], returns [1, 1].
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


def assign_advantages(groups: list[Group], cfg: AdvantageConfig) -> None:
    """Fill `trajectory.advantage` from reward - kl_penalty.

    A trajectory that ended in an error of ours teaches nothing: it keeps None, and its group's mean ignores it.
    """
    trajectories = [(index, t) for index, group in enumerate(groups) for t in teaching(group)]
    assert all(t.reward is not None for _, t in trajectories), "assign_advantages needs scored trajectories"
    rewards = torch.tensor([t.reward - t.kl_penalty for _, t in trajectories], dtype=torch.float64)
    advantages = group_advantages(rewards, [i for i, _ in trajectories], normalize_std=cfg.normalize_std)
    for (_, t), advantage in zip(trajectories, advantages.tolist(), strict=True):
        t.advantage = advantage


def token_advantages(group: Group, tree: Literal["soft", "hard"]) -> dict[str, np.ndarray]:
    """trajectory_id -> (T,) advantage of every response token, of the trajectories that teach.

    soft: the trajectory's own at every token. hard: a token that d trajectories of the tree share gets the mean of
    their d advantages (ARPO sec. 3). A (advantage 1) and its branch B (advantage -1, forked at 2), three tokens each:
    soft A [1, 1, 1], B [-1, -1, -1]; hard A [0, 0, 1], B [0, 0, -1].
    """
    taught = teaching(group)
    if tree == "soft":
        return {t.trajectory_id: np.full(len(t.token_ids), t.advantage) for t in taught}
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


def written_by(trajectory: Trajectory, group: Group) -> list[tuple[str, int, int]]:
    """[(trajectory_id, start, end)], in order: whose tokens the response consists of, by the chain of branches."""
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
    """True where all rewards are equal, so that GRPO learns nothing. A group of one is not dead."""
    rewards = [t.reward for t in teaching(group)]
    return len(rewards) > 1 and len(set(rewards)) == 1
