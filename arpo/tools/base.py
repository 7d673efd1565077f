"""The interface of a tool, and the background loop that runs tools while the engine keeps decoding."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True)
class ToolResult:
    """The outcome of a call."""

    text: str
    """Text for the model, raw: escaping and truncation are the rollout's business."""
    ok: bool
    seconds: float = 0.0
    error_kind: str | None = None
    cached: bool = False
    cost: float = 0.0
    """Price of the call, in the currency of tools.price_per_call."""
    infra_error: bool = False
    """True where the failure is ours (backend down, sandbox broken) and not the model's."""


class Tool(Protocol):
    """The interface of a tool. It never raises for what the model wrote, and has its own deadline, retries and errors.

    A class in the table of tools (arpo/tools/__init__.py) also has `about`, an `arpo.protocol.prompts.About`.
    """

    tag: str
    """Name of the tool; <tag>argument</tag> calls it."""

    async def run(self, argument: str) -> ToolResult: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class PricedTool:
    """A tool that costs `price` for every call that it answers itself: not from a cache, and not with an error."""

    tool: Tool
    price: float

    @property
    def tag(self) -> str:
        return self.tool.tag

    async def run(self, argument: str) -> ToolResult:
        result = await self.tool.run(argument)
        return replace(result, cost=self.price) if result.ok and not result.cached else result

    async def aclose(self) -> None:
        await self.tool.aclose()


@dataclass(frozen=True)
class MutedTool:
    """Answers every call with the same refusal: the control that shows whether an agent needs the tool."""

    tag: str

    async def run(self, argument: str) -> ToolResult:
        return ToolResult(f"Error: the {self.tag} tool is not available.", ok=False, error_kind="muted")

    async def aclose(self) -> None:
        """Nothing to release."""


class ToolRunner:
    """Runs tool calls on an asyncio loop in a thread of its own; finished calls are collected without blocking.

    A bug in a tool (an exception) is raised in the caller's thread by `collect`; it never becomes a result.
    """

    def __init__(self, tools: dict[str, Tool]):
        self.tools = tools
        self._done: queue.SimpleQueue[tuple[str, ToolResult | BaseException]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="arpo-tools", daemon=True)
        self._thread.start()
        self.num_pending = 0

    def start(self, call_id: str, tag: str, argument: str) -> None:
        """Begin a call; its result comes out of `collect` under `call_id`."""
        self.num_pending += 1
        asyncio.run_coroutine_threadsafe(self._run(call_id, self.tools[tag], argument), self._loop)

    async def _run(self, call_id: str, tool: Tool, argument: str) -> None:
        started = time.perf_counter()
        try:
            result = await tool.run(argument)
            if not result.seconds:
                result = replace(result, seconds=time.perf_counter() - started)
            self._done.put((call_id, result))
        except BaseException as error:  # handed to the caller's thread, where `collect` raises it
            self._done.put((call_id, error))

    def collect(self, *, block: bool) -> list[tuple[str, ToolResult]]:
        """Return all finished calls; with `block`, wait for at least one (there must be one pending)."""
        finished = []
        while self.num_pending:
            try:
                call_id, result = self._done.get(block=block and not finished)
            except queue.Empty:
                break
            self.num_pending -= 1
            if isinstance(result, BaseException):
                raise result
            finished.append((call_id, result))
        return finished

    def close(self) -> None:
        """Close the tools, then the loop."""
        for tool in self.tools.values():
            asyncio.run_coroutine_threadsafe(tool.aclose(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()
