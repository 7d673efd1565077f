"""Finds stop strings that cross the cut of a turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass
class StopWatch:
    """Looks for a stop string that crosses the cut of a turn.

    A turn is cut if its rest is sampled in a second request. Then the tokens before the cut are part of the prompt, and
    the engine looks for no stop string there.
    """

    stops: Sequence[str]
    window: list[int]
    """The last tokens before the cut, and the tokens sampled since."""
    num_left: int
    """Number of next tokens to look at. After them no stop string can reach back over the cut."""

    @classmethod
    def at_cut(cls, turn_ids: list[int], stops: Sequence[str]) -> StopWatch | None:
        """Return a watch for a turn that was cut after these tokens. Return None if no stop string can cross."""
        # Each token of a stop string has at least one of its characters.
        max_tokens = max(map(len, stops), default=1) - 1
        return cls(stops, turn_ids[-max_tokens:], max_tokens) if turn_ids and max_tokens else None

    def find(self, token_ids: list[int], decode: Callable[[Sequence[int]], str]) -> tuple[int, str] | None:
        """Return (number of next tokens up to the end of a stop string, the stop string), or None."""
        for count, token in enumerate(token_ids[: self.num_left], 1):
            self.window.append(token)
            text = decode(self.window)
            ends = [(text.find(stop) + len(stop), stop) for stop in self.stops if stop in text]
            if ends:
                _, first_stop = min(ends)
                return count, first_stop
        self.num_left -= min(len(token_ids), self.num_left)
        return None
