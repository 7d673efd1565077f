"""What the tools did and cost, from the records in the trajectories and from nothing else.

Every executed call is in exactly one trajectory's own calls (a branch inherits its parent's, and is not charged again),
so the ledger's sums are those of the records. The names are in the README's metric table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from arpo.errors import UserError
from arpo.tools.base import Tool, ToolResult
from arpo.trajectory import Group, Metrics, ToolCall

ALL = "all"
"""Stands for a tool's name where all tools are meant."""
CORRECT = "ledger/correct"


def ledger(groups: Iterable[Group]) -> Metrics:
    """Calls, failures, cache hits, latencies, bytes and money by tool and of all; and per correct answer."""
    metrics = Metrics()
    for trajectory in (t for group in groups for t in group.trajectories):
        metrics.sum(CORRECT, trajectory.reward is not None and trajectory.reward > 0)
        for call in trajectory.own_tool_calls:
            for name in (ALL, call.tag):
                _book(metrics, f"ledger/{name}", call)
    return metrics


def _book(metrics: Metrics, name: str, call: ToolCall) -> None:
    if not call.executed:
        metrics.sum(f"{name}/not_run", 1)
        return
    metrics.sum(f"{name}/calls", 1)
    metrics.sum(f"{name}/cached", call.cached)
    metrics.sum(f"{name}/failed", not call.ok)
    if not call.ok:
        metrics.sum(f"{name}/failed_{call.error_kind or 'unnamed'}", 1)
    metrics.sum(f"{name}/bytes_in", _num_bytes(call.argument))
    metrics.sum(f"{name}/bytes_out", _num_bytes(call.result))
    metrics.sum(f"{name}/cost", call.cost)
    metrics.percentiles(f"{name}/seconds", call.seconds)
    for what in ("calls", "cost"):  # of right and wrong answers, for each right one
        metrics.ratio(f"{name}/{what}_per_correct", f"{name}/{what}", CORRECT)


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


@dataclasses.dataclass(frozen=True)
class PricedTool:
    """A tool that costs `price` for every call that it answers itself: not from a cache, and not with an error."""

    tool: Tool
    price: float

    @property
    def tag(self) -> str:
        return self.tool.tag

    async def run(self, argument: str) -> ToolResult:
        result = await self.tool.run(argument)
        return dataclasses.replace(result, cost=self.price) if result.ok and not result.cached else result

    async def aclose(self) -> None:
        await self.tool.aclose()


def prices(entries: Iterable[str], names: Iterable[str]) -> dict[str, float]:
    """tools.price_per_call, parsed. Raises UserError for an entry that makes no sense or names none of `names`.

    >>> prices(["search=0.0015"], ["python", "search"])
    {'search': 0.0015}
    """
    parsed: dict[str, float] = {}
    for entry in entries:
        name, _, price = entry.partition("=")
        try:
            parsed[name] = float(price)
        except ValueError:
            raise UserError(f"tools.price_per_call: {entry!r} must be NAME=PRICE, like search=0.0015") from None
        if not (math.isfinite(parsed[name]) and parsed[name] >= 0):
            raise UserError(f"tools.price_per_call: {entry!r} must be a price of 0 or more")
        if name not in set(names):
            raise UserError(f"tools.price_per_call: no tool {name!r} in tools.names; there are {', '.join(names)}")
    return parsed
