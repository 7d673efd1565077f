"""Groups that are carried from step to step, so that no step waits for its slowest trajectory (partial rollouts).

    step 1   begins groups until the engine is full, and goes on until N = data.num_prompts_per_step groups are whole
             over all ranks; the others stay: their requests are taken back from the engine, their tool calls go on
    update   on the N whole groups that were drawn first; weight sync
    step 2   the engine gets all unfinished turns again, with their tokens as the prompt, and new groups beside them

No prompt is dropped or begun anew, however long it takes: a group that has been carried for `rollout.carry_over` steps
is waited for. At most 2 N groups are begun and not trained on yet, so at most N are older than the step that runs: all
that are whole at its beginning are trained on at its end.

A token that an earlier step sampled came from an older policy. `Trajectory.versions` says which, the rollout's logprobs
are that policy's, and the rollout correction (TIS or MIS) weighs each token by how far it is from the policy before the
update.

    who ends a step: every rank counts its whole groups in the process group's store, and looks there now and then; what
    is trained on is decided afterwards by all ranks together, from the numbers of all whole groups
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from arpo.growing import GroupState
from arpo.options import BranchingConfig, RolloutConfig
from arpo.retrospective import NEED_REWARDS
from arpo.rollout import Loop
from arpo.sampler import Sampler
from arpo.trajectory import Group, Metrics, Prompt, SignalStatistics

LOOK_S, LOOK_PER_TEAM_S = 0.05, 2e-4
"""Seconds between two looks into the store (at least, and per team): 10,000 requests a second for it at most."""
IDLE_S = 0.005
"""Pause of a rank that has nothing to do until a tool, or another rank, is ready."""
DUE = 1 << 32
"""What a group that had to become whole adds to the store's counter, in which each whole group counts 1."""


@dataclass
class Carried:
    """A group that this rank has begun, and that no step was trained on yet."""

    number: int
    """Its place among all that the run has drawn."""
    begun: int
    """The step in which it began."""
    state: GroupState

    @property
    def is_whole(self) -> bool:
        return len(self.state.wall_s) == self.state.size


class Begun(NamedTuple):
    """What all ranks know of a group of any rank."""

    number: int
    begun: int
    is_whole: bool


