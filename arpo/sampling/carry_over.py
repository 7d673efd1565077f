"""Groups carried from step to step, so that no step waits for the slowest trajectory (partial rollouts).

    step 1   starts groups until the engine is full, and ends when N = data.num_prompts_per_step groups of all ranks
             are finished. The others stay: the engine drops their requests, their tool calls go on
    update   on the N finished groups drawn first; weight sync
    step 2   the engine gets all unfinished turns again, with their tokens as the prompt, and new groups as well

No prompt is dropped or started anew, even if a group takes long: after `rollout.carry_over` steps the step waits for
the group. At most 2 N groups have started without being trained on yet. Each step trains on N of them, so at most N are
left from earlier steps. If one of these is finished when a step begins, that step trains on it.

A token from an earlier step was sampled by an older policy. `Trajectory.versions` names the step, and the rollout's
logprobs are from that policy. The rollout correction (TIS or MIS) weighs each token by the distance of its policy from
the policy before the update.

    the end of a step: every rank counts its finished groups in the process group's store, and polls it now and then
    (0.1 ms on one machine). Afterwards all ranks choose the groups to train on together, from all finished groups
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from arpo.growing import GroupState
from arpo.sampling.driver import Source
from arpo.sampling.sampler import IDLE_S, Sampler, StorePoller
from arpo.trajectory import Group, Prompt


@dataclass
class Carried:
    """A started group of this rank, not trained on yet."""

    number: int
    """Number of the group among all groups drawn in the run."""
    first_step: int
    """Step in which the group started."""
    state: GroupState

    @property
    def is_finished(self) -> bool:
        return self.state.is_finished


class StartedGroup(NamedTuple):
    """A started group of any rank, as all ranks know it."""

    number: int
    first_step: int
    is_finished: bool


class CarryOver(Source):
    """This rank's part of the started groups, over all steps of the run."""

    def __init__(self, sampler: Sampler, num_prompts: int):
        """num_prompts: number of groups in the update of a step, over all ranks."""
        super().__init__(sampler.new_rollout(), (), "")
        self.sampler = sampler
        self.team = sampler.team
        self.cfg = sampler.rollout
        self.num_prompts = num_prompts
        share = math.ceil(num_prompts / self.team.num_teams) * self.cfg.group_size
        self.max_decoding = sampler.max_num_seqs
        self.max_unfinished = min(2 * sampler.max_num_seqs, share)  # a step without carry-over starts no more
        self.carried: list[Carried] = []
        """Groups of this rank."""
        self.started_groups: list[StartedGroup] = []
        """Groups of all ranks, as of the last exchange."""
        self.waiting: dict[int, Prompt] = {}
        """Number -> prompt, for drawn prompts not started by any rank. The same on all ranks."""
        self.num_drawn = 0
        """Prompts drawn so far."""
        self.step = 0
        self.to_score: list[Group] = []
        """Groups of this rank, finished in this step."""
        self._store = self.team.ranks.store if self.team.num_teams > 1 else None
        self.hears_others = self._store is not None
        self._poller = StorePoller(sampler)
        # Numbers that this rank may start. Pulled numbers: the store is asked only when the next number is needed.
        self._queue: Iterator[int] = iter(())
        self._postponed: list[int] = []  # numbers from the queue that cannot start yet
        self._is_full = False
        self._num_finished_before = 0  # groups of all ranks that were finished when the step began
        self._num_due = 0  # groups of all ranks that were unfinished when the step began, and must finish in it

    # ---- a step begins

    def num_to_draw(self, steps_left: int) -> int:
        """Return the number of prompts to draw for a step. steps_left: steps of the run, including this step."""
        num_known = len(self.started_groups) + len(self.waiting)
        return max(min(2, steps_left) * self.num_prompts - num_known, 0)

    @property
    def num_to_redraw(self) -> int:
        """Number of drawn prompts from the first untrained one on.

        A run that ends because its tools failed saves no carried groups, and goes back this far in the data
        (ToolHealth).
        """
        untrained = [group.number for group in self.started_groups] + list(self.waiting)
        return self.num_drawn - min(untrained, default=self.num_drawn)

    def begin_step(self, step: int, prompts: Sequence[Prompt]) -> CarryOver:
        """Continue the unfinished groups, beside newly drawn prompts. Return this source."""
        self.waiting |= dict(enumerate(prompts, self.num_drawn))
        self.num_drawn += len(prompts)
        self.step = step
        self.loop.step = step
        self.to_score = []
        self._queue = iter(self._deal())
        self._postponed = []
        self._is_full = False
        # counted once, not at every poll: the engine waits for the count, and 1,000 ranks have started 10,000 groups
        self._num_finished_before = sum(group.is_finished for group in self.started_groups)
        self._num_due = sum(self.is_due(group.first_step) for group in self.started_groups if not group.is_finished)
        self._poller.note_work()
        self.sampler.tools.unpark()
        for live in self.loop.decoding.values():
            self.loop.submit(live)
        return self

    def _deal(self) -> Iterable[int]:
        """Return the numbers for this rank: a share of all numbers, or the pulled numbers (see sources.py)."""
        numbers = sorted(self.waiting)
        if not self.cfg.is_pulled or self._store is None:
            return self.team.share(numbers)
        return self._pull_from(numbers)

    def _pull_from(self, numbers: Sequence[int]) -> Iterator[int]:
        while (index := self._store.add(self._key("next"), 1) - 1) < len(numbers):
            yield numbers[index]

    def _key(self, word: str) -> str:
        return f"carry_over/{self.step}/{word}"

    # ---- the driver's questions

    def start(self) -> None:
        while not self.is_done and self.has_room and (number := self._next_number()) is not None:
            seed = f"{self.sampler.seed}|{self.step}|{number}"
            state = self.loop.start_group(self.waiting[number], seed)
            self.carried.append(Carried(number, self.step, state))
        if self.sampler.engine.num_running:
            self._poller.note_work()

    def _next_number(self) -> int | None:
        # a prompt of the next epoch waits until its earlier group has finished: sessions and requests go by prompt
        growing = {carried.state.prompt.prompt_id for carried in self.carried if not carried.is_finished}
        postponed = iter(self._postponed)
        self._postponed = []
        for number in itertools.chain(postponed, self._queue):
            if self.waiting[number].prompt_id not in growing:
                self._postponed += postponed
                return number
            self._postponed.append(number)
        return None

    def on_finished(self, state: GroupState) -> None:
        carried = next(carried for carried in self.carried if carried.state is state)
        if self._store is not None:
            self._store.add(self._key("finished"), 1)
            if self.is_due(carried.first_step):
                self._store.add(self._key("due"), 1)
        group = state.to_group()
        self.to_score.append(group)
        if self.sampler.on_group:
            self.sampler.on_group(group, state.seconds)

    def idle(self, *, has_calls: bool) -> None:
        assert has_calls or self.hears_others, "groups are left, but nothing is at work"
        if has_calls:
            self._poller.note_work()
        if self.hears_others:
            self._poller.wait(IDLE_S)

    @property
    def num_finished(self) -> int:
        return len(self.to_score) * self.cfg.group_size

    @property
    def is_done(self) -> bool:
        """True if the step can end: enough groups of all ranks are finished, including all due groups."""
        if self._store is None:
            num_finished = sum(carried.is_finished for carried in self.carried)
            some_due = any(self.is_due(carried.first_step) for carried in self.carried if not carried.is_finished)
            return num_finished >= self.num_prompts and not some_due
        if not self._is_full and self._poller.is_due():
            num_finished = self._num_finished_before + self._store.add(self._key("finished"), 0)
            num_due_finished = self._store.add(self._key("due"), 0)
            self._is_full = num_finished >= self.num_prompts and num_due_finished >= self._num_due
        return self._is_full

    def is_due(self, first_step: int) -> bool:
        """Return True if a group from step `first_step` must finish in the current step."""
        return first_step + self.cfg.carry_over <= self.step

    def end(self) -> None:
        """Take the requests back from the engine; the trajectories keep their tokens. Tool calls go on."""
        self.sampler.engine.abort(list(self.loop.decoding))
        self.sampler.tools.park()

    # ---- a step ends

    def all_started_groups(self) -> list[StartedGroup]:
        """Return the started groups of all ranks, in the order of drawing. Collective."""
        mine = [StartedGroup(c.number, c.first_step, c.is_finished) for c in self.carried]
        return sorted(group for of_rank in self.team.ranks.all_gather_objects(mine) for group in of_rank)

    def exchange(self) -> list[Group]:
        """Return the groups to train on, on all ranks: the first `num_prompts` drawn of all finished. Collective."""
        everywhere = self.all_started_groups()
        finished = [group.number for group in everywhere if group.is_finished]
        chosen = set(finished[: self.num_prompts])
        ready = {c.number: c.state.to_group() for c in self.carried if c.number in chosen}
        for group in ready.values():
            group.sampled_by = self.team.ranks.rank
        trained = self.team.all_gather_groups(list(ready.values()), list(ready))
        self.carried = [c for c in self.carried if c.number not in chosen]
        self.started_groups = [group for group in everywhere if group.number not in chosen]
        for group in everywhere:
            self.waiting.pop(group.number, None)
        if self._store is not None and self.team.ranks.is_main:
            for word in ("finished", "due", "next"):
                self._store.delete_key(self._key(word))  # all ranks have seen the end of the step
        return trained
