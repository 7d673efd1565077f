"""The <notebook> tool in a real jail: what stays from cell to cell, and what ends it."""

import asyncio
import os
import random
import signal
from dataclasses import replace

import pytest
from helpers.notebooks import CFG, CONTEXT, cells, talk, texts
from helpers.python_tools import TIERS, processes_of, start, started, wait_until
from helpers.scripted_rollout import ANSWER, LONG, play, prompt

from arpo.errors import UserError
from arpo.jail.client import Sandbox
from arpo.jail.host import NUM_SPARES
from arpo.options import BranchingConfig
from arpo.tools.base import ToolContext, ToolRunner
from extras.tools.notebook import Notebook, NotebookConfig, NotebookTool
from extras.tools.session_tool import CannotFork, SessionLost


@pytest.fixture(scope="module", params=TIERS)
def tool(request):
    with started(CFG, request.param, kind=NotebookTool) as tool:
        yield tool


def test_names_stay_from_cell_to_cell_and_are_the_sessions_own(tool):
    assert texts(tool, "import math\ndef f(x): return math.sqrt(x)", "y = f(16)", "y", "y + 1\nprint('a')\ny + 2") == [
        "(no output)", "(no output)", "4.0", "a\n6.0"
    ]  # fmt: skip
    assert texts(tool, "y") == ["NameError: name 'y' is not defined"]
    assert asyncio.run(tool.run("6 * 7")).text == "42"  # without a session, in one of its own


def test_what_all_notebooks_keep_has_one_limit_and_the_largest_is_replayed():
    tool = start(replace(CFG, total_mib=150), TIERS[0], kind=NotebookTool)

    async def story() -> list[str]:
        small, large, third = [await tool.open(CONTEXT) for _ in range(3)]
        for session, num_mib in ((small, 10), (large, 80), (third, 40)):
            assert (await tool.run(f"x = b'x' * ({num_mib} << 20)", CONTEXT, session)).ok
        await tool.run("y = b'y' * (30 << 20)", CONTEXT, third)
        with pytest.raises(SessionLost):
            await tool.run("len(x)", CONTEXT, large)
        found = [(await tool.run("len(x) >> 20", CONTEXT, session)).text for session in (small, third)]
        for session in (small, large, third):
            await tool.close(session)
        await tool.aclose()
        return found

    assert asyncio.run(story()) == ["10", "40"]


def test_removed_files_that_a_notebook_holds_count_to_what_it_keeps():
    async def story(session: Notebook) -> int:
        code = "import os\nf = open('f', 'wb')\nos.remove('f')\nfor _ in range(20): f.write(bytes(1 << 20))\nf.flush()"
        assert (await tool.run(code, CONTEXT, session)).ok
        return session.kept_bytes

    with started(CFG, TIERS[0], kind=NotebookTool) as tool:
        assert 20 << 20 <= talk(tool, story) < 40 << 20


def test_errors_and_exits_end_their_cell_only(tool):
    found = cells(tool, "x = 1\n1/0", "raise SystemExit(3)", "exit()", "x", "def", "x = 2; x")
    assert [r.text for r in found] == [
        "ZeroDivisionError: division by zero", "The process exited with code 3", "(no output)", "1",
        '  File "<string>", line 1\n    def\n       ^\nSyntaxError: invalid syntax', "2",
    ]  # fmt: skip
    assert [r.ok for r in found] == [False, False, True, True, False, True]


def test_files_are_there_for_one_cell(tool):
    made, gone = texts(
        tool,
        "import os\nos.makedirs('a/b')\nopen('a/b/f', 'w').write('x')\nos.chdir('a')\nos.listdir('.')",
        "[name for name in os.listdir('.') if name in 'ab'], os.path.exists('b')",
    )
    assert made == "['b']" and gone == "([], False)"


@pytest.mark.parametrize("tier", TIERS)
def test_matplotlibs_list_of_fonts_comes_with_the_cells_that_plot(tier):
    """matplotlib/matplotlib#32246: without it, each new notebook would search for the fonts."""
    pytest.importorskip("matplotlib")
    look = "import os\nfolder = os.path.expanduser('~/.cache/matplotlib')\n"
    listed = f"{look}[name[:10] for name in os.listdir(folder)]"
    with started(replace(CFG, wall_s=300.0, session_cpu_s=300.0), tier, kind=NotebookTool) as tool:
        assert texts(tool, f"{look}os.path.exists(folder)  # plot nothing") == ["False"]  # which starts the search
        assert tool._fonts.result().status == "ok"
        found = texts(tool, listed, "import os\nos.path.exists(os.path.expanduser('~/.cache'))", listed)
        assert found == ["['fontlist-v']", "False", "['fontlist-v']"]


