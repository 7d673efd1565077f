"""What is known of the lengths of the responses to each prompt, so that the longest can begin first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arpo.trajectory import Group, Prompt


class ExpectedLengths:
    """The mean length of the responses to each prompt, in sampled tokens, when it was last drawn; it foretells the
    longest one better than the longest of then does (benchmarks/no_rank_waits.py). Every rank keeps the same."""

    def __init__(self, state: Mapping[str, int]):
        """`state` is what a checkpoint kept of it; {} for a new run."""
        self.state = dict(state)
        """prompt_id -> tokens."""

    def add(self, groups: Sequence[Group]) -> None:
        for group in groups:
            tokens = [t.num_sampled_tokens for t in group.trajectories]
            self.state[group.prompt.prompt_id] = sum(tokens) // len(tokens)

    def longest_first(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the prompts' places, by expected length; prompts that were never drawn count as long as the mean."""
        known = [self.state[p.prompt_id] for p in prompts if p.prompt_id in self.state]
        mean = sum(known) / max(len(known), 1)
        return sorted(range(len(prompts)), key=lambda place: -self.state.get(prompts[place].prompt_id, mean))
