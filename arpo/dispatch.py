"""Who samples which prompts of a rollout: each team is dealt its share, or all teams pull from one queue.

    fixed   prompts 0 2 4 6 are team 0's, and 1 3 5 7 team 1's
    pull    whoever has room takes the next: a slow team 1 may end up with 1 and 4, and team 0 with all others

The queue is a counter in the process group's store; a pull is one round trip to it. What is sampled for a prompt
depends on the seed, the rollout's name, the prompt, the path in its tree and the turn, and never on the rank. Groups
come back in the order of the prompts (`Team.exchange`), so all that follows is the same, whoever sampled what.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Protocol

import torch.distributed as dist

from arpo.engine.team import Team
from arpo.options import RolloutConfig
from arpo.selection import is_dead
from arpo.trajectory import Group, Prompt

WAIT_S, WAIT_PER_TEAM_S = 0.05, 2e-4
"""Seconds between two looks at what the other teams have found (at least, and per team): 10,000 requests a second for
the store at most, whatever the number of teams."""

PRIOR_SHARE = 1 / 8
"""Groups that count as mixed before any is known, per group that is wanted. Where half are dead, a step then takes 0.6
to 0.7 of the time that it takes in rounds, and a twentieth of the groups is cut off; with 1 it takes 0.7 to 1.0, and
with 1/32 about 0.6, but up to a ninth is cut off (workloads short, 16 ranks, and long, 8, of no_rank_waits.py)."""


class PromptSource(Protocol):
    """A source of prompts, which a rollout asks whenever it could begin another group."""

    is_full: bool
    """True once the step needs none of the groups that are unfinished here: the rollout cuts them off."""

    def take(self, num_unfinished: int, num_running: int) -> Prompt | None:
        """Return the next prompt that this rank is to begin; None: none now or, if nothing is unfinished, none at all.

        num_unfinished: trajectories that this rank has begun, or is to begin, and that have not ended; num_running:
        those of them that the engine decodes.
        """


class Dealt:
    """Prompts that are this rank's already. All are begun at once or, with `max_at_once`, only while fewer trajectories
    are unfinished."""

    is_full = False

    def __init__(self, prompts: Iterable[Prompt], max_at_once: int = 0):
        self.left, self.max_at_once = deque(prompts), max_at_once

    def take(self, num_unfinished: int, num_running: int) -> Prompt | None:
        has_room = not self.max_at_once or num_unfinished < self.max_at_once
        return self.left.popleft() if self.left and has_room else None


class PromptQueue:
    """One rollout's prompts, which all teams pull from. Every rank makes one, with the same arguments.

    A team takes a prompt while its engine has a free place: while it decodes fewer than `max_num_seqs` trajectories.
    Those that wait for their tools have left their places to others. But it never holds more than an equal share of the
    prompts at once, so that those who come first do not take all where all fit into a few engines.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        team: Team,
        name: str,
        *,
        max_num_seqs: int,
        group_size: int,
        order: Sequence[int] | None = None,
    ):
        """name: the rollout's, unlike that of any other whose keys are in the store. order: places in `prompts` in the
        order in which they are handed out; None = as they are."""
        self.prompts, self.team, self.max_num_seqs = prompts, team, max_num_seqs
        self.order = range(len(prompts)) if order is None else order
        assert team.ranks.store or team.num_teams == 1, "ranks without a store cannot share a queue"
        self.store, self.name = team.ranks.store or dist.HashStore(), name
        self.max_unfinished = ceil(len(prompts) / team.num_teams) * group_size
        self.places: dict[str, int] = {}
        """prompt_id -> place in `prompts`, of all that this team has begun."""
        self.is_full = False
        self.is_open = True
        """False once there is no further prompt for this team."""

    def has_room(self, num_unfinished: int, num_running: int) -> bool:
        return num_running < self.max_num_seqs and num_unfinished < self.max_unfinished

    def take(self, num_unfinished: int, num_running: int) -> Prompt | None:
        """See PromptSource. Collective within the team where there is room."""
        if not self.is_open or not self.has_room(num_unfinished, num_running):
            return None
        return self.begin(self.team.from_first(self.pull() if self.team.is_first else 0))

    def pull(self) -> int:
        """Return the number, from 0, of the next prompt that is handed out; it may lie beyond the last one."""
        return self.store.add(self.key("next"), 1) - 1

    def key(self, word: str) -> str:
        return f"prompts/{self.name}/{word}"

    def begin(self, number: int) -> Prompt | None:
        if number >= len(self.order):
            self.is_open = False
            return None
        prompt = self.prompts[self.order[number]]
        self.places[prompt.prompt_id] = self.order[number]
        return prompt

    def delete_keys(self) -> None:
        """Remove what the queue has in the store, once no rank needs it any more."""
        self.store.delete_key(self.key("next"))


