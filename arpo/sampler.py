"""The sampler of a run: what rollouts need besides prompts and settings, and this rank's share of the prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arpo.engine import Engine
from arpo.engine.team import Team
from arpo.log import Console
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import Codec
from arpo.retrospective import NEED_REWARDS
from arpo.rollout import rollout
from arpo.tools.base import ToolRunner
from arpo.trajectory import Group, Prompt, SignalStatistics


@dataclass(frozen=True)
class Sampler:
    """A run's engine, tools and seed, with which `rollout` samples this rank's share of the prompts."""

    engine: Engine | None
    """Engine or ServerEngine; None only where there is nothing to sample."""
    tools: ToolRunner
    codec: Codec
    team: Team
    """The ranks that share this rank's engine."""
    log: Console
    seed: int
    score: Callable[[list[Group]], None] | None = None
    """Fills the reward of all trajectories of groups that have none; only selectors of NEED_REWARDS need it here. In a
    training a `Scoring`."""

    def __call__(
        self,
        prompts: list[Prompt],
        cfg: RolloutConfig,
        branching: BranchingConfig,
        *,
        description: str,
        step: int | str = 0,
        statistics: SignalStatistics | None = None,
        is_part: bool = True,
        on_group: Callable[[Group, list[float]], None] | None = None,
        max_at_once: int = 0,
    ) -> list[Group]:
        """Return this team's share of the groups of `prompts`, in their order and not all scored; see `rollout`.

        `description` stands before the progress bar; `is_part`: within a step that has a progress of its own.
        """
        share = self.team.share(prompts)
        with self.log.progress(len(share) * cfg.group_size, description, is_part=is_part) as progress:
            return rollout(
                share, self.engine, self.tools, self.codec, cfg, branching,
                seed=self.seed, step=step, statistics=statistics,
                score=self.score_alike if branching.selector in NEED_REWARDS else None, on_progress=progress.at,
                on_group=on_group, max_at_once=max_at_once,
            )  # fmt: skip

    def score_alike(self, groups: list[Group]) -> None:
        """Score on the team's first rank and tell the others, since all of them must fork alike. Collective."""
        trajectories = [t for group in groups for t in group.trajectories]
        if self.team.is_first:
            self.score(groups)
        scored = self.team.from_first([(t.reward, t.reward_parts, t.reward_reason) for t in trajectories])
        for t, values in zip(trajectories, scored, strict=True):
            t.reward, t.reward_parts, t.reward_reason = values
