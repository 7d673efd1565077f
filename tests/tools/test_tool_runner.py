"""An exception of a tool costs one trajectory, except where the run cannot go on."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from helpers.fakes import EchoTool
from helpers.scripted_rollout import SHORT, call_then_answer, play, tool_text

from arpo.config import exits
from arpo.errors import UserError
from arpo.metrics import rollout_metrics
from arpo.sampling.health import ToolHealth
from arpo.tools import base
from arpo.tools.base import ToolResult, ToolRunner
from arpo.trajectory import StopReason


@pytest.mark.parametrize("error", [RecursionError("bug"), SystemExit(4), asyncio.CancelledError("leaked")], ids=repr)
def test_an_exception_of_a_tool_costs_its_trajectory_and_not_the_run(caplog, error):
    """HKUDS/nanobot PR 1072 and awslabs/agentcore-rl-toolkit PR 25: the CancelledError of a library ended the run."""

    def broken(_):
        raise error

    [group] = play(call_then_answer, tools=[EchoTool("search", broken)])
    assert all(t.stop_reason == StopReason.ERROR and tool_text(t) == "" for t in group.trajectories)
    assert {call.error_kind for t in group.trajectories for call in t.tool_calls} == {"exception"}
    assert rollout_metrics([group]).values()["tools/search/failed_exception"] == SHORT.group_size
    assert not ToolHealth().judge([group]).may_train
    assert [record.exc_info[0] for record in caplog.records] == [type(error)]  # shown once


async def leave(_=None):
    sys.exit(4)


async def leave_unawaited():
    asyncio.get_running_loop().create_task(leave())
    await asyncio.sleep(0)
    return "went on"


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (lambda: asyncio.wait_for(leave(), 60), "exception"),
        (lambda: asyncio.wait_for(asyncio.to_thread(sys.exit, 4), 60), "exception"),
        (lambda: asyncio.gather(leave()), "exception"),  # cpython 108549
        (leave_unawaited, None),
    ],
    ids=["wait_for", "to_thread", "gather", "unawaited"],
)
def test_a_task_of_a_tool_that_exits_leaves_the_loop_to_the_other_calls(run, kind):
    """asyncio lets SystemExit through, also of a task that someone awaits, and the loop would end (uvloop 336)."""

    class Leaves(EchoTool):
        async def run(self, argument):
            return ToolResult(str(await run()), ok=True)

    runner = ToolRunner({"leaves": Leaves("leaves"), "echo": EchoTool("echo")})
    runner.start("first", "leaves", "x")
    [(_, first)] = runner.collect(block=True)
    runner.start("second", "echo", "x")
    [(_, second)] = runner.collect(block=True)
    runner.close()
    assert (first.error_kind, second.ok) == (kind, True)


def test_a_tool_that_blocks_the_loop_at_the_end_of_a_run_does_not_fail_it(monkeypatch, caplog):
    monkeypatch.setattr(base, "CLOSE_TIMEOUT_S", 0.2)
    may_go_on = threading.Event()

    class Blocks(EchoTool):
        async def aclose(self):
            may_go_on.wait(60)

    runner = ToolRunner({"blocks": Blocks("blocks")})
    runner.close()
    assert "the blocks tool could not be closed" in caplog.text and runner._thread.is_alive()
    may_go_on.set()
    runner._thread.join(60)
    assert not runner._thread.is_alive()


def test_a_user_error_of_a_tool_ends_the_rollout_and_one_that_returns_no_result_is_named():
    class Plain(EchoTool):
        async def run(self, argument):
            return "text"

    with pytest.raises(UserError, match="the search tool: run returned str; return a ToolResult"):
        play(call_then_answer, tools=[Plain("search")])

    def refused(_):
        raise UserError("SERPER_API_KEY is refused; set another one")

    class InAGroup(EchoTool):
        async def run(self, argument):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.to_thread(refused, argument))

    for tool in (EchoTool("search", refused), InAGroup("search")):
        with pytest.raises(UserError, match="is refused; set another one"):
            play(call_then_answer, tools=[tool])


STUCK = """
import time
from arpo.config import exits
from arpo.tools.base import Tool, ToolRunner
exits.SAY_AFTER_S = exits.GIVE_UP_S = 0.5

class Stuck(Tool):
    tag = "stuck"
    async def run(self, argument):
        time.sleep(600)

runner = ToolRunner({"stuck": Stuck()})
runner.start("call", "stuck", "x")
runner.collect(block=True)
"""


def test_a_tool_that_blocks_the_loop_of_all_tools_is_named_and_ends_the_run():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=100)
    named, last = done.stderr.splitlines()
    assert named.startswith(
        "<string>:10 run, which blocks the loop of the tools (asyncio.to_thread would not), has not"
    )
    assert last.startswith("error: <string>:10 run, which blocks") and done.returncode == 2


def test_a_closed_runner_is_not_taken_for_a_blocked_one(caplog, monkeypatch):
    monkeypatch.setattr(exits, "SAY_AFTER_S", 0.01)
    runner = ToolRunner({})
    runner.close()
    time.sleep(1.5)
    assert "has not returned" not in caplog.text


def test_a_tool_that_cannot_be_closed_keeps_nobody_from_closing_the_others(caplog):
    class Stubborn(EchoTool):
        async def aclose(self):
            raise RecursionError

    class Closing(EchoTool):
        async def aclose(self):
            self.arguments.append("closed")

    last = Closing("python")
    ToolRunner({"search": Stubborn("search"), "python": last}).close()
    assert last.arguments == ["closed"] and "the search tool could not be closed" in caplog.text


@pytest.mark.parametrize("block", [True, False])
def test_who_waits_long_for_tools_says_for_which(caplog, monkeypatch, block):
    """Also who asks again and again without waiting, like a rank that hears others."""
    monkeypatch.setattr(base, "TELL_AFTER_S", 0.01)

    class Slow(EchoTool):
        async def run(self, argument):
            while "no tool call has ended" not in caplog.text:
                await asyncio.sleep(0.01)
            return await super().run(argument)

    runner = ToolRunner({"search": Slow("search")})
    runner.start("call", "search", "x")
    while not (found := runner.collect(block=block)):
        time.sleep(0.005)
    assert found[0][1].ok and "for 0 min; under way: {'search': 1}" in caplog.text
    runner.close()
