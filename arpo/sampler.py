"""A run's side of the rollout: its engine, tools and seed, this rank's share of the prompts, the progress bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arpo.engine import Engine
from arpo.engine.team import Team
from arpo.log import RunLog
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import Codec
from arpo.rollout import rollout
from arpo.tools.base import ToolRunner
from arpo.trajectory import Group, Prompt


@dataclass(frozen=True)
class Sampler:
    """Everything that stays the same from one rollout of a run to the next."""

    engine: Engine | None
    """Or a ServerEngine in its place; None only where there is nothing to sample."""
    tools: ToolRunner
    codec: Codec
    team: Team
    """The ranks that share this rank's engine."""
    log: RunLog
    seed: int

    def __call__(
        self,
        prompts: list[Prompt],
        cfg: RolloutConfig,
        branching: BranchingConfig,
        *,
        description: str,
        step: int = 0,
        is_part: bool = True,
        on_group: Callable[[Group, list[float]], None] | None = None,
        max_at_once: int = 0,
    ) -> list[Group]:
        """Sample this team's share of `prompts`, which all ranks are given alike; `rollout` explains the rest.

        `description` stands before the progress bar; `is_part`: of a step that has a progress of its own. Returns the
        share's groups in the order of `prompts`, unscored.
        """
        share = self.team.share(prompts)
        with self.log.progress(len(share) * cfg.group_size, description, is_part=is_part) as progress:
            return rollout(
                share, self.engine, self.tools, self.codec, cfg, branching,
                seed=self.seed, step=step, on_progress=progress.at,
                on_group=on_group, max_at_once=max_at_once,
            )  # fmt: skip
