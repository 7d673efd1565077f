"""The sources of one step: they decide when this team starts which prompt (table in the package's docstring).

The queue is a counter in the process group's store; a pull is one round trip to the store. A sample depends on the
seed, the step, the prompt, the path in the tree and the turn, and never on the rank. Groups come back in the order of
the prompts (`Team.all_gather_groups`). So all later results are the same, no matter which rank sampled a group.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import torch.distributed as dist

from arpo.growing import GroupState
from arpo.sampling.driver import Source
from arpo.sampling.sampler import IDLE_S, Sampler, StorePoller
from arpo.selection import is_dead
from arpo.trajectory import Group, Prompt

PRIOR_SHARE = 1 / 8
"""Groups assumed mixed before any result, per wanted group. More of them make a step longer, because fewer prompts
start; fewer of them waste more started groups. If half of the groups are dead, 1/8 wastes a twentieth of the groups,
1/32 up to a ninth, and with 1 a step takes up to 1.5 times as long (benchmarks/no_rank_waits.py: short workload with 16
ranks, long workload with 8)."""


class OneRollout(Source):
    """The prompts of one rollout. This team samples a fixed share, or pulls prompts (rollout.dispatch).

        dealt     0 2 4 6 belong to team 0, and 1 3 5 7 to team 1. All start at once. With `max_at_once`, a prompt
                  starts only while fewer trajectories than this are unfinished.
        pulled    The next prompt goes to the first team with room: a slow team 1 may get 1 and 4, team 0 all others.

    A pulling team has room while its engine decodes fewer than `max_num_seqs` trajectories; trajectories waiting for
    tools do not count. But the team never has more than an equal share of the prompts unfinished. Without this limit
    the first team would take all prompts if a few engines can hold all of them.
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
        """name: name of the rollout within the run. `label` and `name` make the keys in the store unique."""
        super().__init__(sampler.new_rollout(), prompts, f"{sampler.seed}|{name}")
        self.sampler = sampler
        self.team = sampler.team
        self.store = self.team.ranks.store or dist.HashStore()
        self.prefix = f"prompts/{label}/{name}"
        self.left = deque(self.team.share(range(len(prompts))))  # dealt to this team; not used if prompts are pulled
        self.max_unfinished = max_at_once or math.inf
        if sampler.rollout.is_pulled:
            assert self.team.ranks.store or self.team.num_teams == 1, "ranks without a store cannot share a queue"
            self.limit_to_share_of(len(prompts))
        self.is_open = True
        """False once there is no further prompt for this team."""

    def limit_to_share_of(self, num_prompts: int) -> None:
        """Start prompts only while the engine has a free place, and at most this team's share of them at once."""
        self.max_decoding = self.sampler.max_num_seqs
        self.max_unfinished = math.ceil(num_prompts / self.team.num_teams) * self.loop.cfg.group_size

    @property
    def num_finished(self) -> int:
        """Number of ended trajectories, over all groups started here."""
        return len(self.started) * self.loop.cfg.group_size - self.loop.num_unfinished

    @property
    def is_done(self) -> bool:
        return not (self.is_open or self.loop.num_unfinished)

    def take(self) -> int | None:
        """See Source. Collective within the team if there is room."""
        if not self.is_open or not self.has_room:
            return None
        index = self.team.broadcast_from_first(self.pull() if self.team.is_first else None)
        self.is_open = index is not None
        return index

    def pull(self) -> int | None:
        """Return the index of this team's next prompt; None if there is none."""
        if not self.loop.cfg.is_pulled:
            return super().take()
        index = self.store.add(self.key("next"), 1) - 1
        return index if index < len(self.prompts) else None

    def key(self, word: str) -> str:
        """Return a key in the store. ("next") -> "prompts/rollout/7/next" for step 7"""
        return f"{self.prefix}/{word}"

    def on_finished(self, state: GroupState) -> None:
        super().on_finished(state)
        group = self.groups[self.started[state.prompt.prompt_id]]
        group.sampled_by = self.team.index * self.team.size
        if self.sampler.on_group:
            self.sampler.on_group(group, state.seconds)

    @property
    def to_score(self) -> list[Group]:
        """This team's finished groups, in the order of the prompts."""
        return [self.groups[index] for index in sorted(self.groups)]

    def exchange(self) -> list[Group | None]:
        """Return the groups of all teams, in the order of the prompts; None for an unfinished group. Collective."""
        indices = sorted(self.started.values())
        groups = self.team.all_gather_groups([self.groups.get(index) for index in indices], indices)
        if self.team.ranks.is_main:
            self.delete_keys()  # all ranks have left the queue
        return groups

    def delete_keys(self) -> None:
        self.store.delete_key(self.key("next"))


