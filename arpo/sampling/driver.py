"""The only loop through which tokens and tool results come in, and a source: what it samples."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from arpo.growing import GroupState
from arpo.rollout import Rollout
from arpo.trajectory import Group, Prompt


class Source:
    """Prompts to sample, and the groups that become of them: here all at once, on this rank. See arpo/sampling."""

    max_decoding = max_unfinished = math.inf
    """Trajectories that the engine decodes, and that are under way, at which no further prompt is begun."""
    hears_others = False
    """True where other ranks may end it: then a rank that decodes nothing does not wait for its tools alone."""

    def __init__(self, loop: Rollout, prompts: Sequence[Prompt], seed: str):
        """`seed` names the random numbers: the run's seed and the rollout among those of the run."""
        self.loop, self.prompts, self.seed = loop, prompts, seed
        self.left = deque(range(len(prompts)))  # places of those that are not begun
        self.places: dict[str, int] = {}  # of those that are, by prompt_id
        self.groups: dict[int, Group] = {}  # whole ones, by place

    def take(self) -> int | None:
        """Return the place of the next prompt to begin now, if any."""
        return self.left.popleft() if self.left else None

    def start(self) -> None:
        """Start all groups that may begin now."""
        while (place := self.take()) is not None:
            self.places[self.prompts[place].prompt_id] = place
            self.loop.start_group(self.prompts[place], self.seed)

    @property
    def has_room(self) -> bool:
        """True where a further prompt may be begun."""
        is_busy = self.loop.engine.num_running >= self.max_decoding
        return not is_busy and self.loop.num_unfinished < self.max_unfinished

    def whole(self, state: GroupState) -> None:
        """Take a group of `loop` that has become whole."""
        self.groups[self.places[state.prompt.prompt_id]] = state.to_group()

    def idle(self, *, has_calls: bool) -> None:
        """Called where the engine decodes nothing; has_calls: tools are at work."""
        assert has_calls, "trajectories are left, but nothing is at work"

    @property
    def is_done(self) -> bool:
        """True once it needs nothing that is unfinished here, and begins nothing more."""
        return not (self.left or self.loop.num_unfinished)

    def end(self) -> None:
        """Called once it is done."""


def drive(source: Source, on_round: Callable[[], None] = lambda: None) -> None:
    """Sample until the source is done, the only place where tokens and results come in. Raises what these raise."""
    loop, engine, tools = source.loop, source.loop.engine, source.loop.tools
    try:
        while True:
            source.start()
            if source.is_done:
                break
            has_calls = tools.num_pending > 0
            if not engine.num_running:
                source.idle(has_calls=has_calls)
            block = has_calls and not (engine.num_running or source.hears_others)
            for call_id, result in tools.collect(block=block):
                loop.on_tool_result(call_id, result)
            for chunk in engine.step() if engine.num_running else ():
                loop.on_chunk(chunk)
            for state in loop.take_finished():
                source.whole(state)
            on_round()
        source.end()
    except BaseException:
        tools.abandon()  # what an exception, or Ctrl-C, leaves open
        raise
