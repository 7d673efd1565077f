"""Blocking work of others beside the loop of the tools."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


async def on_thread(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `work` returns, or raise what it raises, in a thread of its own.

    A thread cannot be ended: one that hangs is left to itself, and does not keep the run from ending, as one of
    asyncio's would.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        answer.set_running_or_notify_cancel()
        try:
            answer.set_result(work(*arguments))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(answer)
