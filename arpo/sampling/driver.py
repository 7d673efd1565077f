"""The only loop for tokens and tool results, and the source of its prompts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from arpo.growing import GroupState
from arpo.rollout import Rollout
from arpo.trajectory import Group, Prompt


class Source:
    """Gives out prompts and collects finished groups. This class gives out all prompts at once, on this rank."""

    max_decoding = math.inf
    """No further prompt starts while the engine decodes this many trajectories."""
    max_unfinished = math.inf
    """No further prompt starts while this many trajectories are unfinished."""
    hears_others = False
    """True if other ranks may end the source. Then a rank with an idle engine polls the store while tools work."""

    def __init__(self, loop: Rollout, prompts: Sequence[Prompt], seed: str):
        """`seed` names the random numbers: the run's seed, and the rollout within the run."""
        self.loop = loop
        self.prompts = prompts
        self.seed = seed
        self.left = deque(range(len(prompts)))
        """Indices of the prompts not started yet."""
        self.started: dict[str, int] = {}
        """prompt_id -> index, for all started prompts."""
        self.groups: dict[int, Group] = {}
        """Index of the prompt -> its finished group."""

    def take(self) -> int | None:
        """Return the index of the next prompt to start now; None if there is none."""
        return self.left.popleft() if self.left else None

    def start(self) -> None:
        """Start all groups that may start now."""
        while (index := self.take()) is not None:
            self.started[self.prompts[index].prompt_id] = index
            self.loop.start_group(self.prompts[index], self.seed)

    @property
    def has_room(self) -> bool:
        """True if a further prompt may start."""
        is_busy = self.loop.engine.num_running >= self.max_decoding
        return not is_busy and self.loop.num_unfinished < self.max_unfinished

    def on_finished(self, state: GroupState) -> None:
        """Take a finished group from `loop`."""
        self.groups[self.started[state.prompt.prompt_id]] = state.to_group()

    def idle(self, *, has_calls: bool) -> None:
        """Called when the engine decodes nothing. has_calls: tools are at work."""
        assert has_calls, "trajectories are left, but nothing is at work"

    @property
    def is_done(self) -> bool:
        """True once the source starts no further prompt and waits for no trajectory."""
        return not (self.left or self.loop.num_unfinished)

    def end(self) -> None:
        """Called once the source is done."""


def drive(source: Source, on_round: Callable[[], None] = lambda: None) -> None:
    """Sample until the source is done. Raises the errors of the engine, the tools and the rollout."""
    loop = source.loop
    engine = loop.engine
    tools = loop.tools
    try:
        while True:
            source.start()
            if source.is_done:
                break
            has_calls = tools.num_pending > 0
            if not engine.num_running:
                source.idle(has_calls=has_calls)
            # wait for a tool only if nothing else can happen meanwhile
            block = has_calls and not (engine.num_running or source.hears_others)
            for call_id, result in tools.collect(block=block):
                loop.on_tool_result(call_id, result)
            for chunk in engine.step() if engine.num_running else ():
                loop.on_chunk(chunk)
            for state in loop.take_finished():
                source.on_finished(state)
            on_round()
        source.end()
    except BaseException:
        tools.abandon()  # an exception, or Ctrl-C, leaves calls open
        raise
