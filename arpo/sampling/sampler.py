"""The parts that all rollouts of a run share, and how a rank polls the store for the progress of the others."""

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
from arpo.selection import is_dead
from arpo.tools.base import ToolRunner
from arpo.trajectory import Group, Prompt

POLL_S = 0.05
"""Least number of seconds between two polls of the store."""
POLL_S_PER_TEAM = 2e-4
"""Seconds between two polls, for each team. A poll is two requests, so many teams send at most 10,000 a second."""
IDLE_S = 0.005
"""Pause in seconds of a rank with an idle engine, before it looks again for tools and other ranks."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A run's engine, tools and settings."""

    engine: Engine | None
    """Engine, or an object with its methods. None only if nothing has to be sampled."""
    tools: ToolRunner
    codec: Codec
    team: Team
    """The ranks that share this rank's engine."""
    log: Console
    seed: int
    rollout: RolloutConfig
    branching: BranchingConfig
    max_num_seqs: int = 256
    """engine.max_num_seqs: a team that decodes this many trajectories takes no further prompt."""
    score: Callable[[list[Group]], None] | None = None
    """Scores the trajectories of these groups that were not scored before; in a training a `Scoring`."""
    on_group: Callable[[Group, list[float]], None] | None = None
    """Called with each finished group and the seconds of its trajectories."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def new_rollout(self) -> Rollout:
        return Rollout(
            self.engine, self.tools, self.codec, cfg=self.rollout, branching=self.branching, is_mixed=self.is_mixed
        )

    def is_mixed(self, group: Group) -> bool:
        """Score the trajectories, and return True if their rewards differ. Collective within the team."""
        if self.team.is_first:
            self.score([group])
        # a single trajectory is not dead, but cannot be mixed either
        is_mixed = self.team.is_first and len(group.trajectories) > 1 and not is_dead(group)
        return self.team.broadcast_from_first(is_mixed)

    def run(self, source: Source, description: str, num_groups: int, *, is_part: bool = True) -> None:
        """Sample until the source is done, and show the progress.

        num_groups: number of groups that the source is expected to finish. is_part: False for a rollout outside of a
        training step (`Console.progress`).
        """
        total = num_groups * self.rollout.group_size
        with self.log.progress(total, description, is_part=is_part) as progress:
            drive(source, lambda: progress.at(min(source.num_finished, total)))


class StorePoller:
    """Decides when this rank polls the store, and when it gives up waiting for the other ranks."""

    def __init__(self, sampler: Sampler):
        self.clock = sampler.clock
        self.sleep = sampler.sleep
        self.every_s = max(POLL_S, POLL_S_PER_TEAM * sampler.team.num_teams)
        self.timeout = sampler.team.ranks.timeout
        self._next_poll_s = -math.inf
        self._last_work_s = self.clock()

    def is_due(self) -> bool:
        """Return True if the store should be polled now. The next poll is then due after `every_s`."""
        if self.clock() < self._next_poll_s:
            return False
        self._next_poll_s = self.clock() + self.every_s
        return True

    def make_due(self) -> None:
        """Let the next poll be due at once."""
        self._next_poll_s = -math.inf

    def note_work(self) -> None:
        """Note that this rank has something to do."""
        self._last_work_s = self.clock()

    def wait(self, seconds: float) -> None:
        """Sleep. Raises DistStoreError if this rank has had nothing to do for longer than the ranks' timeout."""
        if self.clock() - self._last_work_s > self.timeout.total_seconds():
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
    # In a run the step stands after the seed. Here 0 takes its place.
    source = Source(Rollout(engine, tools, codec, cfg=cfg, branching=branching), prompts, f"{seed}|0")
    drive(source)
    return [source.groups[index] for index in sorted(source.groups)]
