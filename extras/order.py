"""An order of training prompts with weights for data sources, and a rest for prompts that are always or never solved.

    from extras.order import MixedOrder

    class Order(MixedOrder):                        # in my_order.py: --data.order my_order.py:Order
        weights = {"hotpotqa": 2, "gsm8k": 0.5}     # times a source's share of the file; default 1; 0 = leave it out
        rest_epochs = 1                             # epochs that an always or never solved prompt rests; 0 = no rest

An epoch is as long as without weights. With a higher weight a source is used more than once per epoch, each time in
another order. Each prompt has a running pass rate over its sampled groups (`extras.keep` measures such rates once,
before RL). The order depends on seed and rewards, not on speed or the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np

from arpo.data import PromptOrder
from arpo.errors import UserError
from arpo.selection import trained_on
from arpo.trajectory import Group, Prompt


class MixedOrder(PromptOrder):
    """An order for data.order. A subclass sets the attributes."""

    weights: ClassVar[Mapping[str, float]] = {}
    rest_epochs = 0
    low = 0.05
    high = 0.95
    """A prompt rests if its running pass rate is at most `low` or at least `high`."""
    newest = 0.5
    """Weight of the newest group in the running rate."""

    def __init__(self, prompts: Sequence[Prompt], num_per_step: int, seed: int):
        super().__init__(len(prompts), num_per_step, seed, option="data.num_prompts_per_step")
        self.ids = [prompt.prompt_id for prompt in prompts]
        self.per_epoch = self.steps_per_epoch * num_per_step
        self._position = 0
        self.state = {}
        """Prompt id -> [running pass rate, first epoch in which it may be drawn again]."""
        members: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            members.setdefault(prompt.data_source, []).append(index)
        if unknown := {*self.weights} - {*members}:
            raise UserError(f"data.order: weights has {min(unknown)!r}; data.train has {', '.join(sorted(members))}")
        self.members = [np.array(members[source]) for source in sorted(members)]
        sizes = [self.weights.get(source, 1) * len(members[source]) for source in sorted(members)]
        used = sum(len(members[source]) for source in members if self.weights.get(source, 1))
        if min(sizes) < 0 or used < num_per_step:
            raise UserError(f"data.order: weights leaves {used} prompts, too few for a step; raise some")
        ends = np.rint(np.cumsum(sizes) / sum(sizes) * self.per_epoch).astype(int)
        self.counts = np.diff(ends, prepend=0)
        self.epoch = lru_cache(2)(self._epoch)

    def _epoch(self, epoch: int) -> list[int]:
        """Return the prompts of an epoch: the sources' positions are shuffled, and filled with each source's next
        prompts."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        np.random.default_rng([self.seed, epoch]).shuffle(sources)
        drawn = np.empty(self.per_epoch, dtype=int)
        for source, (members, count) in enumerate(zip(self.members, self.counts, strict=True)):
            passes, places = np.divmod(np.arange(epoch * count, (epoch + 1) * count), len(members))
            orders = {n: np.random.default_rng([self.seed, source, n]).permutation(members) for n in {*passes.tolist()}}
            drawn[sources == source] = [orders[n][place] for n, place in zip(passes.tolist(), places, strict=True)]
        return drawn.tolist()

    def queue(self, num_drawn: int, count: int) -> list[tuple[int, int]]:
        """Return (prompt index, num_drawn after it) of the next prompts that do not rest, without repetition."""
        found: dict[int, int] = {}
        self._position = num_drawn
        for place in range(num_drawn, num_drawn + (self.rest_epochs + 9) * self.per_epoch):
            epoch, number = divmod(place, self.per_epoch)
            index = self.epoch(epoch)[number]
            if index not in found and self.state.get(self.ids[index], (0, 0))[1] <= epoch:
                found[index] = place + 1
            if len(found) == count:
                break
        return list(found.items())

    def add(self, groups: Sequence[Group]) -> dict[str, float]:
        epoch = self._position // self.per_epoch
        values: dict[str, float] = {}
        for group in groups:
            key = f"order/drawn/{group.prompt.data_source or 'unnamed'}"
            values[key] = values.get(key, 0) + 1
            if solved := [t.is_solved for t in trained_on(group) if t.is_solved is not None]:
                rate = sum(solved) / len(solved)
                before = self.state.get(group.prompt.prompt_id, (rate, 0))[0]
                rate = before + self.newest * (rate - before)
                rests = self.rest_epochs and not self.low < rate < self.high
                self.state[group.prompt.prompt_id] = [round(rate, 4), epoch + 1 + self.rest_epochs if rests else 0]
        return values | {"order/resting": sum(until > epoch + 1 for _, until in self.state.values())}
