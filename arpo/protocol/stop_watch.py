"""Stop strings across the cut of a turn, which the engine cannot see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class StopWatch:
    """Looks for a stop string that lies across the cut of a turn. To the engine that goes on with the turn the tokens
    before the cut are prompt, in which it looks for nothing."""

    window: list[int]
    """Last tokens before the cut, and those sampled since."""
    num_left: int
    """Tokens after which no stop string can reach back over the cut."""

    @classmethod
    def at_cut(cls, turn_ids: list[int], stops: Sequence[str]) -> StopWatch | None:
        """Return that of a turn of which these tokens are sampled; None where there is nothing to watch."""
        longest = max(map(len, stops), default=1) - 1  # each token of a stop string has a character of it, or more
        return cls(turn_ids[-longest:], longest) if turn_ids and longest else None

    def find(
        self, token_ids: list[int], decode: Callable[[Sequence[int]], str], stops: Sequence[str]
    ) -> tuple[int, str] | None:
        """Return how many of the next tokens make such a string complete, and the string; None where there is none."""
        for count, token in enumerate(token_ids[: self.num_left], 1):
            self.window.append(token)
            text = decode(self.window)
            if ends := [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]:
                return count, min(ends)[1]
        self.num_left -= min(len(token_ids), self.num_left)
        return None
