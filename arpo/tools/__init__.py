"""Tools for the policy in a rollout: built-in tools, and tools from the user's files.

A built-in tool gets the section of `ToolsConfig` (arpo/config/tools.py) with its name: the search tool gets
`tools.search`. A tool from a file (tools.names FILE.py:NAME) gets a dataclass with the values of `tools.options`. The
dataclass is the type of the constructor's first parameter. A constructor without parameters gets nothing. A ToolSet
from a file is several tools.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from importlib import import_module
from typing import Any, get_type_hints

from arpo.config.flags import parse
from arpo.config.keys import check_known, field_names
from arpo.config.named import find, is_own
from arpo.config.returned import call_custom, checked_instance, checked_number
from arpo.config.sections import ProtocolConfig
from arpo.config.tools import ToolsConfig
from arpo.errors import UserError
from arpo.protocol import Codec, form_of
from arpo.protocol.prompts import About, default_system_prompt, json_system_prompt
from arpo.protocol.schema import ToolSchema, text_schema
from arpo.protocol.tags import reserved_tags
from arpo.tools.base import Tool
from arpo.tools.function import FunctionTool
from arpo.tools.interface import AdaptedTool, ToolSet, with_defaults
from arpo.trajectory import Prompt

logger = logging.getLogger(__name__)

TOOLS: dict[str, Callable[[], type[Tool] | FunctionTool]] = {
    "search": lambda: import_module("arpo.tools.search").SearchTool,
    "python": lambda: import_module("arpo.tools.python").PythonTool,
}
"""Class of each tool, or the FunctionTool itself, by tag. The default system prompt lists them in this order.

They are not imported above, so that a tool's imports cost time only if it is used."""


def make_tools(cfg: ToolsConfig) -> dict[str, Tool]:
    """Return the config's tools, by tag. Raises UserError if one cannot start: no run continues without its tools."""
    tools: dict[str, Tool] = {}
    for name in cfg.names:
        made = _make_tool(name, cfg)
        members = made.tools() if isinstance(made, ToolSet) else {made.tag: made}
        for tag, tool in members.items():
            tools[tag] = tool if isinstance(tool, Tool) else AdaptedTool(tool)
    return tools


def prices_of(cfg: ToolsConfig) -> dict[str, float]:
    """Return the price of a call of the config's tools, by tag. Raises UserError."""
    return prices(cfg.price_per_call, tuple(tool_schemas(cfg)))


def _make_tool(name: str, cfg: ToolsConfig) -> Tool | ToolSet:
    made = tool_class(name)
    if isinstance(made, FunctionTool):
        return made
    section = own_options(name, cfg) if is_own(name) else getattr(cfg, name, None)
    settings = () if section is None else (section,)
    return call_custom(f"tools.names={name}", made, *settings) if is_own(name) else made(*settings)


def own_options(name: str, cfg: ToolsConfig) -> Any | None:
    """Return the settings of a tool from a file; None for a tool without settings. Raises UserError."""
    made = tool_class(name)
    given = cfg.options_by_tool.get(name, {})
    where = f"tools.options: {name}"
    is_function = isinstance(made, FunctionTool)
    hints = {} if is_function else call_custom(f"{where}: reading its types", get_type_hints, made.__init__)
    kind = next(iter(hints.values()), None)
    if not is_dataclass(kind):
        if given:
            raise UserError(f"{where} takes no options (its constructor has no parameter whose type is a dataclass)")
        return None
    known = field_names(kind)
    flags: list[str] = []
    for key, value in given.items():
        check_known(key, known, where)
        values = value if isinstance(value, list) else [value]
        texts = [json.dumps(one) if isinstance(one, dict | list) else str(one) for one in values]
        # A single text may begin with a dash.
        flags += [f"--{key}={texts[0]}"] if len(texts) == 1 else [f"--{key}", *texts]
    try:
        return parse(kind, flags)
    except ValueError as error:
        raise UserError(f"{where}: {str(error).removesuffix('; see --help')}") from None


def tool_schemas(cfg: ToolsConfig) -> dict[str, ToolSchema]:
    """Return the schemas of the config's tools, by tag. Needs no torch. Raises UserError for an unusable tool."""
    schemas: dict[str, ToolSchema] = {}
    for name in cfg.names:
        if is_set(tool_class(name)):
            given = _make_tool(name, cfg).schemas()
        else:
            given = {tool_class(name).tag: schema_of_tool(name)}
            if is_own(name):
                own_options(name, cfg)  # raises for wrong options
        for tag, schema in given.items():
            if schema.name != tag:
                difference = f"has the tag {tag!r}, but its schema is named {schema.name!r}"
                raise UserError(f"tools.names: {name} {difference}; make them the same")
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", schema.name) or schema.name in {*schemas, *reserved_tags(())}:
                wrong = f"has the tag {schema.name!r}, which is taken or no name"
                raise UserError(f"tools.names: {name} {wrong}; rename it")
            schemas[schema.name] = schema
    return schemas


def take_counts(tools: Mapping[str, Tool]) -> Counter[str]:
    """Return the sums of the tools' counts since the last call of `take_counts`, by name. Raises UserError."""
    totals: Counter[str] = Counter()
    for tag, tool in tools.items():
        method = f"the {tag} tool: take_counts"
        counts = checked_instance(call_custom(method, tool.take_counts), f"{method}: the returned value", Mapping)
        totals.update({str(name): checked_number(count, f"{method}: {name!r}") for name, count in counts.items()})
    return totals


