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

    who ends a step: every rank counts its whole groups in the process group's store, and looks there now and then (0.1
    ms on one machine); what is trained on all ranks decide afterwards together, from the numbers of all whole groups
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed import DistStoreError

from arpo.growing import GroupState
from arpo.options import BranchingConfig, RolloutConfig
from arpo.retrospective import NEED_REWARDS
from arpo.rollout import Loop
from arpo.sampling.sampler import Sampler, Share
from arpo.trajectory import Group, Prompt, SignalStatistics

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
    """A group that some rank has begun, as all ranks know it."""

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
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """num_prompts: those that a step is trained on, over all ranks."""
        self.clock, self.sleep = clock, sleep
        self.sampler, self.cfg, self.num_prompts = sampler, cfg, num_prompts
        self.team, self.is_on = sampler.team, cfg.carry_over > 0
        score = sampler.score_alike if branching.selector in NEED_REWARDS else None
        self.loop = Loop(sampler.engine, sampler.tools, sampler.codec, cfg, branching, None, score)
        share = math.ceil(num_prompts / self.team.num_teams) * cfg.group_size
        self.max_unfinished = min(2 * sampler.max_num_seqs, share)
        self.groups: list[Carried] = []
        """Those of this rank."""
        self.begun: list[Begun] = []
        """Those of all ranks, as the last exchange left them."""
        self.waiting: dict[int, Prompt] = {}
        """Prompts that were drawn, but not begun by any rank, by number; the same on all ranks."""
        self.num_drawn = 0
        self.step = 0
        self._store = self.team.ranks.store if self.team.num_teams > 1 else None
        self._queue: Iterator[int] = iter(())  # numbers that this rank may begin; pulled ones only when asked for
        self._held: list[int] = []  # those that it may begin, but not yet
        self._looked_at_s = -math.inf
        self._is_full = False
        self._num_whole = 0  # groups of all ranks that were whole when the step began
        self._num_due = 0  # those that were not, and must become so in it

    # ---- what a step draws, samples and is trained on

    def num_to_draw(self, count: int, steps_left: int) -> int:
        """Return how many prompts a step draws, where it needs `count`. steps_left: this one included."""
        if not self.is_on:
            return count
        return max(min(2, steps_left) * self.num_prompts - len(self.begun) - len(self.waiting), 0)

    def num_drawn_after(self, drawn: list[tuple[int, int]], groups: list[Group], num_drawn: int) -> int:
        """Return num_drawn for the next draw, where it was `num_drawn` for this one, which gave these groups. `drawn`:
        see PromptOrder.queue."""
        used = drawn if self.is_on else drawn[: len(groups)]
        return used[-1][1] if used else num_drawn

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
        num_wanted: int = 0,
        guests: Loop | None = None,
    ) -> Share:
        """Sample until the step's mini-batches are full. Return this rank's groups that have become whole in it.

        `prompts` are those that the step has drawn; see Sampler. `exchange` must follow.
        """
        if not self.is_on:
            names = {"statistics": statistics, "on_group": on_group, "num_wanted": num_wanted, "guests": guests}
            return self.sampler(prompts, cfg, branching, description=description, step=step, **names)
        self._begin_step(prompts, int(step), statistics)
        self.loop.guests = guests
        num_trajectories = self.num_prompts // self.team.num_teams * cfg.group_size
        try:
            with self.sampler.log.progress(num_trajectories, description, is_part=True) as progress:
                whole = self._sample(on_group, lambda num_whole: progress.at(min(num_whole, num_trajectories)))
        except BaseException:
            self.sampler.tools.abandon()
            raise
        self.pause()
        return Share(whole, ())

    def _begin_step(self, prompts: list[Prompt], step: int, statistics: SignalStatistics | None) -> None:
        self.waiting |= dict(enumerate(prompts, self.num_drawn))
        self.num_drawn += len(prompts)
        self.step = self.loop.step = step
        self.loop.statistics = statistics
        self._queue, self._held, self._is_full = iter(self._deal()), [], False
        # once, and not at every look: the engine waits meanwhile, and 1,000 ranks have begun 10,000 groups
        self._num_whole = sum(entry.is_whole for entry in self.begun)
        self._num_due = sum(self.is_due(entry.begun) for entry in self.begun if not entry.is_whole)
        self.sampler.tools.unpark()
        for live in self.loop.decoding.values():
            self.loop.submit(live)

    def _deal(self) -> Iterable[int]:
        """Return the numbers that this rank may begin: its share, or those that it pulls (see dispatch.py)."""
        numbers = sorted(self.waiting)
        if self.cfg.dispatch == "fixed" or self._store is None:
            return self.team.share(numbers)
        if self.cfg.pull_order == "longest_first" and self.sampler.lengths:
            numbers = [numbers[i] for i in self.sampler.lengths.longest_first([self.waiting[n] for n in numbers])]
        pulls = iter(lambda: self._store.add(self._key("next"), 1) - 1, None)
        return (numbers[place] for place in itertools.takewhile(lambda place: place < len(numbers), pulls))

    def _key(self, word: str) -> str:
        return f"carry_over/{self.step}/{word}"

    def _sample(
        self, on_group: Callable[[Group, list[float]], None] | None, on_progress: Callable[[int], None]
    ) -> list[Group]:
        engine, tools = self.sampler.engine, self.sampler.tools
        is_alone, whole, at_work_s = self._store is None, [], self.clock()
        by_state = {id(carried.state): carried for carried in self.groups}
        while not self.is_full() or self.loop.num_guests:
            while carried := self._begin_next():
                by_state[id(carried.state)] = carried
            if engine.num_running or tools.num_pending:
                at_work_s = self.clock()
            assert not is_alone or engine.num_running or tools.num_pending, "groups are left, but nothing is at work"
            if self.clock() - at_work_s > self.team.ranks.timeout.total_seconds():
                raise DistStoreError(f"the other ranks have not ended the step in {self.team.ranks.timeout}")
            if not engine.num_running and not is_alone:
                self.sleep(IDLE_S)
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
        is_busy = self.sampler.engine.num_running >= self.sampler.max_num_seqs
        if is_busy or self.loop.num_unfinished >= self.max_unfinished:
            return None
        # a prompt of the next epoch waits for the end of its earlier group: sessions and requests go by prompt
        growing = {carried.state.prompt.prompt_id for carried in self.groups if not carried.is_whole}
        held, self._held = iter(self._held), []
        for number in itertools.chain(held, self._queue):
            if self.waiting[number].prompt_id not in growing:
                break
            self._held.append(number)
        else:
            return None
        self._held += held
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
        if self._store is not None:
            self._store.add(self._key("whole"), 1 + DUE * self.is_due(carried.begun))

    def is_full(self) -> bool:
        """Return whether the step can end: enough groups are whole over all ranks, and all that had to be."""
        if self._store is None:
            return sum(c.is_whole for c in self.groups) >= self.num_prompts and not any(
                self.is_due(c.begun) for c in self.groups if not c.is_whole
            )
        now_s = self.clock()
        if not self._is_full and now_s - self._looked_at_s >= max(LOOK_S, LOOK_PER_TEAM_S * self.team.num_teams):
            self._looked_at_s = now_s
            num_due, num_whole = divmod(self._store.add(self._key("whole"), 0), DUE)
            self._is_full = self._num_whole + num_whole >= self.num_prompts and num_due >= self._num_due
        return self._is_full

    def exchange(self, share: Share) -> tuple[list[Group], int]:
        """Return the groups that the step is trained on, on all ranks, in the order in which they were drawn.

        Those are the first `num_prompts` drawn of all that are whole. The number: see Sampler.exchange. Collective.
        """
        if not self.is_on:
            return self.sampler.exchange(share)
        mine = [Begun(c.number, c.begun, c.is_whole) for c in self.groups]
        everywhere = sorted(entry for part in self.team.ranks.all_gather_objects(mine) for entry in part)
        chosen = {entry.number for entry in [e for e in everywhere if e.is_whole][: self.num_prompts]}
        ready = {c.number: c.state.finish() for c in self.groups if c.number in chosen}
        for group in ready.values():
            group.sampled_by = self.team.ranks.rank
        trained = {number: g for part in self.team.ranks.all_gather_objects(ready) for number, g in part.items()}
        self.groups = [c for c in self.groups if c.number not in chosen]
        self.begun = [entry for entry in everywhere if entry.number not in chosen]
        for entry in everywhere:
            self.waiting.pop(entry.number, None)
        if self._store is not None and self.team.ranks.is_main:
            for word in ("whole", "next"):
                self._store.delete_key(self._key(word))  # all ranks have seen the end of the step
        return [trained[number] for number in sorted(trained)], 0
