"""The interface of a tool, with the context and the result of a call."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, runtime_checkable

from arpo.config.returned import whole_text
from arpo.errors import UserError
from arpo.protocol.prompts import About
from arpo.protocol.schema import ToolSchema
from arpo.trajectory import ToolCall

MAX_KIND_CHARS = 60


@dataclass(frozen=True)
class ToolContext:
    """Identifies the trajectory and the turn of a call. Passed to a tool if `run` has a parameter `context`."""

    prompt_id: str
    trajectory_id: str
    turn: int
    """Index of the turn ended by the call."""
    seed: int = 0
    """32 bits, derived from the run's seed, the step and the prompt. All trajectories of a group have the same seed,
    and so start in the same world."""
    row: Mapping[str, object] = field(default_factory=dict)
    """The prompt's columns of the data file (Prompt.meta)."""
    history: str = ""
    """Digest of all earlier calls answered by the tool's session, in order; "" before the first call, and for a tool
    without sessions. History and argument together can be the key of a recorded result."""

    @property
    def owner(self) -> tuple[str, str]:
        """(prompt_id, trajectory_id): identifies the trajectory within the rollout."""
        return self.prompt_id, self.trajectory_id


@dataclass(frozen=True)
class ToolResult:
    """The outcome of a call."""

    text: str
    """Text for the model, of any length. The rollout escapes and truncates it."""
    ok: bool
    seconds: float = 0.0
    error_kind: str | None = None
    cached: bool = False
    cost: float = 0.0
    """Price of the call, in the currency of tools.price_per_call."""
    infra_error: bool = False
    """True for an infrastructure error (backend down, sandbox broken). The model is not to blame."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the reward function, in the types of JSON. Example: the reward of an environment."""
    replayed: int = 0
    """Number of the parent's calls repeated to rebuild the session for this call."""
    replay_mismatches: int = 0
    """Number of replayed calls with a different answer than the first time."""

    def of(self, call: ToolCall) -> ToolCall:
        """Return the call with this outcome."""
        return replace(
            call, result=self.text, ok=self.ok, error_kind=self.error_kind, cached=self.cached, seconds=self.seconds,
            cost=self.cost, info=dict(self.info), replayed=self.replayed, replay_mismatches=self.replay_mismatches,
        )  # fmt: skip


class Tool:
    """Base class of a tool. A tool has its own deadline, retries and error texts.

    A class in a user's file need not derive from `Tool`: `with_defaults` adds missing attributes and methods.
    """

    tag: str
    """Name of the tool; <tag>argument</tag> calls it."""
    schema: ToolSchema | None = None
    """Arguments of a call; None = one text."""
    about: About | None = None
    """The tool's part of the default system prompt; None = the prompt lists the schema."""
    make_sessions: Callable[..., Any] | None = None
    """Only for a tool with state: makes the `Sessions` (arpo/tools/sessions.py) for all tools with state of a run."""

    async def run(self, argument: str) -> ToolResult:
        """Answer a call. Never raises for a mistake of the model.

        `run` may have a parameter `context` (ToolContext). In a tool with state, `run` also has a parameter `session`.
        """
        raise NotImplementedError

    def take_counts(self) -> Mapping[str, int]:
        """Return the tool's counts since the last call of `take_counts`, by name. Logged as tools/NAME."""
        return {}

    async def aclose(self) -> None:
        """Release the resources of the tool."""


def with_defaults(tool: type) -> type[Tool]:
    """Return the class itself if it derives from Tool. If not, return a new class derived from both."""
    return tool if issubclass(tool, Tool) else type(tool)(tool.__name__, (tool, Tool), {"__module__": tool.__module__})


class AdaptedTool(Tool):
    """Adds Tool's defaults to a tool of a ToolSet, if the tool's class does not derive from Tool."""

    def __init__(self, tool: Any):
        vars(self).update({name: getattr(tool, name) for name in dir(tool) if not name.startswith("__")})


@runtime_checkable
class ToolSet(Protocol):
    """Several tools from one class of a file. Made with options, in the same way as a tool."""

    def schemas(self) -> Mapping[str, ToolSchema]:
        """Return the schemas of the tools, by tag. Called before torch is imported, and more than once."""

    def tools(self) -> Mapping[str, Tool]:
        """Return the tools, by tag."""


@cache
def _parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


async def answer(
    tool: Tool, argument: str, context: ToolContext | None, *, session: Any = None, price: float = 0.0
) -> ToolResult:
    """Run a call. `context` and `session` are passed if the tool's `run` has these parameters.

    The price counts only for a successful answer from outside the cache. Raises UserError if `run` returns
    an object of another class, which ends the run. Raises TypeError for None (a forgotten return), and TypeError or
    ValueError for a ToolResult with wrong values. After these two ToolRunner drops only the trajectory.
    """
    # the function behind the method, so that each class of tools is inspected once
    parameters = _parameters_of(tool.run.__func__ if inspect.ismethod(tool.run) else tool.run)
    given = {"context": context, "session": session}
    result = await tool.run(argument, **{name: value for name, value in given.items() if name in parameters})
    if result is None:  # a forgotten return, perhaps in one branch only
        raise TypeError("run returned None; return a ToolResult")
    if not isinstance(result, ToolResult):
        raise UserError(f"the {tool.tag} tool: run returned {type(result).__name__}; return a ToolResult")
    result = plain(result)
    is_charged = price and result.ok and not result.cached
    return replace(result, cost=price) if is_charged else result


def plain(result: ToolResult) -> ToolResult:
    """Return the result in plain types, for dumps, records and tokenizers. Raises TypeError or ValueError.

    NumPy's numbers become Python's. Lone surrogates (halves of a character) become U+FFFD.
    """
    if not isinstance(result.text, str):
        raise TypeError(f"the text of a ToolResult must be str, not {type(result.text).__name__}")
    kind = result.error_kind
    return replace(
        result,
        text=whole_text(result.text),
        ok=bool(result.ok),
        seconds=_finite(result.seconds),
        error_kind=None if kind is None else " ".join(whole_text(str(kind)).split())[:MAX_KIND_CHARS],
        cached=bool(result.cached),
        cost=_finite(result.cost),
        infra_error=bool(result.infra_error),
        info=_plain_info(result.info),
        replayed=int(result.replayed),
        replay_mismatches=int(result.replay_mismatches),
    )


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a number of a ToolResult is {number}")
    return number


def _plain_info(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the facts in the types of JSON."""
    if not info:
        return {}
    if not isinstance(info, Mapping):
        raise TypeError(f"the info of a ToolResult must be a mapping, not {type(info).__name__}")
    text = json.dumps(dict(info), ensure_ascii=False, allow_nan=False, default=plain_value)
    return json.loads(whole_text(text))


def plain_value(value: Any) -> Any:
    """Convert a value to a type of JSON, for `json.dumps(default=)`. Raises TypeError."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):  # arrays, tensors, and numbers of NumPy
        return value.tolist()
    return float(value)
