"""A typed Python function as a tool: its types and docstring are the schema."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from arpo.errors import UserError, innermost
from arpo.protocol.function_schema import schema_of
from arpo.protocol.schema import arguments_of, with_integers
from arpo.tools.interface import Tool, ToolResult, plain_value

MAX_CONCURRENT = 32
"""Limit on simultaneous calls of one function. Waiting for a turn does not count against the deadline."""


class FunctionTool(Tool):
    """Calls a function with the model's arguments. The model reads the returned value, or the exception, as text.

    A coroutine function runs on the loop of the tools. Any other function runs in a thread. After the deadline the
    thread goes on, since Python cannot end a thread.
    """

    def __init__(self, function: Callable[..., Any], *, deadline_s: float = 30.0):
        """Raises UserError for a generator, and if types or docstring do not describe the parameters."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UserError(f"tools.names: {function.__name__} yields its result; return it, as a text or a list")
        self.schema = schema_of(function)
        self.tag = self.schema.name
        self.deadline_s = deadline_s
        self.function = function
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def run(self, argument: str) -> ToolResult:
        """Answer a call. Raises only a UserError of the function; this ends the run."""
        arguments = arguments_of(self.schema, argument)
        if isinstance(arguments, str):
            return ToolResult(arguments, ok=False, error_kind="bad_arguments")
        arguments = with_integers(arguments, self.schema.parameters)
        async with self._slots:
            deadline = asyncio.timeout(self.deadline_s)
            try:
                async with deadline:
                    call = partial(self.function, **arguments)
                    is_async = inspect.iscoroutinefunction(self.function)
                    value = await (call() if is_async else on_thread(f"arpo-{self.tag}", call))
                    if inspect.isawaitable(value):  # of a coroutine function behind a plain decorator
                        value = await value
                    return ToolResult(_text_of(value), ok=True)
            except Exception as raised:
                error = innermost(raised)
                if isinstance(error, UserError):
                    raise error from None
                if deadline.expired():
                    text = f"Error: {self.tag} gave no answer within {self.deadline_s:g} s."
                    return ToolResult(text, ok=False, error_kind="timeout")
                return ToolResult(f"{type(error).__name__}: {error}", ok=False, error_kind="error")


def _text_of(value: Any) -> str:
    """Return a function's value as the text for the model."""
    if value is None:
        return "(no output)"
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain_or_text)


def _plain_or_text(value: Any) -> Any:
    if isinstance(value, Iterator | AsyncIterator):  # str() would only show a memory address
        raise TypeError(f"the function returned a {type(value).__name__}; it must return what that yields")
    try:
        return plain_value(value)
    except (TypeError, ValueError):
        return str(value)


async def on_thread(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work` in a new thread, and return its value or raise its exception.

    A hanging thread cannot be ended. But the run can end without it, unlike with a thread of asyncio's pool.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(work(*arguments))
        except StopIteration:  # of a next(). asyncio would lose it, and wait forever (before Python 3.12)
            answer.set_exception(RuntimeError("the function raised StopIteration"))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(answer)
