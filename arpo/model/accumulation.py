"""The micro-batches of an optimizer step, whose gradients add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

Micro = TypeVar("Micro")


def accumulating(model: nn.Module, micros: Sequence[Micro]) -> Iterator[Micro]:
    """Yield the micro-batches of a step, for one forward and backward pass each; every rank must have as many.

    What need not happen for each of them happens at the last one: copies of the model exchange gradients, ranks that
    have it whole do too, and with model.reshard_after_forward=False layers stay gathered until then. None of it takes
    memory that a single micro-batch would not take.
    """
    if not isinstance(model, FSDPModule):  # nothing is exchanged or gathered
        yield from micros
        return
    for number, micro in enumerate(micros, 1):
        is_last = number == len(micros)
        model.set_requires_all_reduce(is_last)  # among copies of which each is spread over ranks
        if model.is_whole:
            model.set_requires_gradient_sync(is_last)
        if not model.reshards:
            model.set_reshard_after_backward(is_last)
        yield micro
