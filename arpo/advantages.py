"""Estimators and tree credits, which turn rewards into advantages, and the choice of the trajectories to train on.

A new estimator that compares trajectories with each other is one function, in a file of yours
(advantage.kind=FILE.py:NAME) or with one line in GROUP_ESTIMATORS. One that compares tokens with a critic's values is
one line in CRITIC_ESTIMATORS (a critic is loaded for these, and for no others). A new way to share a trajectory's
advantage among its tokens is one function, in a file of yours (advantage.tree) or with one line in TREE_CREDITS.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from arpo.config.named import check_name, is_own
from arpo.config.returned import ask, entries, numbers
from arpo.options import AdvantageConfig
from arpo.selection import trained_on
from arpo.trajectory import Group, Trajectory


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
    """Return `group_advantages`; normalize=none is Dr.GRPO, batch `batch_advantages`."""
    if cfg.normalize == "batch":
        return batch_advantages(evidence, with_dead_groups=cfg.dead_groups == "keep")
    return group_advantages(evidence.rewards, evidence.group_ids, normalize_std=cfg.normalize == "group")


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


def batch_advantages(evidence: GroupEvidence, *, with_dead_groups: bool) -> Tensor:
    """(reward - its group's mean - m) / (s + 1e-8), m and s over all loss tokens of the step on all ranks. -> (N,)

    This is REINFORCE++ with baseline (arXiv 2501.03262; with one trajectory per prompt, REINFORCE++). A trajectory
    enters m and s once for each of its loss tokens; s is unbiased. `with_dead_groups` False: groups whose rewards are
    all equal, which are not trained on then, do not enter them.

    Rewards [1, 0] and [2, 0] in two groups, one loss token each -> centred [0.5, -0.5] and [1, -1], m = 0, s = 0.913 ->
    [0.548, -0.548] and [1.095, -1.095].
    """
    centred = group_advantages(evidence.rewards, evidence.group_ids, normalize_std=False)
    num_tokens = torch.tensor([t.num_sampled_tokens for t in evidence.trajectories], dtype=centred.dtype)
    for indices in members(evidence.group_ids):
        if not with_dead_groups and len(indices) > 1 and not centred[indices].any():
            num_tokens[indices] = 0
    mean = (num_tokens * centred).sum() / num_tokens.sum().clamp(min=1)
    variance = (num_tokens * (centred - mean).square()).sum() / (num_tokens.sum() - 1).clamp(min=1)
    return (centred - mean) / (variance.sqrt() + 1e-8)


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

    A trajectory that ended in an error of ours keeps None, and its group's mean ignores it. One that is left alone by
    such errors gets 0: its reward would be a gradient without a baseline.
    """
    trajectories = []
    for index, group in enumerate(groups):
        taught = trained_on(group)
        if len(taught) == 1 < len(group.trajectories):
            taught[0].advantage = 0.0
        else:
            trajectories += [(index, t) for t in taught]
    assert all(t.reward is not None for _, t in trajectories), "assign_advantages needs scored trajectories"
    rewards = torch.tensor([t.reward - t.kl_penalty for _, t in trajectories], dtype=torch.float64)
    seen = [t.as_seen() if is_own(cfg.kind) else t for _, t in trajectories]
    evidence = GroupEvidence(rewards, [index for index, _ in trajectories], seen)
    advantages = ask("advantage.kind", cfg.kind, GROUP_ESTIMATORS, evidence, cfg)
    advantages = numbers(advantages, f"advantage.kind={cfg.kind}: the advantages", len(trajectories)).tolist()
    for (_, t), advantage in zip(trajectories, advantages, strict=True):
        t.advantage = advantage


def soft(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """Every token gets its trajectory's own advantage."""
    return {t.trajectory_id: np.full(len(t.token_ids), t.advantage) for t in trained_on(group)}


def hard(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """A token that d trajectories of the tree share gets the mean of their d advantages (ARPO sec. 3)."""
    taught = trained_on(group)
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


def node(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """A token gets the value of its turn, see `turn_values` (AT2PO, arXiv 2601.04767: `child_mean`, `node_value`)."""
    paths, values = turn_values(group, cfg)
    return by_turn(group, {name: [values[turn] for turn in path[1:-1]] for name, path in paths.items()})


def node_parent(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """A token gets its turn's value less that of the turn before, of a first turn less the prompt's (AT2PO).

    So what was decided before counts neither for nor against a turn. One without siblings, which has nothing to be
    compared with, gets 0: a token learns only in the first turn, and in turns in front of which the tree forks.
    """
    paths, values = turn_values(group, cfg)
    return by_turn(
        group, {name: [values[b] - values[a] for a, b in pairwise(path[:-1])] for name, path in paths.items()}
    )


def inter_intra(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """Every token gets its trajectory's z among all of the prompt, plus its z in its own tree: among the trajectories
    that descend from the same root (Tree-GRPO, arXiv 2509.21240). A tree of one trajectory adds 0."""
    taught = trained_on(group)
    rewards = np.array([t.reward - t.kl_penalty for t in taught])
    credits = z_scores(rewards, cfg, ddof=1)
    for tree in members([t.trajectory_id.partition(".")[0] for t in taught]):
        credits[tree] += z_scores(rewards[tree], cfg, ddof=1)
    return {t.trajectory_id: np.full(len(t.token_ids), credit) for t, credit in zip(taught, credits, strict=True)}


TREE_CREDITS: dict[str, Callable[[Group, AdvantageConfig], dict[str, np.ndarray]]] = {
    "soft": soft,
    "hard": hard,
    "node": node,
    "node_parent": node_parent,
    "inter_intra": inter_intra,
}
"""Each returns trajectory_id -> (T,) advantage of every response token, for the trajectories that teach, from the
group's tree and their `advantage` (or `reward`). A (reward 1) and its branch B (reward 0, forked at 2), three tokens
and two turns each, advantages 1 and -1: soft A [1, 1, 1], B [-1, -1, -1]; hard and node A [0, 0, 1], B [0, 0, -1];
node_parent the same; inter_intra A [1.41, 1.41, 1.41], B the negative."""
FROM_REWARDS = {"node", "node_parent", "inter_intra"}
"""Tree credits that normalise the rewards themselves: they go with kind=grpo and normalize=group only."""


def token_advantages(group: Group, tree: str, cfg: AdvantageConfig | None = None) -> dict[str, np.ndarray]:
    """Return the tree credit of a group by its name. Raises ValueError for a name that is not there, and UserError
    where one of the user's does not return a finite number for each token of each trajectory that teaches."""
    check_name("advantage.tree", tree, "advantages", "TREE_CREDITS")
    taught, what = trained_on(group), f"advantage.tree={tree}: the credits"
    seen = group.as_seen() if is_own(tree) else group
    by_id = ask("advantage.tree", tree, TREE_CREDITS, seen, cfg or AdvantageConfig())
    found = entries(by_id, f"{what} of prompt {group.prompt.prompt_id}", [t.trajectory_id for t in taught])
    return {
        t.trajectory_id: numbers(
            values, f"{what} of the tokens of prompt {t.prompt_id}, trajectory {t.trajectory_id}", len(t.token_ids)
        )
        for t, values in zip(taught, found, strict=True)
    }


Turns = list[tuple[str, int]]
"""A path through a group's tree. A turn's name is (id of the trajectory that wrote it, its first response position)."""
PROMPT, LEAF = ("", 0), -1


def turn_values(group: Group, cfg: AdvantageConfig) -> tuple[dict[str, Turns], dict[tuple[str, int], float]]:
    """Return the path of each trajectory that teaches, and the value V of everything on these paths.

    A path leads from the prompt over the trajectory's turns to its leaf, (trajectory_id, LEAF). V of a leaf is the z of
    its reward among the prompt's leaves, with the population's standard deviation; V of a turn, and of the prompt, is
    the mean over its children, however many leaves are below each.
    """
    taught = trained_on(group)
    paths = {t.trajectory_id: [PROMPT, *turns_of(t, group), (t.trajectory_id, LEAF)] for t in taught}
    leaves = z_scores(np.array([t.reward - t.kl_penalty for t in taught]), cfg, ddof=0)
    values = {(t.trajectory_id, LEAF): float(z) for t, z in zip(taught, leaves, strict=True)}
    children: dict[tuple[str, int], Turns] = {}
    for path in paths.values():
        for parent, child in pairwise(path):
            if child not in children.setdefault(parent, []):
                children[parent].append(child)

    def fill(name: tuple[str, int]) -> float:
        if name not in values:
            values[name] = sum(map(fill, children[name])) / len(children[name])
        return values[name]

    for path in paths.values():
        fill(path[0])
    return paths, values


def turns_of(trajectory: Trajectory, group: Group) -> Turns:
    """Return the trajectory's turns, in order: trajectories that share a turn have the same name for it."""
    pieces = written_by(trajectory, group)
    return [
        (next((writer for writer, _, end in pieces if turn.start < end), trajectory.trajectory_id), turn.start)
        for turn in trajectory.turns
    ]


def by_turn(group: Group, credits: dict[str, list[float]]) -> dict[str, np.ndarray]:
    """Give each turn's credit to its tokens, and to the tool result behind them. trajectory_id -> (T,)"""
    tokens = {}
    for t in trained_on(group):
        assert t.turns and t.turns[0].start == 0, t.trajectory_id
        lengths = np.diff([*(turn.start for turn in t.turns), len(t.token_ids)])
        tokens[t.trajectory_id] = np.repeat(np.asarray(credits[t.trajectory_id], dtype=float), lengths)
    return tokens


def z_scores(rewards: np.ndarray, cfg: AdvantageConfig, *, ddof: int) -> np.ndarray:
    """(x - mean) / (std + 1e-6), std over N - ddof; with normalize=none only x - mean; equal rewards give 0."""
    if not len(rewards) or (rewards == rewards[0]).all():
        return np.zeros(len(rewards))  # exactly: eps would blow up the rounding of the mean
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=ddof) + 1e-6) if cfg.normalize == "group" else centred


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
