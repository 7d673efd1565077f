"""The choice of groups and trajectories to train on. Pure.

Trajectories with an infrastructure error are never trained on. advantage.dead_groups decides about dead groups.
"""

from __future__ import annotations

from arpo.options import AdvantageConfig
from arpo.trajectory import Group, Trajectory


def trained_on(group: Group) -> list[Trajectory]:
    """Return the trajectories to train on: all but those that are left out (`Trajectory.is_left_out`)."""
    return [t for t in group.trajectories if not t.is_left_out]


def is_dead(group: Group) -> bool:
    """True if all rewards are equal, so that GRPO learns nothing. Known KL penalties are subtracted first.

    A group of size 1 is never dead. A larger group is, if tool failures left at most one trajectory.
    """
    if len(group.trajectories) <= 1:
        return False
    rewards = {t.reward - t.kl_penalty for t in trained_on(group)}
    return len(rewards) <= 1


def groups_to_train_on(groups: list[Group], num_prompts: int, cfg: AdvantageConfig) -> list[Group]:
    """Return the groups of a step for its mini-batches. Under dead_groups=resample: the first mixed ones."""
    if cfg.dead_groups != "resample":
        return groups
    return [group for group in groups if not is_dead(group)][:num_prompts]


def training_trajectories(groups: list[Group], cfg: AdvantageConfig) -> list[tuple[int, Trajectory]]:
    """Return (group index, trajectory) of all trajectories to train on, in order.

    Each has at least one loss token. Unless dead_groups=keep, dead groups are left out.
    """
    chosen = []
    for index, group in enumerate(groups):
        if cfg.dead_groups != "keep" and is_dead(group):
            continue
        chosen += [(index, t) for t in trained_on(group) if any(t.loss_mask)]
    return chosen
