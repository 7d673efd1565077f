"""The order in which a run trains on its prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

from arpo.config.named import OWN, brief
from arpo.config.returned import call_custom, call_named, checked_instance, checked_integer, checked_number
from arpo.errors import UserError
from arpo.trajectory import Group, Prompt


class PromptOrder:
    """The prompts of each step, as a pure function of the number of prompts drawn before.

    Every epoch has another permutation, from seed and epoch. Its last prompts are left out if they do not fill a step.

    >>> order = PromptOrder(num_prompts=5, num_per_step=2, seed=0, option="data.num_prompts_per_step")
    >>> order.steps_per_epoch, order.draw(0, 2), order.draw(2, 2), order.draw(4, 2)
    (2, ([2, 4], 2), ([3, 0], 4), ([1, 4], 6))
    """

    def __init__(self, num_prompts: int, num_per_step: int, seed: int, *, option: str):
        """`option` is the name of `num_per_step` in errors. Raises UserError if one step needs more prompts."""
        if num_prompts < num_per_step:
            raise UserError(f"{num_prompts} usable rows of data.train are fewer than {option}={num_per_step}; lower it")
        self.num_prompts = num_prompts
        self.num_per_step = num_per_step
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int:
        return self.num_prompts // self.num_per_step

    state: object = None
    """State of a custom order, as JSON values. `add` updates the state; checkpoints store it, a resumed run sets it."""

    def add(self, groups: Sequence[Group]) -> dict[str, float]:
        """Called with a step's groups, once they have rewards; the same groups on all ranks. Return metrics.

        Not called for a step that is not trained on.
        """
        return {}

    def draw(self, num_drawn: int, count: int) -> tuple[list[int], int]:
        """Return the next `count` <= num_per_step prompt indices after `num_drawn`, and num_drawn for the next draw.

        For steps that draw more than once. All indices are of one epoch, so that none comes twice. If the rest of an
        epoch is too short, it is skipped.
        """
        import numpy as np  # here, because --help and the jail import this module too, and should start fast

        per_epoch = self.steps_per_epoch * self.num_per_step
        epoch, start = divmod(num_drawn, per_epoch)
        if start + count > per_epoch:
            epoch += 1
            start = 0
        permutation = np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts)
        return permutation[start : start + count].tolist(), epoch * per_epoch + start + count

    def queue(self, num_drawn: int, count: int) -> list[tuple[int, int]]:
        """Return (prompt index, num_drawn after it) for the next `count` prompts.

        Prompts after the first num_per_step may be of the next epoch. None comes twice, so there may be fewer than
        `count`.
        """
        indices, end = self.draw(num_drawn, min(count, self.num_per_step))
        num_drawn_after = {index: end - len(indices) + i for i, index in enumerate(indices, start=1)}
        for _ in range(count - len(indices)):
            [index], end = self.draw(end, 1)
            num_drawn_after.setdefault(index, end)
        return list(num_drawn_after.items())


def _epochs(prompts: Sequence[Prompt], num_per_step: int, seed: int) -> PromptOrder:
    return PromptOrder(len(prompts), num_per_step, seed, option="data.num_prompts_per_step")


ORDERS: dict[str, Callable[[Sequence[Prompt], int, int], PromptOrder]] = {"epochs": _epochs}
"""data.order -> function of (prompts, data.num_prompts_per_step, run.seed) that returns the order."""


def make_order(name: str, prompts: Sequence[Prompt], num_per_step: int, seed: int) -> PromptOrder:
    """Return the order `name` of data.order. Raises UserError if a custom order has another type, or draws wrongly."""
    order = call_named("data.order", name, ORDERS, prompts, num_per_step, seed)
    checked_instance(order, f"data.order={name}", PromptOrder)
    next_prompts(order, 0, num_per_step, len(prompts))
    own_classes = [kind for kind in type(order).__mro__ if kind.__module__.startswith(OWN)]
    has_own_queue = any("queue" in vars(kind) for kind in own_classes)
    if not has_own_queue and order.num_prompts != len(prompts):
        raise UserError(
            f"data.order={name} knows {order.num_prompts} of the {len(prompts)} prompts, but its `queue` does not say "
            "which; define `queue`, or give super().__init__ all prompts"
        )
    return order


def next_prompts(order: PromptOrder, num_drawn: int, count: int, num_prompts: int) -> list[tuple[int, int]]:
    """Return `order.queue(num_drawn, count)`. Raises UserError if a custom order returns another type, or repeats."""
    method = f"data.order: {type(order).__name__}.queue"
    returned = call_custom(method, order.queue, num_drawn, count)
    checked_instance(returned, f"{method}: the returned value", list)
    drawn = []
    for pair in returned:
        index, after = checked_instance(pair, f"{method}: an entry", tuple, length=2)
        index = checked_integer(index, f"{method}: the index of a prompt", low=0, high=num_prompts - 1)
        after = checked_integer(
            after, f"{method}: num_drawn behind prompt {index}", low=num_drawn + 1, high=sys.maxsize
        )
        drawn.append((index, after))
    has_repeats = len({index for index, _ in drawn}) < len(drawn)
    if has_repeats or not min(count, 1) <= len(drawn) <= count:
        raise UserError(f"{method} returned {len(drawn)} prompts; it must return {count} different ones, or fewer")
    return drawn


def add_groups(order: PromptOrder, groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of `order.add(groups)`. Raises UserError if a custom order returns another type."""
    method = f"data.order: {type(order).__name__}.add"
    returned = call_custom(method, order.add, groups)
    checked_instance(returned, f"{method}: the returned value", dict)
    values = {str(name): checked_number(value, f"{method}: the metric {name!r}") for name, value in returned.items()}
    try:
        json.dumps(order.state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{method}: `state` is no JSON ({brief(error)}), which checkpoints hold") from None
    return values
