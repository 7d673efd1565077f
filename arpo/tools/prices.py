"""Tools that cost money: what a call is charged, and where the prices come from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from arpo.errors import UserError
from arpo.tools.base import Tool, ToolResult


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
