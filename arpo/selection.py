"""The choice of groups and trajectories to train on: no errors of ours, and dead groups as the options say. Pure."""

from __future__ import annotations

from arpo.options import AdvantageConfig
from arpo.trajectory import Group, Trajectory


def teaching(group: Group) -> list[Trajectory]:
    """The group's trajectories that are trained on."""
    return [t for t in group.trajectories if not t.is_left_out]


def is_dead(group: Group) -> bool:
    """Return whether all rewards (less KL penalties, once these are known) are equal, so that GRPO learns nothing.

    A group of one is not dead, but one of which tool failures left one or none is.
    """
    return len(group.trajectories) > 1 and len({t.reward - t.kl_penalty for t in teaching(group)}) <= 1


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
