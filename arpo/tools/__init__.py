"""Tools that the policy calls from inside a rollout. A new tool is one file, and one line here.

A tool's settings are the field of `ToolsConfig` (arpo/tools/options.py) that has its name: `tools.search` goes to the
search tool. A tool without such a field is made without arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from arpo.errors import UserError
from arpo.protocol.prompts import default_system_prompt
from arpo.tools.base import Tool
from arpo.tools.options import ToolsConfig
from arpo.tools.prices import PricedTool, prices

TOOLS: dict[str, Callable[[], type[Tool]]] = {
    "search": lambda: import_module("arpo.tools.search").SearchTool,
    "python": lambda: import_module("arpo.tools.python").PythonTool,
}
"""The class of each tool, by tag, in the order in which the default system prompt speaks of them. Imported here and not
above, so that a tool's own imports are paid only where it is used."""


def make_tools(cfg: ToolsConfig) -> dict[str, Tool]:
    """The tools named in the config, by tag. A tool that cannot start raises: training never goes on without it."""
    price = prices(cfg.price_per_call, cfg.names)
    sections = cfg.sections
    tools = {name: tool_class(name)(sections[name]) if name in sections else tool_class(name)() for name in cfg.names}
    return {name: PricedTool(tool, price[name]) if price.get(name) else tool for name, tool in tools.items()}


def tool_class(name: str) -> type[Tool]:
    """Raises UserError for a name that is not in the table."""
    if name not in TOOLS:
        raise UserError(f"tools.names: unknown tool {name!r}; there are {', '.join(TOOLS)}")
    return TOOLS[name]()


def system_prompt_for(setting: str, names: Iterable[str]) -> str:
    """The setting `default` as the system prompt that offers these tools; any other setting as it is."""
    if setting != "default":
        return setting
    classes = {name: tool_class(name) for name in names}
    return default_system_prompt([classes[name].about for name in TOOLS if name in classes])
