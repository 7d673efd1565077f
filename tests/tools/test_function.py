"""A typed function as a tool: what it returns or raises is text for the model, within its deadline."""

import asyncio
import functools
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from arpo.config.tools import ToolsConfig
from arpo.errors import UserError
from arpo.tools import make_tools, tool_class
from arpo.tools.base import ToolResult
from arpo.tools.function import FunctionTool


def run(function, argument: str, **options) -> ToolResult:
    return asyncio.run(FunctionTool(function, **options).run(argument))


def divide(a: float, b: int = 2) -> float:
    """Divide."""
    assert isinstance(b, int)
    return a / b


def shapes(sides: list[int], n: int | None, by_name: dict[str, list[int | float]]) -> str:
    """Tell what has come."""
    return str([sides, n, by_name])


async def shout(text: str) -> str:
    """Shout."""
    await asyncio.sleep(0)
    return text.upper()


@functools.wraps(shout)
def wrapped(*args, **kwargs):
    return shout(*args, **kwargs)


def give(value: object):
    """Return a function that returns this."""

    def nothing():
        """Do nothing."""
        return value

    return nothing


def yields(query: str):
    """Yield."""
    yield query


async def streams(query: str):
    """Yield."""
    yield query


def stop():
    """End the run."""
    raise UserError("the licence has expired; renew it")


def in_thread() -> bool:
    """Tell whether the loop is elsewhere."""
    return threading.current_thread() is not threading.main_thread()


async def in_a_group(age: int):
    """Fail in a task."""

    async def fail():
        if age == 0:
            raise UserError("the licence has expired; renew it")
        raise ValueError(f"no age {age}")

    async with asyncio.TaskGroup() as outer:
        outer.create_task(fail())


def first(rows: list[int]) -> int:
    """Return the first row above 0."""
    return next(row for row in rows if row > 0)


def sleep():
    """Sleep."""
    time.sleep(30)


async def sleep_awaiting():
    """Sleep."""
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("function", "argument", "text"),
    [
        (divide, '{"a": 3}', "1.5"),
        (divide, '{"a": 3, "b": 4.0}', "0.75"),  # JSON's 4.0 is an integer
        (
            shapes,
            '{"sides": [3.0, 4, 1e1], "n": 2.0, "by_name": {"a": [1.0, 1.5]}}',
            "[[3, 4, 10], 2, {'a': [1, 1.5]}]",
        ),
        (shapes, '{"sides": [], "n": null, "by_name": {}}', "[[], None, {}]"),
        (shout, "hi", "HI"),
        (wrapped, "hi", "HI"),  # strands-agents/harness-sdk #4410: the model read "<coroutine object ...>"
        (in_thread, "{}", "true"),
        (give(None), "{}", "(no output)"),
        (give({"ü": [1, None]}), "{}", '{"ü": [1, null]}'),
        (give((1, 2)), "{}", "[1, 2]"),
        (give([]), "{}", "[]"),
        # fastmcp #3829, agno #2834, hermes-agent PR #19877
        (give(b"caf\xc3\xa9 \xff"), "{}", "café \ufffd"),
        (give(np.float32(0.5)), "{}", "0.5"),
        (give({"a": np.arange(2)}), "{}", '{"a": [0, 1]}'),
        (give({1.5}), "{}", "[1.5]"),
    ],
)
def test_what_a_function_returns_is_the_result(function, argument, text):
    """google/adk-python#6972: a function with a `list[int]` got floats."""
    assert run(function, argument) == ToolResult(text, ok=True)


@pytest.mark.parametrize(
    ("function", "argument", "kind", "text"),
    [
        (divide, '{"a": 1, "b": 0}', "error", "ZeroDivisionError: "),
        (first, '{"rows": [-1]}', "error", "RuntimeError: the function raised StopIteration"),
        # griptape #2027: the model read "unhandled errors in a TaskGroup (1 sub-exception)"
        (in_a_group, '{"age": 3}', "error", "ValueError: no age 3"),
        (divide, '{"b": 1}', "bad_arguments", 'Error: divide needs the argument "a"'),
        (sleep, "{}", "timeout", "Error: sleep gave no answer within 0.05 s."),
        (sleep_awaiting, "{}", "timeout", "Error: sleep_awaiting gave no answer within 0.05 s."),
    ],
)
def test_a_failure_is_an_error_that_the_model_reads(function, argument, kind, text):
    """cpython #112182: a StopIteration in a thread was lost, and the call took until its deadline."""
    result = run(function, argument, deadline_s=0.05 if kind == "timeout" else 60.0)
    assert result.text.startswith(text)
    assert (result.ok, result.error_kind, result.infra_error) == (False, kind, False)


@pytest.mark.parametrize(
    ("line", "deadline_s"),
    [
        ("tool = FunctionTool(age, deadline_s=5)", 5),  # as in docs/extending.md
        ("tool = functools.cache(age)", 30),
        ("tool = Ages().age", 30),
    ],
)
def test_a_name_may_stand_for_a_function_tool_a_method_or_a_wrapped_function(tmp_path, monkeypatch, line, deadline_s):
    monkeypatch.chdir(tmp_path)
    Path("my_age.py").write_text(
        "import functools\n"
        "from arpo.tools.function import FunctionTool\n"
        "def age(born: int) -> int:\n"
        '    """Tell the age."""\n'
        "    return 2000 - born\n"
        "class Ages:\n"
        "    def age(self, born: int) -> int:\n"
        '        """Tell the age."""\n'
        "        return age(born)\n"
        f"{line}\n"
    )
    [tool] = make_tools(ToolsConfig(names=("my_age.py:tool",))).values()
    assert (tool.tag, tool.deadline_s) == ("age", deadline_s)
    assert asyncio.run(tool.run('{"born": 1950}')) == ToolResult("50", ok=True)
    # its semaphore belongs to the loop of a run
    assert tool_class("my_age.py:tool") is not tool


def test_only_an_error_of_the_user_ends_the_run():
    for function, argument in ((stop, "{}"), (in_a_group, '{"age": 0}')):
        with pytest.raises(UserError, match="renew it"):
            run(function, argument)


@pytest.mark.parametrize("function", [yields, streams])
def test_a_generator_is_no_result(function):
    with pytest.raises(UserError, match=r"tools\.names: \w+ yields its result; return it, as a text or a list"):
        FunctionTool(function)
