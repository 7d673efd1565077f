"""Tools that the policy calls from inside a rollout. A new tool is one file, and one line here.

A tool's settings are the field of `ToolsConfig` (arpo/tools/options.py) that has its name: `tools.search` goes to the
search tool. A tool without such a field is made without arguments.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

from arpo.errors import UserError
from arpo.protocol.prompts import default_system_prompt
from arpo.tools.base import PricedTool, Tool
from arpo.tools.options import ToolsConfig
from arpo.trajectory import Prompt

logger = logging.getLogger(__name__)

TOOLS: dict[str, Callable[[], type[Tool]]] = {
    "search": lambda: import_module("arpo.tools.search").SearchTool,
    "python": lambda: import_module("arpo.tools.python").PythonTool,
    "notebook": lambda: import_module("arpo.tools.notebook").NotebookTool,
    "sql": lambda: import_module("arpo.tools.sql").SqlTool,
}
"""Class of each tool, by tag, in the order in which the default system prompt speaks of them. Imported here and not
above, so that a tool's own imports are paid only where it is used."""


def make_tools(cfg: ToolsConfig) -> dict[str, Tool]:
    """Return the config's tools, by tag. A tool that cannot start raises: training never goes on without it."""
    price = prices(cfg.price_per_call, cfg.names)
    sections = cfg.sections
    tools = {name: tool_class(name)(sections[name]) if name in sections else tool_class(name)() for name in cfg.names}
    return {name: PricedTool(tool, price[name]) if price.get(name) else tool for name, tool in tools.items()}


def prices(entries: Iterable[str], names: Sequence[str]) -> dict[str, float]:
    """Parse tools.price_per_call. Raises UserError for an entry that makes no sense or names none of `names`.

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
        if not 0 <= parsed[name] < math.inf:
            raise UserError(f"tools.price_per_call: {entry!r} must be a price of 0 or more")
        if name not in names:
            raise UserError(f"tools.price_per_call: no tool {name!r} in tools.names; there are {', '.join(names)}")
    return parsed


def tool_class(name: str) -> type[Tool]:
    """Return the class of a tool. Raises UserError for a name that is not in the table."""
    if name not in TOOLS:
        raise UserError(f"tools.names: unknown tool {name!r}; there are {', '.join(TOOLS)}")
    return TOOLS[name]()


def check_offered(prompts: Sequence[Prompt], loaded: Sequence[str], file: str) -> None:
    """Compare the tools that the rows of a file offer with those that are loaded.

    Raises UserError for a row's tool that is not loaded. Warns of a loaded tool that no row offers.
    """
    check_known(prompts, loaded, file)
    num_offers = Counter(name for prompt in prompts for name in (loaded if prompt.tools is None else prompt.tools))
    for name in loaded:
        if prompts and not num_offers[name]:
            logger.warning("%s: tools.names has %s, but none of the %d rows offers it", file, name, len(prompts))


def check_known(prompts: Iterable[Prompt], loaded: Sequence[str], file: str) -> None:
    """Raise UserError for a row's tool that is not loaded."""
    for prompt in prompts:
        for name in prompt.tools or ():
            if name not in loaded:
                close = difflib.get_close_matches(name, loaded, n=1)
                fix = f"did the row mean {close[0]!r}?" if close else "add it there, or take it out of the row"
                has = f"{prompt.prompt_id} offers the tool {name!r}, and tools.names has {', '.join(loaded)}"
                raise UserError(f"{file}: {has}; {fix}")


def system_prompt_for(setting: str, names: Iterable[str]) -> str:
    """Return the system prompt that offers these tools where the setting is `default`, else the setting as it is."""
    if setting != "default":
        return setting
    classes = {name: tool_class(name) for name in names}
    return default_system_prompt([classes[name].about for name in TOOLS if name in classes])
