"""The order in which a run draws its prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from arpo.config.named import brief
from arpo.config.returned import ask, call, instance, integer, number
from arpo.errors import UserError
from arpo.trajectory import Group, Prompt


class PromptOrder:
    """The prompts of each step, as a pure function of the step, so that a resumed run needs no saved cursor.

    Every epoch has its own permutation (from seed and epoch); prompts at its end that do not fill a step are left out.

    >>> order = PromptOrder(num_prompts=5, num_per_step=2, seed=0, option="data.num_prompts_per_step")
    >>> order.steps_per_epoch, order.indices(0), order.indices(1), order.indices(2)
    (2, [2, 4], [3, 0], [1, 4])
    """

    def __init__(self, num_prompts: int, num_per_step: int, seed: int, *, option: str):
        """`option` names the setting that `num_per_step` comes from. Raises UserError where no step can be filled."""
        if num_prompts < num_per_step:
            raise UserError(f"{num_prompts} usable rows of data.train are fewer than {option}={num_per_step}; lower it")
        self.num_prompts = num_prompts
        self.num_per_step = num_per_step
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int:
        return self.num_prompts // self.num_per_step

    state: object = None
    """What `add` has learnt, as JSON can hold it. A run that goes on sets it."""

    def add(self, groups: Sequence[Group]) -> dict[str, float]:
        """Hear of the groups of a step, once they have rewards: the same on all ranks. Return metrics."""
        return {}

    def indices(self, step: int) -> list[int]:
        """Return the prompt indices of a step (from 0), the same on every rank; rank r of w takes `[r::w]`."""
        return self.draw(step * self.num_per_step, self.num_per_step)[0]

    def draw(self, num_drawn: int, count: int) -> tuple[list[int], int]:
        """Return the next `count` <= num_per_step prompt indices after `num_drawn`, and num_drawn for the next draw.

        For steps that draw more than once. All are of one epoch, so that none comes twice: where the rest of an epoch
        is too short, it is skipped.
        """
        import numpy as np  # here, because a command's --help and a jail import this folder too

        per_epoch = self.steps_per_epoch * self.num_per_step
        epoch, start = divmod(num_drawn, per_epoch)
        if start + count > per_epoch:
            epoch, start = epoch + 1, 0
        permutation = np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts)
        return permutation[start : start + count].tolist(), epoch * per_epoch + start + count

    def queue(self, num_drawn: int, count: int) -> list[tuple[int, int]]:
        """Return (prompt index, num_drawn behind it) of the next `count` prompts: one `draw`, and what follows it.

        Those beyond num_per_step may be of the next epoch; none comes twice, so there may be fewer than `count`.
        """
        indices, end = self.draw(num_drawn, min(count, self.num_per_step))
        found = {index: end - len(indices) + number for number, index in enumerate(indices, start=1)}
        for _ in range(count - len(found)):
            [index], end = self.draw(end, 1)
            found.setdefault(index, end)
        return list(found.items())


def _epochs(prompts: Sequence[Prompt], num_per_step: int, seed: int) -> PromptOrder:
    return PromptOrder(len(prompts), num_per_step, seed, option="data.num_prompts_per_step")


ORDERS: dict[str, Callable[[Sequence[Prompt], int, int], PromptOrder]] = {"epochs": _epochs}
"""data.order -> what makes an order of prompts, data.num_prompts_per_step and run.seed."""


def make_order(name: str, prompts: Sequence[Prompt], num_per_step: int, seed: int) -> PromptOrder:
    """Return the order that data.order names. Raises UserError where one of the user's is none, or draws wrongly."""
    order = instance(ask("data.order", name, ORDERS, prompts, num_per_step, seed), f"data.order={name}", PromptOrder)
    next_prompts(order, 0, num_per_step, len(prompts))
    return order


def next_prompts(order: PromptOrder, num_drawn: int, count: int, num_prompts: int) -> list[tuple[int, int]]:
    """Return what `queue` says. Raises UserError where a user's order returns something else than that."""
    what = f"data.order: {type(order).__name__}.queue"
    drawn = []
    for entry in instance(call(what, order.queue, num_drawn, count), f"{what}: the returned value", list):
        index, behind = instance(entry, f"{what}: an entry", tuple, length=2)
        index = integer(index, f"{what}: the index of a prompt", 0, num_prompts - 1)
        drawn.append((index, integer(behind, f"{what}: num_drawn behind prompt {index}", num_drawn + 1, sys.maxsize)))
    if len({index for index, _ in drawn}) < len(drawn) or not min(count, 1) <= len(drawn) <= count:
        raise UserError(f"{what} returned {len(drawn)} prompts; it must return {count} different ones, or fewer")
    return drawn


def heard(order: PromptOrder, groups: Sequence[Group]) -> dict[str, float]:
    """Tell the order of a step's groups, and return its metrics. Raises UserError where a user's returns others."""
    what = f"data.order: {type(order).__name__}.add"
    found = instance(call(what, order.add, groups), f"{what}: the returned value", dict)
    values = {str(name): number(value, f"{what}: the metric {name!r}") for name, value in found.items()}
    try:
        json.dumps(order.state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what}: `state` is no JSON ({brief(error)}), which checkpoints hold") from None
    return values