def test_a_cells_processes_end_with_it(tool):
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(3600)\n"
    [first, then] = texts(tool, code, "1 + 1")
    assert then == "2"
    assert first == "(no output)" or "PermissionError" in first  # where code may start no processes


def test_a_child_that_returns_from_the_code_does_not_speak_for_the_cell(forking):
    code = "import os\nx = os.fork()\nif x:\n    os.waitpid(x, 0)\n    print('parent')"
    assert texts(forking, code, "x > 0") == ["parent", "True"]


def test_code_that_writes_to_the_supervisors_channel_harms_nobody_else(tool):
    forged = texts(tool, "import os\nx = 1\nos.write(3, b'\\0')\nimport time\ntime.sleep(0.3)\nprint('late')", "x")
    # It has only fooled itself: what the second cell shows is the end of the first, its own, or both.
    assert forged[1] in ("late", "late\n1", "1")
    assert texts(tool, "import os\nos.close(3)", "1 + 1")[1] == "2"
    assert texts(tool, "1 + 1") == ["2"]


def test_a_process_whose_name_is_no_text_is_counted_as_any_other(tool):
    named = "import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff')\ntime.sleep(0.3)\nx = 1"
    assert texts(tool, named, "x + 1") == ["(no output)", "2"]


def test_a_process_that_dies_ends_the_notebook_and_the_next_cell_begins_a_new_one(tool):
    died, after, more = cells(tool, "import os\nx = 1\nos._exit(4)", "'x' in globals()", "'os' in globals()")
    assert died.text == f"The process exited with code 4\n{NotebookTool.ended}" and not died.ok and not died.infra_error
    assert [after.text, more.text] == ["False", "False"]


def test_a_cell_that_prints_without_end_or_takes_too_much_memory_ends_the_notebook(tool):
    printed, after = cells(tool, "while True: print('x' * 10000)", "1")
    assert printed.error_kind == "output_limit" and printed.text.endswith(NotebookTool.ended) and after.text == "1"
    took, still = cells(tool, "x = 1\ny = bytearray(10**10)", "x")
    assert took.text == "MemoryError" and still.text == "1"  # an allocation that fails is an error of the code


@pytest.mark.slow
@pytest.mark.parametrize("tier", TIERS)
def test_limits_hold_for_each_cell_and_for_the_notebook(tier):
    """CPU limits with much patience, as a busy machine gives little CPU time per second."""
    burn = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"
    with started(replace(CFG, wall_s=4.0, session_cpu_s=60.0), tier, kind=NotebookTool) as short:
        slept, after = cells(short, "x = 1\nimport time\ntime.sleep(100)", "1")
        assert slept.error_kind == "timeout" and slept.text.endswith(NotebookTool.ended) and after.text == "1"
    with started(replace(CFG, wall_s=120.0, session_cpu_s=60.0), tier, kind=NotebookTool) as long:
        long.sandbox.close()
        long.sandbox = Sandbox(replace(long.limits(long.cfg), cpu_s=0.6, session_cpu_s=1.0), tier=tier)
        one, two, three, after = cells(long, burn.format(0.4), burn.format(0.4), burn.format(0.4), "1")
        assert one.ok and two.ok and three.error_kind == "cpu_limit" and after.text == "1"
        if tier == "namespaces":  # the other tier's kernel limits the notebook, not a cell
            assert cells(long, burn.format(9))[0].error_kind == "cpu_limit"


def test_a_session_limit_below_that_of_a_call_is_refused():
    with pytest.raises(
        UserError, match=r"tools.options: notebook.session_cpu_s=5 must be at least .* one call may compute: 10"
    ):
        NotebookTool(NotebookConfig(session_cpu_s=5.0))
    with pytest.raises(UserError, match=r"tools.options: notebook.cache is empty, and mode replay"):
        NotebookTool(NotebookConfig(mode="replay"))


@pytest.mark.parametrize("tool", ["landlock"], indirect=True)
def test_a_tier_that_allows_no_processes_forks_nothing(tool):
    async def story(session: Notebook) -> str:
        await tool.run("x = 1", CONTEXT, session)
        with pytest.raises(CannotFork):
            await tool.fork(session, CONTEXT)
        return (await tool.run("x", CONTEXT, session)).text

    assert talk(tool, story) == "1"


def test_a_lost_host_costs_a_replay(tool):
    async def story(session: Notebook) -> None:
        await tool.run("x = 1", CONTEXT, session)
        os.kill(tool.sandbox.host.pid, signal.SIGKILL)
        with pytest.raises(SessionLost):
            while True:  # the kernel takes a moment
                await tool.run("x", CONTEXT, session)

    talk(tool, story)
    assert texts(tool, "x = 2", "x")[1] == "2"


