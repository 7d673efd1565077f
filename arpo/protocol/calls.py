"""What the forms of calls share: a parsed call, what the model is told of a wrong one, and results as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from arpo.protocol.schema import ToolSchema, argument_of, check_arguments, read_json

UNKNOWN = "unknown"
"""Tag of a call that names none of the tools: what a model may make up is no name for a metric."""
MAX_NAME_CHARS = 60

TRUNCATION_MARK = "\n[... result truncated]"
LIMIT_REACHED = "The limit of {limit} tool calls is reached. Give the final answer now."
TOOL_LIMIT_REACHED = "The limit of {limit} {tag} calls is reached. Go on without {tag}."
BAD_JSON = "Error: the call is not valid JSON ({reason}). Write {call}."
NO_CALL = "Error: the call is no JSON object with a name and {key}. Write {call}."
UNKNOWN_TOOL = "Error: there is no tool {name}. There are: {tools}."
EMPTY_CALL = 'Error: the argument "{argument}" of {tool} is empty.'


@dataclass(frozen=True)
class Call:
    """A parsed tool call. Only a malformed one has an `error_kind`, and an `error` that tells the model the mistake."""

    argument: str
    error_kind: str | None = None
    error: str = ""
    tag: str = ""
    """Name of the tool."""


def escape_tags(text: str, tags: tuple[str, ...]) -> str:
    """Make these tags plain text: no tokenizer that has a token for one of them takes it for that."""
    return tag_pattern(tags).sub(r"&lt;\1\2&gt;", text)


@cache
def tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of an opening or closing tag, with groups "" or "/" and the name; no tags = no match."""
    return re.compile(rf"<(/?)({'|'.join(map(re.escape, tags)) or '(?!)'})>")


def read_call(body: str, offered: Mapping[str, ToolSchema], key: str, a_call: str) -> Call:
    """Return the call that a JSON text is, or what is wrong with it. `a_call` shows a right one, with its arguments
    under `key`."""
    try:
        call = read_json(body)
    except ValueError as error:
        return Call(body.strip(), "bad_json", BAD_JSON.format(reason=error, call=a_call), UNKNOWN)
    if not _is_call(call, key):
        return Call(body.strip(), "bad_json", NO_CALL.format(key=key, call=a_call), UNKNOWN)
    return checked_call(body, call["name"], _unpacked(call[key]), offered)


def checked_call(body: str, name: str, arguments: Any, offered: Mapping[str, ToolSchema]) -> Call:
    """Return the call of a tool, or what is wrong with it; `body` is what the model wrote."""
    if name not in offered:
        shown = json.dumps(name[:MAX_NAME_CHARS])
        error = UNKNOWN_TOOL.format(name=shown, tools=", ".join(offered) or "none")
        return Call(body.strip(), "unknown_tool", error, UNKNOWN)
    schema = offered[name]
    if error := check_arguments(schema, arguments):
        return Call(body.strip(), "bad_arguments", error, name)
    argument = dedented(argument_of(schema, arguments)).strip()
    if not argument:
        return Call(body.strip(), "empty_call", EMPTY_CALL.format(argument=schema.text_argument, tool=name), name)
    return Call(argument, tag=name)


def dedented(text: str) -> str:
    r"""Remove the first line's indentation from all lines, if all have it: so that evenly indented code stays code.

    >>> dedented("\n    if x:\n        y\n"), dedented("  a\nb")
    ('\nif x:\n    y\n', '  a\nb')
    """
    lines = text.split("\n")
    first = next((line for line in lines if line.strip()), "")
    indent = first[: len(first) - len(first.lstrip())]
    if not indent or not all(line.startswith(indent) for line in lines if line.strip()):
        return text
    return "\n".join(line.removeprefix(indent) for line in lines)


def name_of_call(body: str, key: str) -> str | None:
    """Return the name in a JSON text that is a whole call, with an object under the key; None for any other text."""
    try:
        call = read_json(body)
    except ValueError:
        return None
    return call["name"] if _is_call(call, key) and isinstance(_unpacked(call[key]), dict) else None


def _unpacked(arguments: Any) -> Any:
    """Return arguments, which Granite 4 writes as JSON in a text, as an object. What is no object stays as it is."""
    try:
        found = read_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _is_call(value: object, key: str) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and key in value