class CarryOver:
    """This rank's part of the groups that the run has begun. With rollout.carry_over=0 it adds nothing to a Sampler."""

    def __init__(
        self,
        sampler: Sampler,
        cfg: RolloutConfig,
        branching: BranchingConfig,
        num_prompts: int,
        max_num_seqs: int = 256,
    ):
        """num_prompts: those that a step is trained on, over all ranks. max_num_seqs: the engine's places."""
        self.sampler, self.cfg, self.num_prompts, self.max_num_seqs = sampler, cfg, num_prompts, max_num_seqs
        self.team, self.is_on = sampler.team, cfg.carry_over > 0
        score = sampler.score_alike if branching.selector in NEED_REWARDS else None
        self.loop = Loop(sampler.engine, sampler.tools, sampler.codec, cfg, branching, None, score)
        self.max_unfinished = min(2 * max_num_seqs, math.ceil(num_prompts / self.team.num_teams) * cfg.group_size)
        self.groups: list[Carried] = []
        """Those of this rank."""
        self.begun: list[Begun] = []
        """Those of all ranks, as the last exchange left them."""
        self.waiting: dict[int, Prompt] = {}
        """Prompts that were drawn, but not begun by any rank, by number; the same on all ranks."""
        self.num_drawn = 0
        self.step = 0
        self._mine: deque[int] = deque()
        self._counter: dist.Store | None = None
        self._looked_at_s = 0.0
        self._is_full = False

    # ---- what a step draws, samples and is trained on

    def num_to_draw(self, count: int, steps_left: int) -> int:
        """Return how many prompts a step draws, where it needs `count`. steps_left: this one included."""
        if not self.is_on:
            return count
        return max(min(2, steps_left) * self.num_prompts - len(self.begun) - len(self.waiting), 0)

    @property
    def num_behind(self) -> int:
        """How many of the last drawn prompts to go back in the data, so that none is left out whose group is not
        trained on."""
        untrained = [entry.number for entry in self.begun] + list(self.waiting)
        return self.num_drawn - min(untrained, default=self.num_drawn)

    def __call__(
        self,
        prompts: list[Prompt],
        cfg: RolloutConfig,
        branching: BranchingConfig,
        *,
        description: str,
        step: str,
        statistics: SignalStatistics | None = None,
        on_group: Callable[[Group, list[float]], None] | None = None,
    ) -> list[Group]:
        """Sample until the step's mini-batches are full. Return this rank's groups that have become whole in it.

        `prompts` are those that the step has drawn; see Sampler. `exchange` must follow.
        """
        names = {"statistics": statistics, "on_group": on_group}
        if not self.is_on:
            return self.sampler(prompts, cfg, branching, description=description, step=step, **names)
        self._begin_step(prompts, int(step), statistics)
        num_trajectories = self.num_prompts // self.team.num_teams * cfg.group_size
        try:
            with self.sampler.log.progress(num_trajectories, description, is_part=True) as progress:
                whole = self._sample(on_group, lambda num_whole: progress.at(min(num_whole, num_trajectories)))
        except BaseException:
            self.sampler.tools.sessions.end_all()
            raise
        self.pause()
        return whole

    def _begin_step(self, prompts: list[Prompt], step: int, statistics: SignalStatistics | None) -> None:
        self.waiting |= dict(enumerate(prompts, self.num_drawn))
        self.num_drawn += len(prompts)
        self.step = self.loop.step = step
        self.loop.statistics = statistics
        self._mine = deque(self.team.share(sorted(self.waiting)))
        self._counter, self._is_full = None, False
        if self.team.num_teams > 1:
            self._counter = dist.PrefixStore(f"carry_over/{step}", dist.distributed_c10d._get_default_store())
        self.sampler.tools.unpark()
        for live in self.loop.decoding.values():
            self.loop.submit(live)

    def _sample(
        self, on_group: Callable[[Group, list[float]], None] | None, on_progress: Callable[[int], None]
    ) -> list[Group]:
        engine, tools = self.sampler.engine, self.sampler.tools
        is_alone, whole = self._counter is None, []
        by_state = {id(carried.state): carried for carried in self.groups}
        while not self.is_full():
            while carried := self._begin_next():
                by_state[id(carried.state)] = carried
            is_idle = not engine.num_running
            assert not is_alone or not is_idle or tools.num_pending, "groups are left, but nothing is at work"
            if is_idle and not is_alone:
                time.sleep(IDLE_S)
            for state in self.loop.advance(block=is_alone):
                self._count(by_state[id(state)])
                whole.append(state.finish())
                if on_group:
                    on_group(whole[-1], state.seconds)
            on_progress(len(whole) * self.cfg.group_size)
        return whole

    def _begin_next(self) -> Carried | None:
        """Begin this rank's next group, if there is one and the engine has a free place: while it decodes fewer than
        max_num_seqs trajectories, and no more are under way than a step without carry-over begins."""
        if self.sampler.engine.num_running >= self.max_num_seqs or self.loop.num_unfinished >= self.max_unfinished:
            return None
        # a prompt of the next epoch waits for the end of its earlier group: sessions and requests go by prompt
        growing = {carried.state.prompt.prompt_id for carried in self.groups if not carried.is_whole}
        number = next((n for n in self._mine if self.waiting[n].prompt_id not in growing), None)
        if number is None:
            return None
        self._mine.remove(number)
        seed = f"{self.sampler.seed}|{self.step}|{number}"
        self.groups.append(Carried(number, self.step, self.loop.start_group(self.waiting[number], seed)))
        return self.groups[-1]

    def pause(self) -> None:
        """Take the requests back from the engine; what they have sampled is in the trajectories. Calls go on."""
        self.sampler.engine.abort(list(self.loop.decoding))
        self.sampler.tools.park()

    # ---- when a step ends

    def is_due(self, begun: int) -> bool:
        """Return whether a group of that step must be whole at the end of this one."""
        return begun + self.cfg.carry_over <= self.step

    def _count(self, carried: Carried) -> None:
        if self._counter is not None:
            self._counter.add("whole", 1 + DUE * self.is_due(carried.begun))

    def is_full(self) -> bool:
        """Return whether the step can end: enough groups are whole over all ranks, and all that had to be."""
        if self._counter is None:
            return sum(c.is_whole for c in self.groups) >= self.num_prompts and not any(
                self.is_due(c.begun) for c in self.groups if not c.is_whole
            )
        now_s = time.perf_counter()
        if not self._is_full and now_s - self._looked_at_s >= max(LOOK_S, LOOK_PER_TEAM_S * self.team.num_teams):
            self._looked_at_s = now_s
            num_due, num_whole = divmod(self._counter.add("whole", 0), DUE)
            num_whole += sum(entry.is_whole for entry in self.begun)
            needed = sum(self.is_due(entry.begun) for entry in self.begun if not entry.is_whole)
            self._is_full = num_whole >= self.num_prompts and num_due >= needed
        return self._is_full

    def exchange(self, groups: list[Group], num_prompts: int) -> list[Group]:
        """Return the groups that the step is trained on, on all ranks, in the order in which they were drawn.

        Those are the first `num_prompts` drawn of all that are whole. `groups`: see Team.exchange. Collective.
        """
        if not self.is_on:
            return self.team.exchange(groups, num_prompts)
        mine = [Begun(c.number, c.begun, c.is_whole) for c in self.groups]
        everywhere = sorted(entry for part in self.team.ranks.all_gather_objects(mine) for entry in part)
        chosen = {entry.number for entry in [e for e in everywhere if e.is_whole][: self.num_prompts]}
        ready = {c.number: c.state.finish() for c in self.groups if c.number in chosen}
        trained = {number: g for part in self.team.ranks.all_gather_objects(ready) for number, g in part.items()}
        self.groups = [c for c in self.groups if c.number not in chosen]
        self.begun = [entry for entry in everywhere if entry.number not in chosen]
        for entry in everywhere:
            self.waiting.pop(entry.number, None)
        if self._counter is not None and self.team.ranks.is_main:
            self._counter.delete_key("whole")  # all ranks have seen the end of the step
        return [trained[number] for number in sorted(trained)]


def staleness(groups: Sequence[Group], step: int) -> Metrics:
    """Return by how many steps the policies that sampled these groups are older than the one which `step` trains.

    Each token counts once, with the trajectory that sampled it. Nothing where no group is ever carried.
    """
    m = Metrics()
    for t in (t for group in groups for t in group.trajectories):
        ends = [*(start for start, _ in t.versions), len(t.token_ids)][1:]
        for (start, version), end in zip(t.versions, ends, strict=True):
            count = sum(t.loss_mask[max(start, t.fork_at) : end])
            if count:
                m.mean("carry_over/staleness", step - version, count)
                m.max("carry_over/staleness_max", step - version)
                m.sum("carry_over/tokens", count * (version < step))
    for group in groups:
        if versions := [version for t in group.trajectories for _, version in t.versions]:
            m.sum("carry_over/groups", min(versions) < step)
    return m