@pytest.mark.slow
def test_a_recorded_cell_is_found_after_the_same_cells_only(tmp_path):
    cfg = replace(CFG, cache=str(tmp_path / "cells.sqlite"))
    script = lambda _p, path, turn: [f"<notebook>x = {path}</notebook>", "<notebook>x</notebook>", ANSWER][turn]  # noqa: E731
    replies = []
    for mode in ("record", "record", "replay_strict"):
        tool = start(replace(cfg, mode=mode), kind=NotebookTool)
        [group] = play(script, tools=[tool], prompts=[prompt(tools=("notebook",))])
        replies.append([[(c.result, c.cached) for c in t.tool_calls] for t in group.trajectories])
    assert replies[0] == [[("(no output)", False), (str(n), False)] for n in range(4)]
    assert replies[1] == replies[2] == [[("(no output)", True), (str(n), True)] for n in range(4)]
    with pytest.raises(UserError, match="no recorded result of '<notebook >x<"):  # as a first cell it was never run
        tool = start(replace(cfg, mode="replay_strict"), kind=NotebookTool)
        play(lambda *_: "<notebook>x</notebook>", tools=[tool], prompts=[prompt(tools=("notebook",))])


@pytest.mark.slow
def test_a_cell_that_is_new_runs_after_those_that_were_answered_from_the_cache(tmp_path):
    cfg = replace(CFG, cache=str(tmp_path / "cells.sqlite"))
    for last in (1, 2):

        def script(_prompt, _path, turn, last=last):
            return [f"<notebook>{code}</notebook>" for code in ("x = 40", f"x + {last}")][turn] if turn < 2 else ANSWER

        [group] = play(script, tools=[start(cfg, kind=NotebookTool)], prompts=[prompt(tools=("notebook",))])
        assert {t.tool_calls[1].result for t in group.trajectories} == {str(40 + last)}


def wandering(seed: int):
    """Random cells that change, show, draw, fail, exit and leave files and threads behind."""

    def script(prompt_id: str, path: str, turn: int) -> tuple[str, float]:
        rng = random.Random(f"{seed}|{prompt_id}|{path}|{turn}")
        codes = [
            f"log = globals().get('log', []) + ['{path}-{turn}']\nlog",
            "import random\nrandom.random(), globals().get('log')",
            "log[::-1]", "1/0", "open('f', 'a').write('x')", "raise SystemExit(2)",
            "import os\nos._exit(1)",
            "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        ]  # fmt: skip
        what = rng.choices(codes, [6, 4, 3, 1, 2, 1, 1, 1])[0]
        return (f"<notebook>{what}</notebook>" if turn < 6 else ANSWER), rng.uniform(0.2, 2.0)

    return script


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["random", "tree_grpo"])
def test_siblings_read_what_a_fresh_trajectory_with_their_calls_reads(selector):
    base = {"base": 1.0} if selector == "random" else {}
    branching = BranchingConfig(selector=selector, num_initial_rollouts=2, **base)
    prompts, num_branches = [prompt(tools=("notebook",))], 0
    with started(CFG, kind=NotebookTool) as reference:
        for seed in range(3):
            tools = [start(CFG, kind=NotebookTool)]
            [group] = play(wandering(seed), tools=tools, cfg=LONG, branching=branching, prompts=prompts)
            for t in group.trajectories:
                codes = [call.argument for call in t.tool_calls]
                assert [call.result for call in t.tool_calls] == texts(reference, *codes), t.trajectory_id
                num_branches += t.parent_id is not None
                assert not any(call.replay_mismatches for call in t.tool_calls)
    assert num_branches >= 6


def test_nothing_of_a_notebook_is_left_when_its_trajectory_has_ended(forking):
    runner = ToolRunner({"notebook": forking})

    def has_notebooks(number: int) -> bool:  # each a supervisor and a worker, as the spares are
        return len(processes_of(forking.sandbox.host.pid)) == 2 + 2 * (NUM_SPARES + number)

    assert wait_until(lambda: has_notebooks(0))
    try:
        for n in range(3):
            runner.start(str(n), "notebook", "x = 1", ToolContext("p", str(n), 0))
        while runner.num_pending:
            runner.collect(block=True)
        assert wait_until(lambda: has_notebooks(3))  # three spares have been taken, and others come for them
        for n in range(3):
            runner.sessions.end(("p", str(n)))
        assert wait_until(lambda: has_notebooks(0))
    finally:
        runner.tools = {}  # the other tests need the notebook
        runner.close()
