"""The <python> tool: what the model reads, and the limits of a call."""

import asyncio
import dataclasses

import pytest
from helpers.python_tools import SMALL, TIERS, run, start, text_of

from arpo.errors import UserError
from arpo.protocol.calls import checked_call
from arpo.protocol.tags import parse_call
from arpo.tools.python import CUT, PythonTool

MAX_CHARS = 200


@pytest.fixture(autouse=True)
def short_results(monkeypatch):
    monkeypatch.setattr("arpo.tools.python.MAX_OUTPUT_CHARS", MAX_CHARS)


@pytest.fixture(scope="module", params=TIERS)
def tool(request):
    tool = start(tier=request.param)
    yield tool
    asyncio.run(tool.aclose())


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(1 + 1)", "2"),
        ("x = 3\nx ** 2", "9"),
        ("'a' + 'b'", "'ab'"),
        ("print(1)\nNone", "1"),
        ("x = 3", "(no output)"),
        ("", "(no output)"),
        ("```python\nprint(5)\n```", "5"),
        ("\n```\n5\n```\n", "5"),
        ("def f():\n    return 7\n\nf()  # a comment", "7"),
        ("import sympy\nx = sympy.Symbol('x')\nsympy.integrate(2 * x, x)", "x**2"),
        ("import numpy as np\nnp.arange(3).sum().item()", "3"),
        ("print('  indented')", "  indented"),
        ("print(__name__)", "__main__"),
        # evenly indented code, as IPython runs it (stackblitz-labs/bolt.diy#934 is of this kind)
        ("    x = 1\n\n    if x:\n        print(x)", "1"),
        ("```python\n\tx = 2\n\tprint(x)\n```", "2"),
        ("  s = '''\n   a\n  '''\n  s", "'\\n a\\n'"),
        # stderr of a call that succeeded
        ("import logging\nlogging.warning('x=5')\nprint(3)", "3\n[stderr]\nWARNING:root:x=5"),
        ("import warnings; warnings.warn('old')", "[stderr]\n<string>:1: UserWarning: old"),
        ("import sys\nfor i in range(3): print(f'{i}%', end='\\r', file=sys.stderr)\n4", "4"),
        ("import sys\nfor i in range(3): print(f'\\r{i}%', end='', file=sys.stderr)\n4", "4\n[stderr]\n2%"),
    ],
)
def test_output_reads_as_in_a_notebook(code, text, tool):
    [result] = run(tool, code)
    assert (result.text, result.ok, result.error_kind) == (text, True, None)


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero", "error"),
        ("print('before')\nraise ValueError('two\\nlines')", "before\nValueError: two\nlines", "error"),
        ("x = (1", "  File \"<string>\", line 1\n    x = (1\n        ^\nSyntaxError: '(' was never closed", "error"),
        ("import sys; sys.exit(3)", "The process exited with code 3", "error"),
        ("import sys; sys.exit('no data')", "no data", "error"),
        ("import os; os.abort()", "The process died of signal 6", "signal"),
        ("import time; time.sleep(60)", "TimeoutError: execution exceeded 3 seconds", "timeout"),
        # what was printed before a limit: microsoft/autogen#3534, openai/codex#34742, NousResearch/hermes-agent PR#3868
        ("print('a')\nprint('b', end='')\nimport time\ntime.sleep(60)",
         "a\nb\nTimeoutError: execution exceeded 3 seconds", "timeout"),
        ("import os; print('a'); os.abort()", "a\nThe process died of signal 6", "signal"),
        ("import os; print('a'); os.kill(os.getpid(), 9)", "a\nThe process was killed", "killed"),
        ("x = bytearray(1 << 30)", "MemoryError", "error"),
        ("while True: print('x' * 1000)", None, "output_limit"),
        ("a\0b", "SyntaxError: the code contains a character that no source may have", "bad_code"),
        ("print('\ud800')", "SyntaxError: the code contains a character that no source may have", "bad_code"),
        ("#" * (2 << 20), "SyntaxError: the code is too long", "code_too_long"),
    ],
)  # fmt: skip
def test_failures_become_text_the_model_can_read(code, text, kind, tool):
    [result] = run(tool, code)
    assert (result.ok, result.error_kind, result.infra_error) == (False, kind, False)
    assert text is None or result.text == text


def test_a_busy_loop_ends_at_a_limit_and_says_which(tool):
    [result] = run(tool, "while True: pass")
    limits = {"cpu_limit": "1.5 seconds of CPU time", "timeout": "3 seconds"}  # the second where the machine is busy
    assert result.text == f"TimeoutError: execution exceeded {limits[result.error_kind]}"


