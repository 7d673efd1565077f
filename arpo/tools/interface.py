"""The interface of a tool: what a call gets, and what it returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from arpo.errors import UserError
from arpo.protocol.schema import ToolSchema
from arpo.trajectory import ToolCall


@dataclass(frozen=True)
class ToolContext:
    """Identifies the trajectory and the turn of a call. A tool whose `run` has a parameter `context` gets it."""

    prompt_id: str
    trajectory_id: str
    turn: int
    """Index of the turn that the call ended."""
    seed: int = 0
    """32 bits that depend on the run's seed, the step and the prompt: all trajectories of a group have the same, so
    that they begin in the same world."""
    row: Mapping[str, object] = field(default_factory=dict)
    """The prompt's columns of the data file (Prompt.meta)."""
    history: str = ""
    """Digest of all calls that the tool's session has answered before, in order; "" before the first, and for a tool
    without sessions. With the argument it is the key under which a result may be recorded."""

    @property
    def owner(self) -> tuple[str, str]:
        """The trajectory, among all of a rollout."""
        return self.prompt_id, self.trajectory_id


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
    info: Mapping[str, Any] = field(default_factory=dict)
    """Facts for a reward besides the text, in plain types (JSON): an environment's reward, say."""
    replayed: int = 0
    """Calls of the trajectory that it branched from, run again to give this call its session."""
    replay_mismatches: int = 0
    """Those of them that answered otherwise than the first time."""

    def of(self, call: ToolCall) -> ToolCall:
        """Return the call with this outcome."""
        return replace(
            call, result=self.text, ok=self.ok, error_kind=self.error_kind, cached=self.cached, seconds=self.seconds,
            cost=self.cost, info=dict(self.info), replayed=self.replayed, replay_mismatches=self.replay_mismatches,
        )  # fmt: skip


class Tool(Protocol):
    """The interface of a tool. It never raises for what the model wrote, and has its own deadline, retries and errors.

    A class in the table of tools (arpo/tools/__init__.py) also has `about`, an `arpo.protocol.prompts.About`. `run` may
    have a parameter `context`, a ToolContext. A tool with state also has `make_sessions` (arpo/tools/sessions.py).
    `make_tools` gives it the `price_per_call` of the config.
    """

    tag: str
    """Name of the tool; <tag>argument</tag> calls it."""

    async def run(self, argument: str) -> ToolResult: ...

    async def aclose(self) -> None: ...


class ToolSet(Protocol):
    """Several tools from one class of a file, which is made with its options as a tool is."""

    def schemas(self) -> Mapping[str, ToolSchema]:
        """Return what the tools take, by tag. Called before torch is imported, and more than once."""

    def tools(self) -> Mapping[str, Tool]:
        """Return the tools, by tag. One with a method `take_counts` has its counts logged, as tools/NAME."""


async def answer(tool: Tool, argument: str, context: ToolContext | None, session: Any = None) -> ToolResult:
    """Run a call, with what the tool's `run` has parameters for, and charge for what the tool itself has answered: not
    its cache, and not an error. Raises UserError where it returns something else."""
    wanted = inspect.signature(tool.run).parameters
    given = {"context": context, "session": session}
    result = await tool.run(argument, **{name: value for name, value in given.items() if name in wanted})
    if not isinstance(result, ToolResult):
        raise UserError(f"the {tool.tag} tool: run returned {type(result).__name__}; return a ToolResult")
    price = getattr(tool, "price_per_call", 0.0)
    return replace(result, cost=price) if price and result.ok and not result.cached else result
