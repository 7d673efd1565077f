"""The prompts of a step, in a run whose steps have one size."""

from arpo.data import PromptOrder


def indices(order: PromptOrder, step: int) -> list[int]:
    """The prompt indices of a step (from 0)."""
    return order.draw(step * order.num_per_step, order.num_per_step)[0]
