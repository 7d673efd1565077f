r"""Calls in JSON, as Llama 3.1 and later write them: what the model writes, and what is wrong with it. Text only.

    <think> ... </think>{"name": "search", "parameters": {"query": "Paris"}}

A turn is one call and nothing else, but for thoughts, or it is the final answer. It ends with the model's end token,
and the chat template writes what follows: see template_codec.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from arpo.protocol.calls import Call, read_call
from arpo.protocol.schema import ToolSchema

RESERVED = ("think",)
"""Tags that have a meaning in this protocol, and so are escaped in results."""
KEYS = ("arguments", "parameters")
"""Keys of a call under which its arguments may stand, in the order in which vLLM's parser looks for them."""
A_CALL = '{"name": the name of a tool, "parameters": {...}} and nothing else'
THOUGHTS = re.compile(r"(?<!\s)\s*<think>.*?(?:</think>|\Z)", re.DOTALL)
"""With the space before them, looked at once: from each of its characters on it would take the square of its length."""
_AN_OBJECT = re.compile(r"\{\s*[\"']")


def call_body(text: str) -> str | None:
    """Return what a turn is behind its first thoughts, if that begins as an object of JSON; None for an answer.

    >>> call_body('<think>{"a": 1}</think> {"name": "f"'), call_body('So {"name": "f"}'), call_body("{1, 2}")
    ('{"name": "f"', None, None)
    """
    begin = 0
    while thought := THOUGHTS.match(text, begin):  # not those in the call's arguments
        begin = thought.end()
    said = text[begin:].strip()
    return said if _AN_OBJECT.match(said) else None


def parse_calls(text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
    """Return the call of a turn, a malformed one with what is wrong; none for an answer. `offered`: tools by name."""
    body = call_body(text)
    return [] if body is None else [read_call(body, offered, KEYS, A_CALL)]
