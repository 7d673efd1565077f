"""Tools that the policy calls from inside a rollout. A new tool is one file, and one line here.

A tool's settings are the field of `ToolsConfig` (arpo/config/tools.py) that has its name: `tools.search` goes to the
search tool. A tool without such a field is made without arguments. The tools of MCP servers (`tools.mcp`) come beside.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module

from arpo.config.sections import ProtocolConfig
from arpo.config.tools import ToolsConfig
from arpo.errors import UserError
from arpo.protocol import FORMS, Codec
from arpo.protocol.prompts import default_system_prompt, json_system_prompt
from arpo.protocol.schema import ToolSchema, text_schema
from arpo.protocol.tags import reserved_tags
from arpo.tools.base import PricedTool, Tool
from arpo.tools.function import FunctionTool
from arpo.tools.mcp.tool import McpTool, mcp_schemas, mcp_tools
from arpo.trajectory import Prompt

logger = logging.getLogger(__name__)

TOOLS: dict[str, Callable[[], type[Tool] | FunctionTool]] = {
    "search": lambda: import_module("arpo.tools.search").SearchTool,
    "python": lambda: import_module("arpo.tools.python").PythonTool,
    "notebook": lambda: import_module("arpo.tools.notebook").NotebookTool,
    "sql": lambda: import_module("arpo.tools.sql").SqlTool,
}
"""Class of each tool, or the FunctionTool itself, by tag, in the order in which the default system prompt speaks of
them. Imported here and not above, so that a tool's own imports are paid only where it is used."""
TAG = re.compile(r"[A-Za-z0-9_.-]+")
"""Names that a tool may have, as MCP has them."""


def make_tools(cfg: ToolsConfig) -> dict[str, Tool]:
    """Return the config's tools, by tag. A tool that cannot start raises: training never goes on without it."""
    price = prices(cfg.price_per_call, tuple(tool_schemas(cfg)))
    tools = {name: _make_tool(name, cfg) for name in cfg.names}
    for server in cfg.servers:
        tools |= mcp_tools(server)
    return {name: PricedTool(tool, price[name]) if price.get(name) else tool for name, tool in tools.items()}


def _make_tool(name: str, cfg: ToolsConfig) -> Tool:
    made = tool_class(name)
    if isinstance(made, FunctionTool):
        return made
    return made(cfg.sections[name]) if name in cfg.sections else made()


def tool_schemas(cfg: ToolsConfig) -> dict[str, ToolSchema]:
    """Return what the config's tools take, by tag: those of tools.names, then those of the MCP servers.

    The servers are asked once per process, without torch. Raises UserError for a tool that is unknown, a server that
    cannot be used, and a name that cannot be a tag or that two tools have.
    """
    schemas = {name: schema_of_tool(name) for name in cfg.names}
    origin = dict.fromkeys([*TOOLS, *cfg.names], "a tool of ours") | dict.fromkeys(
        reserved_tags(()), "a tag of the protocol"
    )
    for server in cfg.servers:
        for name, schema in mcp_schemas(server).items():
            if not TAG.fullmatch(name):
                raise UserError(
                    f"tools.mcp: {server.label} has a tool {name!r}, which is no tag; leave it out with tools"
                )
            if name in origin:
                fix = 'set another prefix for it, like "prefix": "web_", or leave the tool out with tools'
                raise UserError(
                    f"tools.mcp: {server.label} has a tool {name!r}, and so is {origin[name]} called; {fix}"
                )
            schemas[name], origin[name] = schema, f"one of {server.label}"
    return schemas


def take_restarts(tools: Mapping[str, Tool]) -> int:
    """Return how often MCP servers of these tools were started again since the last time that this was asked."""
    bare = [tool.tool if isinstance(tool, PricedTool) else tool for tool in tools.values()]
    services = {id(tool.service): tool.service for tool in bare if isinstance(tool, McpTool)}
    return sum(service.take_restarts() for service in services.values())


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


def tool_class(name: str) -> type[Tool] | FunctionTool:
    """Return the class of a tool, or the tool itself where a function is one. Raises UserError for an unknown name."""
    if name not in TOOLS:
        raise UserError(f"tools.names: unknown tool {name!r}; there are {', '.join(TOOLS)}")
    return TOOLS[name]()


def schema_of_tool(name: str) -> ToolSchema:
    """Return what a tool takes: one text, where its class has no schema. Raises UserError for an unknown name."""
    tool = tool_class(name)
    return getattr(tool, "schema", None) or text_schema(name, f"Call {tool.about.noun}.", "text", "What it is to do.")


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


def make_codec(
    tokenizer, cfg: ProtocolConfig, tools: Iterable[str] | Mapping[str, ToolSchema], *, enable_thinking: bool
) -> Codec:
    """Return the codec of protocol.format. `tools` are names, or schemas by name.

    Raises UserError for a chat template that the format cannot be used with.
    """
    form = FORMS[cfg.format]
    if form.template_lists_tools:
        tools = [tools[name] if isinstance(tools, Mapping) else schema_of_tool(name) for name in tools]
    return form.codec(tokenizer, tools=tuple(tools), enable_thinking=enable_thinking)


def system_prompt_for(setting: str, tools: Iterable[str] | Mapping[str, ToolSchema], *, form: str = "tags") -> str:
    """Return the system prompt that offers these tools where the setting is `default`, else the setting as it is.

    `tools` are names, or schemas by name, without which tools of MCP servers cannot be introduced. `form` is the value
    of protocol.format.
    """
    if setting != "default":
        return setting
    names = list(tools)
    if FORMS[form].template_lists_tools:
        return json_system_prompt(names)
    ours = {name: tool_class(name) for name in TOOLS if name in names}
    listed = tools if isinstance(tools, Mapping) else {}
    schemas = {name: listed[name] if name in listed else schema_of_tool(name) for name in names}
    abouts = {name: tool.about for name, tool in ours.items() if tool.about}
    return default_system_prompt([*abouts.values()], [schemas[name] for name in names if name not in abouts])
