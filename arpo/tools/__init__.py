"""Tools that the policy calls from inside a rollout. A new tool is one file, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from arpo.errors import UserError
from arpo.tools.base import Tool
from arpo.tools.ledger import PricedTool, prices
from arpo.tools.options import ToolsConfig

TOOLS: dict[str, Callable[[ToolsConfig], Tool]] = {
    "python": lambda cfg: import_module("arpo.tools.cache.python_cache").make_python(cfg.python),
    "search": lambda cfg: import_module("arpo.tools.search").SearchTool(cfg.search),
}
"""By tag. Imported here and not above, so that a tool's own imports are paid only where it is used."""


def make_tools(cfg: ToolsConfig) -> dict[str, Tool]:
    """The tools named in the config, by tag. A tool that cannot start raises: training never goes on without it."""
    for name in cfg.names:
        if name not in TOOLS:
            raise UserError(f"tools.names: unknown tool {name!r}; there are {', '.join(TOOLS)}")
    price = prices(cfg.price_per_call, cfg.names)
    tools = {name: TOOLS[name](cfg) for name in cfg.names}
    return {name: PricedTool(tool, price[name]) if price.get(name) else tool for name, tool in tools.items()}
