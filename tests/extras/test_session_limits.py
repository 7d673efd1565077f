"""Sessions at the limit of their number, and sessions that are given up while they are made."""

import time
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from helpers.python_tools import wait_until
from helpers.stateful import ForkedNotes, Notes

from arpo.protocol.prompts import About
from arpo.tools.base import ToolContext, ToolResult, ToolRunner
from extras.tools.environment import EnvironmentTool


class Calls:
    """A runner, and calls that belong to trajectories of it."""

    def __init__(self, *tools):
        self.runner = ToolRunner({tool.tag: tool for tool in tools})
        self.sessions = self.runner.sessions

    def start(self, tag: str, prompt_id: str, trajectory_id: str, turn: int) -> None:
        context = ToolContext(prompt_id, trajectory_id, turn)
        self.runner.start(f"{prompt_id} {trajectory_id}", tag, f"{turn}", context)

    def call(self, tag: str, prompt_id: str, trajectory_id: str, turn: int) -> ToolResult:
        self.start(tag, prompt_id, trajectory_id, turn)
        [(_, result)] = self.runner.collect(block=True)
        return result

    def all_ending(self) -> int:
        """Collect what runs, and end each trajectory that is answered. Return their number."""
        num, end = 0, time.monotonic() + 60
        while self.runner.num_pending and time.monotonic() < end:
            for call_id, _ in self.runner.collect(block=False):
                self.sessions.end(tuple(call_id.split()))
                num += 1
            time.sleep(0.005)
        return num


def test_a_session_beyond_the_limit_is_not_copied_so_that_copies_never_take_all_places():
    """Else the branches of two copies, of which each needs a second session, would wait for each other's for ever."""
    limited, other = ForkedNotes("search", max_sessions=2), Notes("python", max_sessions=8)
    calls = Calls(limited, other)
    sessions = calls.sessions
    calls.call("search", "p1", "0", 0)
    sessions.mark(("p1", "0"), 1)
    assert wait_until(lambda: limited.num_open == 2)  # the session and its copy
    calls.call("python", "p2", "0", 0)
    calls.call("search", "p2", "0", 1)  # goes over the limit: it holds a session of another tool
    assert limited.num_open == 3
    sessions.end(("p1", "0"))
    assert wait_until(lambda: limited.num_open == 2)
    sessions.mark(("p2", "0"), 2)
    for child in ("0.0", "0.1"):
        sessions.fork(("p1", "0"), 1, ("p1", child))
        sessions.fork(("p2", "0"), 2, ("p2", child))
    for prompt_id in ("p1", "p2"):
        sessions.retain(prompt_id, [])
    sessions.end(("p2", "0"))
    for child in ("0.0", "0.1"):
        calls.start("search", "p1", child, 1)
        calls.start("search", "p2", child, 2)
    with closing(calls.runner):
        assert calls.all_ending() == 4
    assert limited.num_open == other.num_open == 0


@dataclass
class Slow(Notes):
    """Takes its time to make a session."""

    begun: int = 0

    async def open(self, context):
        self.begun += 1
        return await super().open(context)


class World(EnvironmentTool):
    """An environment that takes half a second to begin."""

    tag = "search"
    about = About("a world", "to move, write <search> 1 </search>", "")
    begun = num_open = 0

    def make(self, context):
        return SimpleNamespace(reset=self.reset, step=lambda action: time.sleep(3600), close=self.close_world)

    def reset(self, seed):
        self.begun += 1
        self.num_open += 1
        time.sleep(0.5)
        return "o", {}

    def close_world(self):
        self.num_open -= 1


@pytest.mark.parametrize("tool", [Slow(jitter_s=1.0), World()], ids=["session", "environment"])
def test_what_is_still_being_made_when_all_ends_is_closed(tool):
    calls = Calls(tool)
    calls.start("search", "p", "0", 0)
    assert wait_until(lambda: tool.begun == 1)
    calls.sessions.end_all()
    assert tool.num_open == 0 and tool.begun == 1
    calls.runner.close()


def test_an_environment_that_hangs_costs_its_trajectory_and_not_the_run():
    stuck = World()
    stuck.deadline_s = 2.0  # a step takes for ever
    calls = Calls(stuck)
    assert calls.call("search", "p", "0", 0).error_kind == "exception"
    calls.runner.close()


@pytest.mark.parametrize("ends", [True, False])
def test_a_prompt_that_is_forgotten_leaves_nothing_open(ends):
    """Also sessions of trajectories of whose end nobody has told, and copies that nobody has taken."""
    notes = ForkedNotes(max_sessions=4)
    calls = Calls(notes)
    for path in ("0", "1"):
        calls.call("search", "p", path, 0)
        calls.sessions.mark(("p", path), 1)
    calls.sessions.fork(("p", "0"), 1, ("p", "0.0"))
    assert wait_until(lambda: notes.num_open == 4)
    if ends:
        for path in ("0", "1", "0.0"):
            calls.sessions.end(("p", path))
    calls.sessions.forget("p")
    assert wait_until(lambda: notes.num_open == 0)
    assert wait_until(lambda: calls.sessions._places["search"]._value == 4)
    calls.runner.close()