def prices(entries: Iterable[str], names: Sequence[str]) -> dict[str, float]:
    """Parse tools.price_per_call. Raises UserError for a malformed entry, or for a tool missing in `names`.

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
    """Return the class of a tool; for a function, the tool itself. Raises UserError for an unknown name."""
    if is_own(name):
        found = find("tools.names", name, {})
        if isinstance(found, FunctionTool):  # a new one for each run, since its semaphore belongs to a loop
            return FunctionTool(found.function, deadline_s=found.deadline_s)
        if inspect.isroutine(found):  # a method, or a function behind functools.cache, too
            return FunctionTool(found)
        if is_set(found):
            return found
        if not (inspect.isclass(found) and hasattr(found, "tag") and hasattr(found, "run")):
            raise UserError(f"tools.names={name} is no tool: a class with tag and run, or a function with types")
        made = with_defaults(found)
        for attribute, kind in (("tag", str), ("schema", ToolSchema), ("about", About)):
            value = getattr(made, attribute)
            if value is not None:
                checked_instance(value, f"tools.names={name}: its {attribute}", kind)
        if hasattr(made, "open") and not made.make_sessions:
            raise UserError(f"tools.names={name} has `open`: derive it from SessionTool (docs/extending.md)")
        if not inspect.iscoroutinefunction(made.run):
            raise UserError(f"tools.names={name}: run must be a coroutine; write `async def run`")
        _check_parameters(f"tools.names={name}", made)
        return made
    if name not in TOOLS:
        raise UserError(f"tools.names: unknown tool {name!r}; there are {', '.join(TOOLS)}")
    return TOOLS[name]()


def _check_parameters(what: str, tool: type[Tool]) -> None:
    """Raise UserError if `run` cannot be called with an argument, and with a context and a session if it has them."""
    takes_self = inspect.isfunction(inspect.getattr_static(tool, "run"))  # neither a classmethod nor a staticmethod
    signature = inspect.signature(tool.run)
    extras = {name: None for name in ("context", "session") if name in signature.parameters}
    try:
        signature.bind(*(["self"] if takes_self else []), "argument", **extras)
    except TypeError as error:
        form = "`async def run(self, argument)`, with `context` or `session` after it if it needs them"
        raise UserError(f"{what}: {error}; write {form}") from None


def is_set(tool: object) -> bool:
    """Return True for the class of a set of tools."""
    return inspect.isclass(tool) and issubclass(tool, ToolSet)


def schema_of_tool(name: str) -> ToolSchema:
    """Return the schema of a tool. A tool without a schema takes one text. Raises UserError for an unknown name."""
    tool = tool_class(name)
    if is_set(tool):
        raise UserError(f"{name} is a set of tools; name those of them that you mean, by their tags")
    purpose = f"Call {tool.about.noun if tool.about else tool.tag}."
    schema = tool.schema or text_schema(tool.tag, purpose, "text", "What it is to do.")
    return replace(schema, about=tool.about)


def schemas_of(tools: Iterable[str] | Mapping[str, ToolSchema]) -> Mapping[str, ToolSchema]:
    """Return schemas by tag. `tools` are names, or already schemas by tag. Raises UserError for an unknown name."""
    if isinstance(tools, Mapping):
        return tools
    return {schema.name: schema for schema in map(schema_of_tool, tools)}


def check_offered(prompts: Sequence[Prompt], loaded: Sequence[str], file: str) -> None:
    """Raise UserError if a row of a file offers a tool not loaded. Warn of a loaded tool offered by no row."""
    check_loaded(prompts, loaded, file)
    num_offers = Counter(name for prompt in prompts for name in (loaded if prompt.tools is None else prompt.tools))
    for name in loaded:
        if prompts and not num_offers[name]:
            logger.warning("%s: tools.names has %s, but none of the %d rows offers it", file, name, len(prompts))


def check_loaded(prompts: Iterable[Prompt], loaded: Sequence[str], file: str) -> None:
    """Raise UserError if a row offers a tool not loaded."""
    for prompt in prompts:
        for name in prompt.tools or ():
            if name not in loaded:
                close = difflib.get_close_matches(name, loaded, n=1)
                fix = f"did the row mean {close[0]!r}?" if close else "add it there, or take it out of the row"
                has = f"{prompt.prompt_id} offers the tool {name!r}, and tools.names has {', '.join(loaded) or 'none'}"
                raise UserError(f"{file}: {has}; {fix}")


def make_codec(
    tokenizer, cfg: ProtocolConfig, tools: Iterable[str] | Mapping[str, ToolSchema], *, enable_thinking: bool
) -> Codec:
    """Return the codec of protocol.format. `tools` are names, or schemas by name.

    Raises UserError if the format does not work with the chat template.
    """
    form = form_of(cfg.format)
    if form.template_lists_tools:
        known = list(schemas_of(tools).values())
    else:
        known = tuple(schema_of_tool(name).name if is_own(name) else name for name in tools)
    codec = form.codec(tokenizer, tools=known, enable_thinking=enable_thinking)
    codec.format = cfg.format  # may be FILE.py:NAME
    return codec


def system_prompt_for(setting: str, tools: Iterable[str] | Mapping[str, ToolSchema], *, form: str = "tags") -> str:
    """Return the system prompt with these tools if the setting is `default`. If not, return the setting itself.

    `tools` are names, or schemas by name (needed for a ToolSet). `form` is the value of protocol.format.
    """
    if setting != "default":
        return setting
    if form_of(form).template_lists_tools:
        return json_system_prompt(list(tools))
    schemas = schemas_of(tools)
    order = {name: index for index, name in enumerate(TOOLS)}
    abouts = {name: schema.about for name, schema in schemas.items() if schema.about}
    in_order = sorted(abouts, key=lambda name: order.get(name, len(order)))
    listed = [schema for schema in schemas.values() if not schema.about]
    return default_system_prompt([abouts[name] for name in in_order], listed)
