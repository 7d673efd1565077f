r"""Calls in JSON, as Hermes, Qwen2.5 and Qwen3 write them: what the model writes, and what is wrong with it. Text only.

    <think> ... </think>
    <tool_call>
    {"name": "search", "arguments": {"query": "Paris"}}
    </tool_call>

A turn ends with the model's end token. A turn without a block is the final answer. What follows a turn with calls, that
is their results and the begin of the next turn, is the chat template's to write: see hermes_codec.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from arpo.protocol.schema import ToolSchema, argument_of, check_arguments, read_json
from arpo.protocol.tags import Call

RESERVED = ("think", "tool_call", "tool_response")
"""Tags that have a meaning in this protocol, and so are escaped in results."""
UNKNOWN = "unknown"
"""Tag of a call that names none of the tools: what a model may make up is no name for a metric."""
MAX_NAME_CHARS = 60

KEYS = ("arguments",)
"""Keys of a call under which its arguments may stand; the last one is the form's own."""
A_CALL = '{"name": the name of a tool, "arguments": {...}}'
BAD_JSON = "Error: the call is not valid JSON ({reason}). Write {call}."
NO_CALL = "Error: the call is no JSON object with a name and {key}. Write {call}."
UNCLOSED_CALL = f"Error: the call is cut off. Write {A_CALL} and close the tool_call tag."
UNKNOWN_TOOL = "Error: there is no tool {name}. There are: {tools}."
EMPTY_CALL = 'Error: the argument "{argument}" of {tool} is empty.'

BLOCKS = re.compile(r"<think>.*?(?:</think>|\Z)|<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
"""Thoughts, and calls with groups 1 (what is in them) and 2 (the closing tag), one after the other."""


def call_bodies(text: str) -> list[tuple[str, bool]]:
    """Return (text, whether it is closed) of a turn's <tool_call> blocks. What a thought contains is none.

    >>> call_bodies("<think>a <tool_call></think><tool_call>{}</tool_call><tool_call>{")
    [('{}', True), ('{', False)]
    """
    return [(match[1], bool(match[2])) for match in BLOCKS.finditer(text) if match[1] is not None]


def parse_calls(text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
    """Return the calls of a turn in order, malformed ones with what is wrong. `offered` are the tools, by name."""
    return [parse_body(body, is_closed, offered) for body, is_closed in call_bodies(text)]


def parse_body(body: str, is_closed: bool, offered: Mapping[str, ToolSchema]) -> Call:
    """Parse one block. Whole JSON whose closing tag is missing is a call, as vLLM's parser has it too."""
    if not is_closed:
        try:
            read_json(body)
        except ValueError:
            return Call(body.strip(), "unclosed_call", UNCLOSED_CALL, UNKNOWN)
    return read_call(body, offered, KEYS, A_CALL)


def read_call(body: str, offered: Mapping[str, ToolSchema], keys: Sequence[str], a_call: str) -> Call:
    """Return the call that a JSON text is, or what is wrong with it. `keys` are as KEYS, `a_call` shows a right one."""

    def wrong(kind: str, error: str, tag: str = UNKNOWN) -> Call:
        return Call(body.strip(), kind, error, tag)

    try:
        call = read_json(body)
    except ValueError as error:
        return wrong("bad_json", BAD_JSON.format(reason=error, call=a_call))
    if not is_call(call, keys):
        return wrong("bad_json", NO_CALL.format(key=keys[-1], call=a_call))
    name, arguments = call["name"], call[next(key for key in keys if key in call)]
    if name not in offered:
        shown = json.dumps(name[:MAX_NAME_CHARS])  # in ASCII: it may hold what no text can
        return wrong("unknown_tool", UNKNOWN_TOOL.format(name=shown, tools=", ".join(offered) or "none"))
    schema = offered[name]
    if error := check_arguments(schema, arguments):
        return wrong("bad_arguments", error, name)
    argument = argument_of(schema, arguments).strip()
    if not argument:
        return wrong("empty_call", EMPTY_CALL.format(argument=schema.text_argument, tool=name), name)
    return Call(argument, tag=name)


def is_call(value: object, keys: Sequence[str]) -> bool:
    """Return whether a value is an object with a name and, under one of the keys, whatever stands for arguments."""
    return isinstance(value, dict) and isinstance(value.get("name"), str) and any(key in value for key in keys)