class RefilledQueue(PromptQueue):
    """A queue for a step that wants `num_wanted` mixed groups: it hands out further prompts for those that are dead.

    The step is full once its first `num_wanted` mixed groups, in the order of the prompts, are there, and with them all
    prompts before the last of these: no slow one is left out for being slow, and the choice does not depend on who was
    faster. Prompts after it, if any were begun, are cut off. As long as groups grow nobody knows how many prompts it
    takes; so many are handed out as should do by the share of mixed groups so far. That decides about waste only.

    Each whole group is scored at once and told to the other teams, by a numbered event in the store. They look there
    every WAIT_S, and rather wait than begin a prompt that may not be needed.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        team: Team,
        name: str,
        *,
        max_num_seqs: int,
        group_size: int,
        num_wanted: int,
        score: Callable[[list[Group]], None],
        order: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """`prompts` are all that the step may draw; `order` is of the first `num_wanted`. `score` fills the rewards of
        groups."""
        later = range(num_wanted, len(prompts))
        order = None if order is None else [*order, *later]
        super().__init__(prompts, team, name, max_num_seqs=max_num_seqs, group_size=group_size, order=order)
        self.max_unfinished = ceil(num_wanted / team.num_teams) * group_size
        self.num_wanted, self.score, self.clock, self.sleep = num_wanted, score, clock, sleep
        self.wait_s = max(WAIT_S, WAIT_PER_TEAM_S * team.num_teams)
        self.look_at_s = 0.0
        self.is_mixed: dict[int, bool] = {}
        """Place -> whether its group is mixed, of all that is known here."""
        self.num_mixed = self.num_counted = 0  # mixed ones among the first num_counted places, which are all known
        self.end: int | None = None
        """Number of prompts that the step takes; None as long as that is open."""
        self.ticket: int | None = None
        """The number that this team has pulled and not begun yet."""

    def telling(self, on_group: Callable[[Group, list[float]], None] | None) -> Callable[[Group, list[float]], None]:
        """Return an `on_group` for the rollout, which calls this one and tells the other teams of the group."""

        def tell(group: Group, seconds: list[float]) -> None:
            if on_group:
                on_group(group, seconds)
            if self.team.is_first:
                self.score([group])
                number, place = self.store.add(self.key("events"), 1), self.places[group.prompt.prompt_id]
                self.store.set(self.key(f"event/{number}"), f"{place} {int(not is_dead(group))}")
                self.look_at_s = 0.0

        return tell

    def take(self, num_unfinished: int, num_running: int) -> Prompt | None:
        """See PromptSource. Collective within the team."""
        wants_one = self.is_open and self.has_room(num_unfinished, num_running)
        news = self.decide(wants_one, waits=not num_unfinished) if self.team.is_first else None
        number, self.is_open, self.is_full = self.team.from_first(news)
        return None if number is None else self.begin(number)

    def decide(self, wants_one: bool, *, waits: bool) -> tuple[int | None, bool, bool]:
        """Return the number of the prompt to begin now or None, whether there may be further ones, and `is_full`."""
        started = self.clock()
        while True:
            self.look()
            if wants_one and self.ticket is None:
                self.ticket = self.pull()
            is_open = self.end is None and (self.ticket is None or self.ticket < len(self.order))
            if wants_one and is_open and self.ticket < self.num_allowed:
                number, self.ticket = self.ticket, None
                return number, True, False
            if not (waits and is_open):
                return None, is_open, self.end is not None
            if self.clock() - started > self.team.ranks.timeout.total_seconds():
                raise dist.DistStoreError(f"no other rank has finished a prompt in {self.team.ranks.timeout}")
            self.sleep(self.wait_s)

    def look(self) -> None:
        """Take note of the groups that have become whole, at most once in `wait_s`."""
        if self.clock() < self.look_at_s:
            return
        num_events, num_known = self.store.add(self.key("events"), 0), len(self.is_mixed)
        if num_events > num_known:
            events = self.store.multi_get([self.key(f"event/{n}") for n in range(num_known + 1, num_events + 1)])
            self.is_mixed |= {int(place): flag == b"1" for place, flag in map(bytes.split, events)}
            self.count()
        self.look_at_s = self.clock() + self.wait_s

    def count(self) -> None:
        """Find the end of the step, as far as that is known."""
        while self.end is None and self.num_counted in self.is_mixed:
            self.num_mixed += self.is_mixed[self.num_counted]
            self.num_counted += 1
            if self.num_mixed == self.num_wanted or self.num_counted == len(self.prompts):
                self.end = self.num_counted

    @property
    def num_allowed(self) -> int:
        """Number of prompts that may have been handed out by now, so that those under way should fill the step.

        The share of mixed ones counts as if some groups, all of them mixed, had been there before (PRIOR_SHARE), so
        that the first dead ones do not begin many more.
        """
        num_known, num_mixed = len(self.is_mixed), sum(self.is_mixed.values())
        prior = max(1.0, PRIOR_SHARE * self.num_wanted)
        expected_share = (num_mixed + prior) / (num_known + prior)
        return num_known + ceil(max(self.num_wanted - num_mixed, 0) / expected_share)

    def delete_keys(self) -> None:
        super().delete_keys()
        for number in range(1, self.store.add(self.key("events"), 0) + 1):
            self.store.delete_key(self.key(f"event/{number}"))
        self.store.delete_key(self.key("events"))


class ExpectedLengths:
    """The mean length of the responses to each prompt, in sampled tokens, when it was last drawn; it foretells the
    longest one better than the longest of then does (benchmarks/no_rank_waits.py). Every rank keeps the same."""

    def __init__(self, cfg: RolloutConfig, state: Mapping[str, int]):
        """`state` is what a checkpoint kept of it; {} for a new run."""
        self.is_kept = cfg.pull_order == "longest_first"
        self.state = dict(state)
        """prompt_id -> tokens; stays as it is where nobody asks for an order."""

    def add(self, groups: Sequence[Group]) -> None:
        for group in groups if self.is_kept else ():
            tokens = [t.num_sampled_tokens for t in group.trajectories]
            self.state[group.prompt.prompt_id] = sum(tokens) // len(tokens)

    def longest_first(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the prompts' places, by expected length; prompts that were never drawn count as long as the mean."""
        known = [self.state[p.prompt_id] for p in prompts if p.prompt_id in self.state]
        mean = sum(known) / max(len(known), 1)
        return sorted(range(len(prompts)), key=lambda place: -self.state.get(prompts[place].prompt_id, mean))
