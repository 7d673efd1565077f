"""The choice of groups and trajectories to train on: no errors of ours, and dead groups as the options say. Pure."""

from __future__ import annotations

import math

from arpo.options import AdvantageConfig, RolloutConfig
from arpo.trajectory import Group, Trajectory


def teaching(group: Group) -> list[Trajectory]:
    """The group's trajectories that are trained on."""
    return [t for t in group.trajectories if not t.is_left_out]


def is_dead(group: Group) -> bool:
    """Return whether all rewards (less KL penalties, once these are known) are equal, so that GRPO learns nothing.

    A group of one is not dead, but one of which tool failures left one or none is.
    """
    return len(group.trajectories) > 1 and len({t.reward - t.kl_penalty for t in teaching(group)}) <= 1


def refills_from_queue(cfg: AdvantageConfig, rollout: RolloutConfig) -> bool:
    """Return whether prompts are pulled until enough groups of a step are mixed, and not sampled in rounds."""
    return cfg.dead_groups == "resample" and rollout.dispatch == "pull"


def num_to_sample(
    groups: list[Group], num_prompts: int, cfg: AdvantageConfig, rollout: RolloutConfig | None = None
) -> int:
    """Return how many prompts a step samples next, after these groups of it; 0 where it has enough.

    First all `num_prompts`. Under dead_groups=resample then as many as should make up for the dead groups, by the share
    of mixed ones so far: at most `num_prompts` at once, and no more in all than cfg.max_resample allows. Whatever the
    number of ranks. 8 prompts, 2 groups of them dead -> 3. A queue gets all at once that the step may need, and stops
    by itself where it has enough.
    """
    if rollout and refills_from_queue(cfg, rollout):
        return 0 if groups else (1 + cfg.max_resample) * num_prompts
    if not groups or cfg.dead_groups != "resample":
        return 0 if groups else num_prompts
    num_mixed = sum(not is_dead(group) for group in groups)
    expected = math.ceil((num_prompts - num_mixed) * len(groups) / max(num_mixed, 1))
    left = (1 + cfg.max_resample) * num_prompts - len(groups)
    return max(0, min(expected, num_prompts, left))


def until_full(groups: list[Group | None], num_prompts: int) -> list[Group]:
    """Return the first groups, up to the one that is the `num_prompts`-th mixed one; all where there are too few.

    Groups in the order of their prompts; None for one that was cut off, which comes after all that are needed.
    """
    num_mixed = 0
    for number, group in enumerate(groups, start=1):
        num_mixed += not is_dead(group)
        if num_mixed == num_prompts:
            return groups[:number]
    return groups


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
