"""From rewards to advantages: group estimators, critic estimators, and tree credits.

A group estimator compares the trajectories of a group with each other. A critic estimator compares tokens with a
critic's values. A tree credit gives each token its advantage, from the trajectories' advantages or from their
rewards.

To add an estimator or a tree credit, write a function:

    group estimator     in your own file (advantage.kind=FILE.py:NAME), or here with a line in GROUP_ESTIMATORS
    critic estimator    here, with a line in CRITIC_ESTIMATORS. The run then loads a critic
    tree credit         in your own file (advantage.tree=FILE.py:NAME), or here with a line in TREE_CREDITS
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from arpo.config.named import check_name, is_own
from arpo.config.returned import call_named, checked_numbers, checked_values
from arpo.options import AdvantageConfig
from arpo.selection import trained_on
from arpo.trajectory import Group, Trajectory

# ----------------------------------------------------------------------------------------------------- group estimators


@dataclass(frozen=True)
class GroupEvidence:
    """Everything that a group estimator may look at: N trajectories of a step, of all ranks.

    With advantage.dead_groups=drop the trajectories of dead groups are among them, although they are not trained on.
    Trajectories that are left out (after an infrastructure error, or because a user's reward has no value) are not, and
    neither is the only one left of a group.
    """

    rewards: Tensor
    """(N,) float64, each trajectory's reward minus its KL penalty (loss.kl_in=reward)."""
    group_ids: list[int]
    """(N,) index of each trajectory's group."""
    trajectories: list[Trajectory]
    """(N,)"""


def grpo(evidence: GroupEvidence, cfg: AdvantageConfig) -> Tensor:
    """Return each trajectory's advantage, (N,): GRPO, Dr.GRPO (normalize=none), or REINFORCE++ (normalize=batch)."""
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

    std is unbiased. A constant group gives zeros. A group of size 1 counts as mean 0 and std 1, so it keeps its reward.
    Rewards [1, 0, 1, 1] in one group -> [0.5, -1.5, 0.5, 0.5].
    """
    rewards = torch.as_tensor(rewards)
    if not rewards.is_floating_point():
        rewards = rewards.float()
    if isinstance(group_ids, Tensor):
        group_ids = group_ids.tolist()
    advantages = torch.empty_like(rewards)
    for indices in indices_by_group(group_ids):
        group = rewards[indices].double()
        if len(indices) == 1:
            centred = group
            std = 1.0
        else:
            centred = group - group.mean()
            std = group.std(unbiased=True)
            if (group == group[0]).all():
                # Exactly 0: callers test for 0 (drop_if_no_gradient), and the mean may have a rounding error.
                centred = torch.zeros_like(group)
        advantages[indices] = (centred / (std + eps) if normalize_std else centred).to(rewards.dtype)
    return advantages


def batch_advantages(evidence: GroupEvidence, *, with_dead_groups: bool) -> Tensor:
    """(reward - its group's mean - m) / (s + 1e-8), m and s over all loss tokens of the step on all ranks. -> (N,)

    This is REINFORCE++ with baseline (arXiv 2501.03262; with one trajectory per prompt, REINFORCE++). A trajectory
    counts in m and s once per loss token; s is unbiased. With `with_dead_groups` False, groups of equal rewards do not
    count in m and s, since they are not trained on.

    Rewards [1, 0] and [2, 0] in two groups, one loss token each -> centred [0.5, -0.5] and [1, -1], m = 0, s = 0.913 ->
    [0.548, -0.548] and [1.095, -1.095].
    """
    centred = group_advantages(evidence.rewards, evidence.group_ids, normalize_std=False)
    num_tokens = torch.tensor([t.num_sampled_tokens for t in evidence.trajectories], dtype=centred.dtype)
    for indices in indices_by_group(evidence.group_ids):
        if not with_dead_groups and len(indices) > 1 and not centred[indices].any():
            num_tokens[indices] = 0
    mean = (num_tokens * centred).sum() / num_tokens.sum().clamp(min=1)
    variance = (num_tokens * (centred - mean).square()).sum() / (num_tokens.sum() - 1).clamp(min=1)
    return (centred - mean) / (variance.sqrt() + 1e-8)


def indices_by_group(group_ids: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of each group, in the order in which groups first occur. ["a", "b", "a"] -> [[0, 2], [1]]"""
    indices: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        indices.setdefault(group_id, []).append(index)
    return list(indices.values())


GROUP_ESTIMATORS: dict[str, Callable[[GroupEvidence, AdvantageConfig], Tensor]] = {
    "grpo": grpo,
}
"""Each function returns an advantage for each trajectory, (N,)."""


def assign_advantages(groups: list[Group], cfg: AdvantageConfig) -> None:
    """Fill `trajectory.advantage` with the group estimator `cfg.kind`.

    A trajectory that is left out (`trained_on`) keeps None, and its group's mean ignores it. The only one left of a
    larger group gets 0: its reward would be a gradient without a baseline.
    """
    trajectories: list[Trajectory] = []
    group_ids: list[int] = []
    for index, group in enumerate(groups):
        trained = trained_on(group)
        if len(trained) == 1 < len(group.trajectories):
            trained[0].advantage = 0.0
            continue
        trajectories += trained
        group_ids += [index] * len(trained)
    assert all(t.reward is not None for t in trajectories), "assign_advantages needs scored trajectories"
    rewards = torch.tensor([t.reward - t.kl_penalty for t in trajectories], dtype=torch.float64)
    # A custom estimator gets copies, with NaN for the logprobs of tool results.
    visible = [t.for_custom_code() for t in trajectories] if is_own(cfg.kind) else trajectories
    evidence = GroupEvidence(rewards, group_ids, visible)
    advantages = call_named("advantage.kind", cfg.kind, GROUP_ESTIMATORS, evidence, cfg)
    advantages = checked_numbers(advantages, f"advantage.kind={cfg.kind}: the advantages", len(trajectories)).tolist()
    for t, advantage in zip(trajectories, advantages, strict=True):
        t.advantage = advantage


# ---------------------------------------------------------------------------------------------------- critic estimators


@dataclass(frozen=True)
class CriticEvidence:
    """Everything that an estimator with a critic may look at: B trajectories of T response tokens."""

    rewards: Tensor
    """(B, T) the trajectory's reward at its last loss token, 0 at other tokens; minus each token's KL penalty."""
    values: Tensor
    """(B, T) the critic's values before the update."""
    mask: Tensor
    """(B, T) bool, True where the policy sampled the token."""


def gae(evidence: CriticEvidence, cfg: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """PPO's advantages and returns: `gae_advantages`."""
    return gae_advantages(evidence.rewards, evidence.values, evidence.mask, gamma=cfg.gamma, lam=cfg.lam)


def gae_advantages(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438); returns = advantages + values. All (B, T), 0 off the mask.

    Only sampled tokens (mask 1) are steps; tool results are skipped. A reward on a mask-0 position counts for the last
    sampled token before it. Rewards [0, 1], values [0.5, 0.25], gamma = lam = 1 -> [0.5, 0.75], returns [1, 1].
    """
    assert token_rewards.shape == values.shape == mask.shape, (token_rewards.shape, values.shape, mask.shape)
    sampled = mask.bool()
    # From the last token to the first. Each variable is (B,) and belongs to the first sampled token after t.
    next_value = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(next_value)
    late_reward = torch.zeros_like(next_value)  # rewards of the mask-0 positions just after t
    columns = []
    for t in reversed(range(values.shape[1])):
        reward = late_reward + token_rewards[:, t]
        delta = reward + gamma * next_value - values[:, t]
        advantage = torch.where(sampled[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(sampled[:, t], values[:, t], next_value)
        late_reward = torch.where(sampled[:, t], 0.0, reward)
        columns.append(torch.where(sampled[:, t], advantage, 0.0))
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, torch.where(sampled, advantages + values, 0.0)


CRITIC_ESTIMATORS: dict[str, Callable[[CriticEvidence, AdvantageConfig], tuple[Tensor, Tensor]]] = {
    "gae": gae,
}
"""Each function gives (advantages, returns), (B, T) each. The advantages are whitened afterwards; the returns are the
critic's targets."""


# --------------------------------------------------------------------------------------------------------- tree credits


def soft(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """Every token gets its trajectory's advantage."""
    return {t.trajectory_id: np.full(len(t.token_ids), t.advantage) for t in trained_on(group)}


def hard(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """A token that d trajectories of the tree share gets the mean of their d advantages (ARPO sec. 3)."""
    trained = trained_on(group)
    # Sum and number of advantages for each token, stored with the trajectory that wrote the token.
    sums = {t.trajectory_id: np.zeros(len(t.token_ids)) for t in group.trajectories}
    counts = {t.trajectory_id: np.zeros(len(t.token_ids)) for t in group.trajectories}
    spans = {t.trajectory_id: written_by(t, group) for t in trained}
    for t in trained:
        for writer, start, end in spans[t.trajectory_id]:
            sums[writer][start:end] += t.advantage
            counts[writer][start:end] += 1
    credits = {t.trajectory_id: np.zeros(len(t.token_ids)) for t in trained}
    for t in trained:
        for writer, start, end in spans[t.trajectory_id]:
            credits[t.trajectory_id][start:end] = sums[writer][start:end] / counts[writer][start:end]
    return credits


def written_by(trajectory: Trajectory, group: Group) -> list[tuple[str, int, int]]:
    """Return the spans of the response, in order, as (id of the trajectory that wrote the span, start, end).

    Branch "0.0" has 3 tokens, and left "0" at 2: [("0", 0, 2), ("0.0", 2, 3)].
    """
    by_id = {t.trajectory_id: t for t in group.trajectories}
    spans = []
    writer = trajectory
    end = len(trajectory.token_ids)
    while end > 0:  # from the end of the response up the chain of parents, to the root (fork_at 0)
        # Otherwise the branch left within tokens that `writer` inherited itself.
        if writer.fork_at < end:
            spans.append((writer.trajectory_id, writer.fork_at, end))
            end = writer.fork_at
        writer = by_id.get(writer.parent_id)
    return spans[::-1]


def node(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """A token gets the value of its turn, see `node_values` (AT2PO, arXiv 2601.04767: node_value, child_mean)."""
    paths, values = node_values(group, cfg)
    # [1:-1]: without the prompt and the leaf
    credits = {trajectory_id: [values[turn] for turn in path[1:-1]] for trajectory_id, path in paths.items()}
    return turn_to_token_credits(group, credits)


def node_parent(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """A token gets its turn's value minus the value of the turn before; in the first turn, minus the prompt's (AT2PO).

    So earlier decisions count neither for nor against a turn. A turn without siblings gets 0, since it has nothing to
    be compared with: tokens learn only in the first turn, and in turns directly after a fork of the tree.
    """
    paths, values = node_values(group, cfg)
    credits = {}
    for trajectory_id, path in paths.items():
        without_leaf = path[:-1]
        credits[trajectory_id] = [values[turn] - values[before] for before, turn in pairwise(without_leaf)]
    return turn_to_token_credits(group, credits)


TreeNode = tuple[str, int]
"""Name of a turn in the group's tree: (id of the trajectory that sampled the turn, the first response position)."""
PROMPT: TreeNode = ("", 0)
"""Stands for the prompt, the start of every path."""
LEAF = -1
"""(trajectory_id, LEAF) stands for the trajectory's end."""


def node_values(group: Group, cfg: AdvantageConfig) -> tuple[dict[str, list[TreeNode]], dict[TreeNode, float]]:
    """Return trajectory_id -> path for the trajectories that are trained on, and the value of each point of a path.

    A path leads from PROMPT over the trajectory's turns to its leaf, (trajectory_id, LEAF). Branch B of A, forked at 2:
    A's path is [PROMPT, ("A", 0), ("A", 2), ("A", LEAF)], and B's is [PROMPT, ("A", 0), ("B", 2), ("B", LEAF)].

    The value of a leaf is the z of its reward among the group's leaves, with the population's standard deviation. The
    value of a turn, or of the prompt, is the mean over its children; each child counts once, whatever the number of
    leaves below it.
    """
    trained = trained_on(group)
    paths = {t.trajectory_id: [PROMPT, *turn_nodes(t, group), (t.trajectory_id, LEAF)] for t in trained}
    leaf_values = z_scores(np.array([t.reward - t.kl_penalty for t in trained]), cfg, ddof=0)
    values = {(t.trajectory_id, LEAF): float(z) for t, z in zip(trained, leaf_values, strict=True)}
    children: dict[TreeNode, list[TreeNode]] = {}
    for path in paths.values():
        for parent, child in pairwise(path):
            if child not in children.setdefault(parent, []):
                children[parent].append(child)

    def fill(node: TreeNode) -> float:
        if node not in values:
            values[node] = sum(map(fill, children[node])) / len(children[node])
        return values[node]

    if trained:
        fill(PROMPT)
    return paths, values


def turn_nodes(trajectory: Trajectory, group: Group) -> list[TreeNode]:
    """Return the trajectory's turns, in order. Trajectories that share a turn get the same name for it."""
    spans = written_by(trajectory, group)
    turns = []
    for turn in trajectory.turns:
        # The default is for a turn without tokens at the end of the response.
        writer = next((writer for writer, _, end in spans if turn.start < end), trajectory.trajectory_id)
        turns.append((writer, turn.start))
    return turns


def turn_to_token_credits(group: Group, credits: dict[str, list[float]]) -> dict[str, np.ndarray]:
    """Give each turn's credit to the turn's tokens and to the following tool result. Return trajectory_id -> (T,)."""
    tokens = {}
    for t in trained_on(group):
        assert t.turns and t.turns[0].start == 0, t.trajectory_id
        lengths = np.diff([*(turn.start for turn in t.turns), len(t.token_ids)])
        tokens[t.trajectory_id] = np.repeat(np.asarray(credits[t.trajectory_id], dtype=float), lengths)
    return tokens


def inter_intra(group: Group, cfg: AdvantageConfig) -> dict[str, np.ndarray]:
    """Every token gets its trajectory's z (`z_scores`) in the group, plus its z among the trajectories of the same root
    (Tree-GRPO, arXiv 2509.21240). A root without branches adds 0."""
    trained = trained_on(group)
    rewards = np.array([t.reward - t.kl_penalty for t in trained])
    credits = z_scores(rewards, cfg, ddof=1)
    # branch "0.1" of root "0": the part before the first dot is the root's id
    root_ids = [t.trajectory_id.partition(".")[0] for t in trained]
    for indices in indices_by_group(root_ids):
        credits[indices] += z_scores(rewards[indices], cfg, ddof=1)
    return {t.trajectory_id: np.full(len(t.token_ids), credit) for t, credit in zip(trained, credits, strict=True)}


def z_scores(rewards: np.ndarray, cfg: AdvantageConfig, *, ddof: int) -> np.ndarray:
    """(x - mean) / (std + 1e-6), std over N - ddof; with normalize=none only x - mean; equal rewards give 0."""
    if not len(rewards) or (rewards == rewards[0]).all():
        return np.zeros(len(rewards))  # exactly 0, as in `group_advantages`
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=ddof) + 1e-6) if cfg.normalize == "group" else centred


TREE_CREDITS: dict[str, Callable[[Group, AdvantageConfig], dict[str, np.ndarray]]] = {
    "soft": soft,
    "hard": hard,
    "node": node,
    "node_parent": node_parent,
    "inter_intra": inter_intra,
}
"""Each function returns trajectory_id -> (T,) advantage of every response token, for all trajectories that are trained
on. The input is the group's tree, with the `advantage` or `reward` of each trajectory.

Example: A (reward 1) and its branch B (reward 0, forked at 2), three tokens and two turns each, advantages 1 and -1.
soft: A [1, 1, 1], B [-1, -1, -1]. hard, node and node_parent: A [0, 0, 1], B [0, 0, -1].
inter_intra: A [1.41, 1.41, 1.41], B the negative."""
FROM_REWARDS = {"node", "node_parent", "inter_intra"}
"""Tree credits that normalise the rewards themselves. They need advantage.kind=grpo and normalize=group or none."""


def token_advantages(group: Group, tree: str, cfg: AdvantageConfig | None = None) -> dict[str, np.ndarray]:
    """Return trajectory_id -> (T,) advantages of the tokens, from the tree credit of this name.

    Raises ValueError for an unknown name, and UserError if a custom tree credit does not return a finite number for
    each token of each trajectory that is trained on.
    """
    check_name("advantage.tree", tree, "advantages", "TREE_CREDITS")
    visible = group.for_custom_code() if is_own(tree) else group
    returned = call_named("advantage.tree", tree, TREE_CREDITS, visible, cfg or AdvantageConfig())

    trained = trained_on(group)
    subject = f"advantage.tree={tree}: the credits of"
    trajectory_ids = [t.trajectory_id for t in trained]
    by_trajectory = checked_values(returned, f"{subject} prompt {group.prompt.prompt_id}", trajectory_ids)
    credits = {}
    for t, values in zip(trained, by_trajectory, strict=True):
        subject_of_tokens = f"{subject} the tokens of prompt {t.prompt_id}, trajectory {t.trajectory_id}"
        credits[t.trajectory_id] = checked_numbers(values, subject_of_tokens, len(t.token_ids))
    return credits
