"""What all rollouts of a run share, and the waiting of one rank for the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.distributed import DistStoreError

from arpo.engine import Engine
from arpo.engine.team import Team
from arpo.log import Console
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import Codec
from arpo.rollout import Rollout
from arpo.sampling.driver import Source, drive
from arpo.tools.base import ToolRunner
from arpo.trajectory import Group, Prompt

LOOK_S, LOOK_PER_TEAM_S = 0.05, 2e-4
"""Seconds between two looks at what the other teams have found (at least, and per team): 10,000 requests a second for
the store at most, whatever the number of teams."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A run's engine, tools and settings."""

    engine: Engine | None
    """Engine, or one with its methods; None only where there is nothing to sample."""
    tools: ToolRunner
    codec: Codec
    team: Team
    """The ranks that share this rank's engine."""
    log: Console
    seed: int
    rollout: RolloutConfig
    branching: BranchingConfig
    max_num_seqs: int = 256
    """engine.max_num_seqs: trajectories that a team decodes at the same time before it takes no further prompt."""
    score: Callable[[list[Group]], None] | None = None
    """Fills the reward of all trajectories of groups that have none; in a training a `Scoring`."""
    on_group: Callable[[Group, list[float]], None] | None = None
    """Gets each group that is whole, and its trajectories' seconds."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def loop(self) -> Rollout:
        return Rollout(self.engine, self.tools, self.codec, self.rollout, self.branching)

    def run(self, source: Source, description: str, num_groups: int, *, is_part: bool = True) -> None:
        """Sample until the source is done; it expects `num_groups` groups. is_part: see `Console.progress`."""
        size = self.rollout.group_size
        with self.log.progress(num_groups * size, description, is_part=is_part) as progress:
            drive(source, lambda: progress.at(min(source.num_finished, num_groups * size)))


class Looks:
    """When a rank looks into the store, and how long it waits for the others in vain."""

    def __init__(self, sampler: Sampler):
        self.clock, self.sleep = sampler.clock, sampler.sleep
        self.every_s = max(LOOK_S, LOOK_PER_TEAM_S * sampler.team.num_teams)
        self.timeout = sampler.team.ranks.timeout
        self._next_s, self._at_work_s = -math.inf, self.clock()

    def is_due(self) -> bool:
        """Return whether to look now."""
        if self.clock() < self._next_s:
            return False
        self._next_s = self.clock() + self.every_s
        return True

    def at_once(self) -> None:
        """Have the next look be due."""
        self._next_s = -math.inf

    def worked(self) -> None:
        """Note that this rank has something to do."""
        self._at_work_s = self.clock()

    def wait(self, seconds: float) -> None:
        """Sleep. Raises DistStoreError where this rank has had nothing to do for longer than ranks wait for others."""
        if self.clock() - self._at_work_s > self.timeout.total_seconds():
            raise DistStoreError(f"the other ranks have not ended the rollout in {self.timeout}")
        self.sleep(seconds)


def rollout(
    prompts: Sequence[Prompt],
    engine: Engine,
    tools: ToolRunner,
    codec: Codec,
    cfg: RolloutConfig,
    branching: BranchingConfig,
    *,
    seed: int | str,
) -> list[Group]:
    """Sample `cfg.group_size` trajectories per prompt on this rank, in the order of prompts and paths."""
    source = Source(Rollout(engine, tools, codec, cfg, branching), prompts, f"{seed}|0")
    drive(source)
    return [source.groups[place] for place in sorted(source.groups)]
