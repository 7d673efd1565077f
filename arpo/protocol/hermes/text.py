r"""Calls in JSON, as Hermes, Qwen2.5 and Qwen3 write them: what the model writes, and what is wrong with it. Text only.

    <think> ... </think>
    <tool_call>
    {"name": "search", "arguments": {"query": "Paris"}}
    </tool_call>

A turn ends with the model's end token. A turn without a block is the final answer. What follows a turn with calls, that
is their results and the begin of the next turn, is the chat template's to write: see template_codec.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from arpo.protocol.calls import UNKNOWN, Call, read_call
from arpo.protocol.schema import ToolSchema, read_json

RESERVED = ("think", "tool_call", "tool_response")
"""Tags that have a meaning in this protocol, and so are escaped in results."""

KEYS = ("arguments",)
"""Keys of a call under which its arguments may stand; the last one is the form's own."""
A_CALL = '{"name": the name of a tool, "arguments": {...}}'
UNCLOSED_CALL = f"Error: the call is cut off. Write {A_CALL} and close the tool_call tag."

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