@pytest.mark.parametrize(
    ("code", "end", "num_cuts"),
    [
        ("print('a' * 300)\nprint('b' * 300)\n'end'", "'end'", 1),
        ("import sys\nprint('a' * 300)\nprint('b' * 300, file=sys.stderr)", "bbb", 2),  # each has its room
        ("print('a' * 5000)\n1 / 0", "\nZeroDivisionError: division by zero", 1),
    ],
)
def test_of_a_long_output_both_ends_are_kept_and_its_error(tool, code, end, num_cuts):
    [result] = run(tool, code)
    assert len(result.text) == MAX_CHARS and result.text.count(CUT) == num_cuts
    assert result.text.startswith("aaa") and result.text.endswith(end)


@pytest.mark.parametrize("num_lines", [10, 20_000])
def test_no_line_is_lost_or_doubled_however_many_there_are(num_lines, tool, monkeypatch):
    monkeypatch.setattr("arpo.tools.python.MAX_OUTPUT_CHARS", 1 << 20)
    lines = text_of(tool, f"for i in range({num_lines}): print(i)").split("\n")
    assert lines[0] == "0" and lines[-1] == str(num_lines - 1)
    assert num_lines > 10 or lines == [str(i) for i in range(num_lines)]


def test_the_calls_of_both_forms_leave_evenly_indented_code_whole():
    body = "\n    x = 1\n    if x:\n        x\n"
    schema = {"python": PythonTool.schema}
    tags = parse_call(f"<python>{body}</python>", "python")
    assert tags.argument == checked_call("", "python", {"code": body}, schema).argument == "x = 1\nif x:\n    x"


@pytest.mark.slow  # matplotlib takes its time on a busy machine
@pytest.mark.parametrize("tier", TIERS)
def test_matplotlib_searches_for_fonts_once_and_not_in_each_call(tier):
    """matplotlib/matplotlib#32246, #7592."""
    pytest.importorskip("matplotlib")
    tool = start(dataclasses.replace(SMALL, wall_s=300.0, memory_mib=512), tier=tier)
    folder = "import os\nfolder = os.path.expanduser('~/.cache/matplotlib')\n"
    code = f"""{folder}
    [name] = os.listdir(folder)
    before = os.stat(f"{{folder}}/{{name}}")
    import matplotlib.pyplot as plt
    plt.plot([1, 2])
    plt.savefig("a.png")
    name[:10], before.st_mtime_ns == os.stat(f"{{folder}}/{{name}}").st_mtime_ns, os.path.getsize("a.png") > 1000
    """
    assert text_of(tool, f"{folder}os.path.exists(folder)  # plot nothing") == "False"  # which starts the search
    assert tool._fonts.result().status == "ok"
    assert text_of(tool, code.replace("\n    ", "\n")) == "('fontlist-v', True, True)"
    asyncio.run(tool.aclose())


def test_calls_share_no_state(tool):
    run(tool, "import builtins, os, sys\nbuiltins.left = 1\nsys.modules['left'] = 1\nopen('left', 'w').close()")
    look = "import builtins, os, sys\nhasattr(builtins, 'left'), 'left' in sys.modules, 'left' in os.listdir()"
    assert text_of(tool, look) == "(False, False, False)"


def test_the_same_code_gives_the_same_bytes(tool):
    code = """import os, random, time
import numpy as np
print({"a", "b", "c", "d"}, random.random(), np.random.rand(), time.tzname, hash("x"), os.getcwd() != "")"""
    assert len({result.text for result in run(tool, code, code, code)}) == 1


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [
        ({"wall_s": -1.0}, "wall_s=-1.0 must lie between 2 and 86400"),
        ({"wall_s": float("nan")}, "wall_s=nan must be a finite number"),
        ({"wall_s": float("inf")}, "wall_s=inf must be a finite number"),
        ({"memory_mib": 16}, "memory_mib=16 must be at least 128"),
        ({"max_concurrent": 0}, "max_concurrent=0 must be at least 1"),
    ],
)
def test_a_limit_with_which_nothing_could_run_is_named(limits, complaint):
    with pytest.raises(UserError) as error:
        PythonTool(dataclasses.replace(SMALL, **limits))
    assert str(error.value) == f"tools.python.{complaint}"


def test_waiting_for_a_free_place_does_not_count_as_run_time():
    tool = start(dataclasses.replace(SMALL, wall_s=2.5, max_concurrent=1))
    results = run(tool, *["import time; time.sleep(0.7)"] * 5)  # the last one waits 2.8 s
    asyncio.run(tool.aclose())
    assert all(result.ok for result in results)


def test_many_calls_at_once_are_all_answered(tool):
    results = run(tool, *[f"import time; time.sleep(0.05); {i}" for i in range(40)])
    assert [result.text for result in results] == [str(i) for i in range(40)]