class Refilled(OneRollout):
    """Starts prompts until a step has `num_wanted` mixed groups: a further prompt for each dead group.

    The step takes all prompts up to the last wanted group: mixed group number `num_wanted` in the order of the prompts.
    So no prompt is left out for being slow, and the choice does not depend on a rank's speed. Later prompts are cut
    off, even if started. The final number of prompts is unknown at the start. The number to start is estimated from the
    share of mixed groups so far; a wrong estimate only wastes samples.

    Prompts are pulled or dealt, as rollout.dispatch says. Each finished group is scored at once and reported to the
    other teams by a numbered event in the store. A team rather waits than wastes a prompt.
    """

    def __init__(self, sampler: Sampler, prompts: Sequence[Prompt], name: int | str, *, num_wanted: int):
        """`prompts`: all prompts available to the step."""
        super().__init__(sampler, prompts, name)
        self.limit_to_share_of(num_wanted)
        self.num_wanted = num_wanted
        self.poller = StorePoller(sampler)
        self.hears_others = self.team.num_teams > 1
        self.is_mixed: dict[int, bool] = {}
        """Index of the prompt -> True if its group is mixed, for all groups known to this rank."""
        self.num_counted = 0
        """Number of leading prompts with known groups."""
        self.num_mixed = 0
        """Number of mixed groups among them."""
        self.num_taken: int | None = None
        """Number of prompts that the step takes, which ends it; None while that is open."""
        self.num_cut_off = 0
        """Started groups, of all teams, that the step does not take. Known after `exchange`."""
        self.pulled: int | None = None
        """Index of the prompt pulled by this team, but not started yet."""

    @property
    def is_done(self) -> bool:
        return self.num_taken is not None or super().is_done

    def on_finished(self, state: GroupState) -> None:
        """Score the group, and report to the other teams whether it is mixed."""
        super().on_finished(state)
        if self.team.is_first:
            index = self.started[state.prompt.prompt_id]
            group = self.groups[index]
            self.sampler.score([group])
            event = self.store.add(self.key("events"), 1)
            self.store.set(self.key(f"event/{event}"), f"{index} {int(not is_dead(group))}")
            self.poller.make_due()

    def take(self) -> int | None:
        """See Source. Collective within the team."""
        if self.loop.num_unfinished:
            self.poller.note_work()
        has_room = self.is_open and self.has_room
        decision = self.decide(has_room) if self.team.is_first else None
        index, self.is_open, self.num_taken = self.team.broadcast_from_first(decision)
        return index

    def decide(self, has_room: bool) -> tuple[int | None, bool, int | None]:
        """Return the index of the prompt to start now or None, whether more may follow, and `num_taken`."""
        self.poll()
        if self.num_taken is not None:
            return None, False, self.num_taken
        if has_room and self.pulled is None:
            self.pulled = self.pull()
            if self.pulled is None:
                return None, False, None
        if has_room and self.pulled < self.num_allowed:
            index, self.pulled = self.pulled, None
            return index, True, None
        return None, self.is_open, None

    def idle(self, *, has_calls: bool) -> None:
        if not has_calls:
            self.poller.wait(self.poller.every_s)
        elif self.hears_others:
            self.poller.wait(IDLE_S)

    def poll(self) -> None:
        """Read the events of newly finished groups, if a poll is due."""
        if not self.poller.is_due():
            return
        num_events = self.store.add(self.key("events"), 0)
        num_known = len(self.is_mixed)
        if num_events > num_known:
            events = self.store.multi_get([self.key(f"event/{n}") for n in range(num_known + 1, num_events + 1)])
            for event in events:
                index, flag = event.split()
                self.is_mixed[int(index)] = flag == b"1"
            self.count_mixed()

    def count_mixed(self) -> None:
        """Count the mixed groups in the order of the prompts, up to the first unknown one. Set `num_taken` if full."""
        while self.num_taken is None and self.num_counted in self.is_mixed:
            self.num_mixed += self.is_mixed[self.num_counted]
            self.num_counted += 1
            if self.num_mixed == self.num_wanted or self.num_counted == len(self.prompts):
                self.num_taken = self.num_counted

    @property
    def num_allowed(self) -> int:
        """Number of prompts that may have started by now: those with known groups, and as many more as should fill the
        step.

        The estimate of the mixed share adds a few assumed mixed groups (PRIOR_SHARE). Without them, the first dead
        groups would start many more prompts.
        """
        num_known = len(self.is_mixed)
        num_mixed = sum(self.is_mixed.values())
        prior = max(1.0, PRIOR_SHARE * self.num_wanted)
        expected_share = (num_mixed + prior) / (num_known + prior)
        return num_known + math.ceil(max(self.num_wanted - num_mixed, 0) / expected_share)

    def end(self) -> None:
        """Cut off the trajectories not needed by the step."""
        self.sampler.engine.abort(list(self.loop.decoding))
        self.sampler.tools.abandon()

    def exchange(self) -> list[Group]:
        """Return the groups of all teams up to the last wanted one. Collective."""
        groups = super().exchange()
        # A team without prompts left may not have read the newest events, so count again from the groups. All prompts
        # up to the last wanted group have started. So up to there, a group's position in `groups` is the index of its
        # prompt.
        self.is_mixed = {index: not is_dead(group) for index, group in enumerate(groups) if group}
        self.count_mixed()
        taken = groups[: self.num_taken]
        self.num_cut_off = len(groups) - len(taken)
        return taken

    def delete_keys(self) -> None:
        super().delete_keys()
        for event in range(1, self.store.add(self.key("events"), 0) + 1):
            self.store.delete_key(self.key(f"event/{event}"))
        self.store.delete_key(self.key("events"))
