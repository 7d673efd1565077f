"""The prompts of one step, as far as this team samples them: see the picture in the package's docstring.

The queue is a counter in the process group's store; a pull is one round trip to it. What is sampled for a prompt
depends on the seed, the step, the prompt, the path in its tree and the turn, and never on the rank. Groups come back in
the order of the prompts (`Team.all_gather_groups`), so all that follows is the same, whoever sampled what.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch.distributed as dist

from arpo.growing import GroupState
from arpo.sampling.driver import Source
from arpo.sampling.sampler import Looks, Sampler
from arpo.selection import is_dead
from arpo.trajectory import Group, Prompt

PRIOR_SHARE = 1 / 8
"""Groups that count as mixed before any is known, per group that is wanted. Where half are dead, a twentieth of the
groups is then cut off; with 1 a step takes up to 1.5 times as long, and with 1/32 up to a ninth is cut off (workloads
short, 16 ranks, and long, 8, of no_rank_waits.py)."""


class OneRollout(Source):
    """The prompts of one rollout, of which this team samples its share or those that it pulls (rollout.dispatch).

        dealt     0 2 4 6 are team 0's, and 1 3 5 7 team 1's. All are begun at once or, with `max_at_once`, only while
                  fewer trajectories are unfinished.
        pulled    The next prompt is whoever's has room: a slow team 1 may end up with 1 and 4, team 0 with all others.

    A team has room while its engine decodes fewer than `max_num_seqs` trajectories. Those that wait for their tools
    have left their places to others. But it never holds more than an equal share of the prompts at once, so that those
    who come first do not take all where all fit into a few engines.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        name: int | str,
        *,
        label: str = "rollout",
        max_at_once: int = 0,
    ):
        """name: the rollout's among those of the run; label: names, with `name`, the keys in the store."""
        super().__init__(sampler.loop(), prompts, f"{sampler.seed}|{name}")
        self.sampler, self.team = sampler, sampler.team
        self.store, self.prefix = self.team.ranks.store or dist.HashStore(), f"prompts/{label}/{name}"
        self.left = deque(self.team.share(range(len(prompts))))  # those that are dealt to this team, and not begun
        self.max_unfinished = max_at_once or math.inf
        if sampler.rollout.is_pulled:
            assert self.team.ranks.store or self.team.num_teams == 1, "ranks without a store cannot share a queue"
            self.limit_to_share_of(len(prompts))
        self.is_open = True
        """False once there is no further prompt for this team."""

    def limit_to_share_of(self, num_prompts: int) -> None:
        """Begin prompts only while the engine has a free place, and this team not its share of so many in hand."""
        self.max_decoding = self.sampler.max_num_seqs
        self.max_unfinished = math.ceil(num_prompts / self.team.num_teams) * self.loop.cfg.group_size

    @property
    def num_finished(self) -> int:
        """Number of trajectories that have ended, of all that were begun here."""
        return len(self.places) * self.loop.cfg.group_size - self.loop.num_unfinished

    @property
    def is_done(self) -> bool:
        return not (self.is_open or self.loop.num_unfinished)

    def take(self) -> int | None:
        """See Source. Collective within the team where there is room."""
        if not self.is_open or not self.has_room:
            return None
        place = self.team.broadcast_from_first(self.pull() if self.team.is_first else None)
        self.is_open = place is not None
        return place

    def pull(self) -> int | None:
        """Return the place of this team's next prompt; None where there is none."""
        if not self.loop.cfg.is_pulled:
            return super().take()
        number = self.store.add(self.key("next"), 1) - 1
        return number if number < len(self.prompts) else None

    def key(self, word: str) -> str:
        return f"{self.prefix}/{word}"

    def whole(self, state: GroupState) -> None:
        super().whole(state)
        group = self.groups[self.places[state.prompt.prompt_id]]
        group.sampled_by = self.team.index * self.team.size
        if self.sampler.on_group:
            self.sampler.on_group(group, state.seconds)

    @property
    def to_score(self) -> list[Group]:
        """This team's groups."""
        return [self.groups[place] for place in sorted(self.groups)]

    def exchange(self) -> list[Group]:
        """Return the groups of all teams in the prompts' order; None for one that was not finished. Collective."""
        places = sorted(self.places.values())
        groups = self.team.all_gather_groups([self.groups.get(place) for place in places], places)
        if self.team.ranks.is_main:
            self.delete_keys()  # all ranks have left the queue
        return groups

    def delete_keys(self) -> None:
        self.store.delete_key(self.key("next"))


