"""Shared by all forms of calls: a parsed call, the error messages that the model reads, and escaped results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from arpo.protocol.schema import ToolSchema, argument_of, check_arguments, read_json

UNKNOWN = "unknown"
"""Tag of a call that names no tool. An invented name must not become the name of a metric."""
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
    """A parsed tool call. A malformed call has an `error_kind`, and an `error` that the model reads."""

    argument: str
    error_kind: str | None = None
    error: str = ""
    tag: str = ""
    """Name of the tool."""


def escape_tags(text: str, tags: tuple[str, ...]) -> str:
    """Escape the given tags, so that no tokenizer takes a tag for a special token."""
    return tag_pattern(tags).sub(r"&lt;\1\2&gt;", text)


@cache
def tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for an opening or closing tag. Groups: "" or "/", and the name. Without tags: no match."""
    return re.compile(rf"<(/?)({'|'.join(map(re.escape, tags)) or '(?!)'})>")


def read_call(body: str, offered: Mapping[str, ToolSchema], key: str, a_call: str) -> Call:
    """Parse a call in JSON. A malformed call is returned with an error.

    key: name of the arguments' field. a_call: a correct call, for the error messages.
    """
    try:
        call = read_json(body)
    except ValueError as error:
        return Call(body.strip(), "bad_json", BAD_JSON.format(reason=error, call=a_call), UNKNOWN)
    if not _is_call(call, key):
        return Call(body.strip(), "bad_json", NO_CALL.format(key=key, call=a_call), UNKNOWN)
    return checked_call(body, call["name"], _unpacked(call[key]), offered)


def checked_call(body: str, name: str, arguments: Any, offered: Mapping[str, ToolSchema]) -> Call:
    """Check name and arguments of a call. A wrong call is returned with an error. body: the model's text."""
    if name not in offered:
        quoted = json.dumps(name[:MAX_NAME_CHARS])
        error = UNKNOWN_TOOL.format(name=quoted, tools=", ".join(offered) or "none")
        return Call(body.strip(), "unknown_tool", error, UNKNOWN)
    schema = offered[name]
    error = check_arguments(schema, arguments)
    if error:
        return Call(body.strip(), "bad_arguments", error, name)
    argument = dedented(argument_of(schema, arguments)).strip()
    if not argument:
        return Call(body.strip(), "empty_call", EMPTY_CALL.format(argument=schema.text_argument, tool=name), name)
    return Call(argument, tag=name)


def dedented(text: str) -> str:
    r"""Remove the first line's indentation from all lines, if all lines have it. Evenly indented code stays valid.

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
    """Return the name of a complete call in JSON, with an object under the key. Return None for any other text."""
    try:
        call = read_json(body)
    except ValueError:
        return None
    return call["name"] if _is_call(call, key) and isinstance(_unpacked(call[key]), dict) else None


def _unpacked(arguments: Any) -> Any:
    """Convert arguments in a JSON text (as from Granite 4) to an object. Return any other arguments unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = read_json(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _is_call(value: object, key: str) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and key in value
