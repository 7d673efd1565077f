"""The choice of groups and trajectories to train on. Pure.

Trajectories with an infrastructure error are never trained on. advantage.dead_groups decides about dead groups.
"""

from __future__ import annotations

from statistics import pstdev

from arpo.options import AdvantageConfig
from arpo.trajectory import Group, Trajectory


def trained_on(group: Group) -> list[Trajectory]:
    """Return the trajectories to train on: those that are not left out (Trajectory.is_left_out)."""
    return [t for t in group.trajectories if not t.is_left_out]


def is_dead(group: Group) -> bool:
    """True if all rewards, less the KL penalties computed so far, are equal: GRPO learns nothing from them.

    A group of size 1 is never dead. A larger group is dead if at most one of its trajectories can be trained on.
    """
    if len(group.trajectories) <= 1:
        return False
    rewards = {t.reward - t.kl_penalty for t in trained_on(group)}
    return len(rewards) <= 1


def groups_to_train_on(groups: list[Group], num_prompts: int, cfg: AdvantageConfig) -> list[Group]:
    """Return the groups of a step for its mini-batches, in order.

    Under dead_groups=resample: the first `num_prompts` groups that are not dead. Under keep_variance: of these, the
    groups with the largest standard deviations of rewards (`most_spread`).
    """
    if cfg.dead_groups == "resample":
        groups = [group for group in groups if not is_dead(group)][:num_prompts]
    return groups if cfg.keep_variance == 1 else most_spread(groups, cfg.keep_variance)


def most_spread(groups: list[Group], share: float) -> list[Group]:
    """Return the fewest groups whose standard deviations of rewards add up to `share` of the sum of all groups.

    The largest come first; of two equal ones, the earlier. Groups without spread are never kept.
    Deviations [0.1, 0.5, 0, 0.4], share 0.9 -> the second and the fourth group.
    """
    spreads = [reward_spread(group) for group in groups]
    kept = set()
    missing = share * sum(spreads) * (1 - 1e-9)  # so that rounding cannot ask for one group more
    for index in sorted(range(len(groups)), key=lambda i: -spreads[i]):
        if missing <= 0:
            break
        kept.add(index)
        missing -= spreads[index]
    return [group for index, group in enumerate(groups) if index in kept]


def reward_spread(group: Group) -> float:
    """Return the standard deviation of the rewards to train on, each without its KL penalty. 0 for fewer than two."""
    rewards = [t.reward - t.kl_penalty for t in trained_on(group)]
    return pstdev(rewards) if len(rewards) > 1 else 0.0


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