class Refilled(OneRollout):
    """Begins prompts until a step has `num_wanted` mixed groups: a further one for each group that turns out dead.

    The step is full once its first `num_wanted` mixed groups, in the order of the prompts, are there, and with them all
    prompts before the last of these: no slow one is left out for being slow, and the choice does not depend on who was
    faster. Prompts after it, if any were begun, are cut off. As long as groups grow nobody knows how many prompts it
    takes; so many are begun as should do by the share of mixed groups so far. That decides about waste only.

    Prompts are pulled or dealt, as rollout.dispatch says. Each whole group is scored at once and told to the other
    teams, by a numbered event in the store; they rather wait than begin a prompt that may not be needed.
    """

    def __init__(self, sampler: Sampler, prompts: Sequence[Prompt], name: int | str, *, num_wanted: int):
        """`prompts` are all that the step may draw."""
        super().__init__(sampler, prompts, name)
        self.limit_to_share_of(num_wanted)
        self.num_wanted, self.looks = num_wanted, Looks(sampler)
        self.is_mixed: dict[int, bool] = {}
        """Place -> whether its group is mixed, of all that is known here."""
        self.num_mixed = self.num_counted = 0  # mixed ones among the first num_counted places, which are all known
        self.num_taken: int | None = None
        """Number of prompts that the step takes, which ends it; None as long as that is open."""
        self.num_cut_off = 0
        """Groups that were begun by any team, and that the step does not take, once `exchange` knows it."""
        self.ticket: int | None = None
        """The place that this team has pulled and not begun yet."""

    @property
    def is_done(self) -> bool:
        return self.num_taken is not None or super().is_done

    def whole(self, state: GroupState) -> None:
        """Score the group and tell the other teams of it."""
        super().whole(state)
        if self.team.is_first:
            place = self.places[state.prompt.prompt_id]
            self.sampler.score([self.groups[place]])
            number = self.store.add(self.key("events"), 1)
            self.store.set(self.key(f"event/{number}"), f"{place} {int(not is_dead(self.groups[place]))}")
            self.looks.at_once()

    def take(self) -> int | None:
        """See Source. Collective within the team."""
        if self.loop.num_unfinished:
            self.looks.worked()
        wants_one = self.is_open and self.has_room
        place, self.is_open, self.num_taken = self.team.broadcast_from_first(
            self.decide(wants_one) if self.team.is_first else None
        )
        return place

    def decide(self, wants_one: bool) -> tuple[int | None, bool, int | None]:
        """Return the place of the prompt to begin now or None, whether there may be further ones, and `num_taken`."""
        self.look()
        if self.num_taken is not None:
            return None, False, self.num_taken
        if wants_one and self.ticket is None:
            self.ticket = self.pull()
            if self.ticket is None:
                return None, False, None
        if wants_one and self.ticket < self.num_allowed:
            place, self.ticket = self.ticket, None
            return place, True, None
        return None, self.is_open, None

    def idle(self, *, has_calls: bool) -> None:
        if not has_calls:
            self.looks.wait(self.looks.every_s)

    def look(self) -> None:
        """Take note of the groups that have become whole, now and then."""
        if not self.looks.is_due():
            return
        num_events, num_known = self.store.add(self.key("events"), 0), len(self.is_mixed)
        if num_events > num_known:
            events = self.store.multi_get([self.key(f"event/{n}") for n in range(num_known + 1, num_events + 1)])
            self.is_mixed |= {int(place): flag == b"1" for place, flag in map(bytes.split, events)}
            self.count()

    def count(self) -> None:
        """Find how many prompts the step takes, as far as that is known."""
        while self.num_taken is None and self.num_counted in self.is_mixed:
            self.num_mixed += self.is_mixed[self.num_counted]
            self.num_counted += 1
            if self.num_mixed == self.num_wanted or self.num_counted == len(self.prompts):
                self.num_taken = self.num_counted

    @property
    def num_allowed(self) -> int:
        """Number of prompts that may have been begun by now, so that those under way should fill the step. As if some
        mixed groups had been there before (PRIOR_SHARE), lest the first dead ones begin many more."""
        num_known, num_mixed = len(self.is_mixed), sum(self.is_mixed.values())
        prior = max(1.0, PRIOR_SHARE * self.num_wanted)
        expected_share = (num_mixed + prior) / (num_known + prior)
        return num_known + math.ceil(max(self.num_wanted - num_mixed, 0) / expected_share)

    def end(self) -> None:
        """Cut off what nobody needs."""
        self.sampler.engine.abort(list(self.loop.decoding))
        self.sampler.tools.abandon()

    def exchange(self) -> list[Group]:
        """Return the groups of all teams up to the one that completes the step, whoever was faster. Collective."""
        begun = super().exchange()
        # A team whose own prompts are used up may not know yet what the others have found.
        self.is_mixed = {place: not is_dead(group) for place, group in enumerate(begun) if group}
        self.count()
        groups = begun[: self.num_taken]
        self.num_cut_off = len(begun) - len(groups)
        return groups

    def delete_keys(self) -> None:
        super().delete_keys()
        for number in range(1, self.store.add(self.key("events"), 0) + 1):
            self.store.delete_key(self.key(f"event/{number}"))
        self.store.delete_key(self.key("events"))
