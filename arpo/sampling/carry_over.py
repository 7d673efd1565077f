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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from arpo.growing import GroupState
from arpo.sampling.driver import Source
from arpo.sampling.sampler import Looks, Sampler
from arpo.trajectory import Group, Prompt

IDLE_S = 0.005
"""Pause of a rank that has nothing to do until a tool, or another rank, is ready."""


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


class CarryOver(Source):
    """This rank's part of the groups that the run has begun, over all steps."""

    def __init__(self, sampler: Sampler, num_prompts: int):
        """num_prompts: those that a step is trained on, over all ranks."""
        super().__init__(sampler.loop(), (), "")
        self.sampler, self.team = sampler, sampler.team
        self.cfg, self.num_prompts = sampler.rollout, num_prompts
        share = math.ceil(num_prompts / self.team.num_teams) * self.cfg.group_size
        self.max_decoding = sampler.max_num_seqs
        self.max_unfinished = min(2 * sampler.max_num_seqs, share)  # a step without carry-over begins no more
        self.carried: list[Carried] = []
        """Those of this rank."""
        self.begun: list[Begun] = []
        """Those of all ranks, as the last exchange left them."""
        self.waiting: dict[int, Prompt] = {}
        """Prompts that were drawn, but not begun by any rank, by number; the same on all ranks."""
        self.num_drawn = 0
        """Prompts that the run has drawn so far."""
        self.step = 0
        self.to_score: list[Group] = []
        """Those of this rank that have become whole in the step."""
        self._store = self.team.ranks.store if self.team.num_teams > 1 else None
        self.hears_others = self._store is not None
        self._looks = Looks(sampler)
        self._queue: Iterator[int] = iter(())  # numbers that this rank may begin; pulled ones only when asked for
        self._held: list[int] = []  # those that it may begin, but not yet
        self._is_full = False
        self._num_whole = 0  # groups of all ranks that were whole when the step began
        self._num_due = 0  # those that were not, and must become so in it

    # ---- what a step draws

    def num_to_draw(self, steps_left: int) -> int:
        """Return how many prompts a step draws. steps_left: this one included."""
        return max(min(2, steps_left) * self.num_prompts - len(self.begun) - len(self.waiting), 0)

    @property
    def num_to_redraw(self) -> int:
        """On resume, the run goes back this many prompts in the data, so that each prompt is trained on."""
        untrained = [entry.number for entry in self.begun] + list(self.waiting)
        return self.num_drawn - min(untrained, default=self.num_drawn)

    def begin_step(self, step: int, prompts: Sequence[Prompt]) -> CarryOver:
        """Go on with what is unfinished, and with the prompts that the step has drawn. Return this source."""
        self.waiting |= dict(enumerate(prompts, self.num_drawn))
        self.num_drawn += len(prompts)
        self.step = self.loop.step = step
        self.to_score = []
        self._queue, self._held, self._is_full = iter(self._deal()), [], False
        # once, and not at every look: the engine waits meanwhile, and 1,000 ranks have begun 10,000 groups
        self._num_whole = sum(entry.is_whole for entry in self.begun)
        self._num_due = sum(self.is_due(entry.begun) for entry in self.begun if not entry.is_whole)
        self._looks.worked()
        self.sampler.tools.unpark()
        for live in self.loop.decoding.values():
            self.loop.submit(live)
        return self

    def _deal(self) -> Iterable[int]:
        """Return the numbers that this rank may begin: its share, or those that it pulls (see sources.py)."""
        numbers = sorted(self.waiting)
        if not self.cfg.is_pulled or self._store is None:
            return self.team.share(numbers)
        pulls = iter(lambda: self._store.add(self._key("next"), 1) - 1, None)
        return (numbers[place] for place in itertools.takewhile(lambda place: place < len(numbers), pulls))

    def _key(self, word: str) -> str:
        return f"carry_over/{self.step}/{word}"

    # ---- what the driver asks

    def start(self) -> None:
        while not self.is_done and self.has_room and (number := self._next_number()) is not None:
            seed = f"{self.sampler.seed}|{self.step}|{number}"
            self.carried.append(Carried(number, self.step, self.loop.start_group(self.waiting[number], seed)))
        if self.sampler.engine.num_running:
            self._looks.worked()

    def _next_number(self) -> int | None:
        # a prompt of the next epoch waits for the end of its earlier group: sessions and requests go by prompt
        growing = {carried.state.prompt.prompt_id for carried in self.carried if not carried.is_whole}
        held, self._held = iter(self._held), []
        for number in itertools.chain(held, self._queue):
            if self.waiting[number].prompt_id not in growing:
                self._held += held
                return number
            self._held.append(number)
        return None

    def whole(self, state: GroupState) -> None:
        carried = next(carried for carried in self.carried if carried.state is state)
        if self._store is not None:
            self._store.add(self._key("whole"), 1)
            if self.is_due(carried.begun):
                self._store.add(self._key("due"), 1)
        group = state.to_group()
        self.to_score.append(group)
        if self.sampler.on_group:
            self.sampler.on_group(group, state.seconds)

    def idle(self, *, has_calls: bool) -> None:
        assert has_calls or self.hears_others, "groups are left, but nothing is at work"
        if has_calls:
            self._looks.worked()
        if self.hears_others:
            self._looks.wait(IDLE_S)

    @property
    def num_finished(self) -> int:
        return len(self.to_score) * self.cfg.group_size

    @property
    def is_done(self) -> bool:
        """True where the step can end: enough groups are whole over all ranks, and all that had to be."""
        if self._store is None:
            return sum(c.is_whole for c in self.carried) >= self.num_prompts and not any(
                self.is_due(c.begun) for c in self.carried if not c.is_whole
            )
        if not self._is_full and self._looks.is_due():
            num_whole, num_due = (self._store.add(self._key(word), 0) for word in ("whole", "due"))
            self._is_full = self._num_whole + num_whole >= self.num_prompts and num_due >= self._num_due
        return self._is_full

    def is_due(self, begun: int) -> bool:
        """Return whether a group of that step must be whole at the end of this one."""
        return begun + self.cfg.carry_over <= self.step

    def end(self) -> None:
        """Take the requests back from the engine; what they have sampled is in the trajectories. Calls go on."""
        self.sampler.engine.abort(list(self.loop.decoding))
        self.sampler.tools.park()

    # ---- the end of a step

    def exchange(self) -> list[Group]:
        """Return the groups to train on, on all ranks: the first `num_prompts` drawn of all whole ones. Collective."""
        mine = [Begun(c.number, c.begun, c.is_whole) for c in self.carried]
        everywhere = sorted(entry for part in self.team.ranks.all_gather_objects(mine) for entry in part)
        chosen = {entry.number for entry in [e for e in everywhere if e.is_whole][: self.num_prompts]}
        ready = {c.number: c.state.to_group() for c in self.carried if c.number in chosen}
        for group in ready.values():
            group.sampled_by = self.team.ranks.rank
        trained = self.team.all_gather_groups(list(ready.values()), list(ready))
        self.carried = [c for c in self.carried if c.number not in chosen]
        self.begun = [entry for entry in everywhere if entry.number not in chosen]
        for entry in everywhere:
            self.waiting.pop(entry.number, None)
        if self._store is not None and self.team.ranks.is_main:
            for word in ("whole", "due", "next"):
                self._store.delete_key(self._key(word))  # all ranks have seen the end of the step
        return trained
