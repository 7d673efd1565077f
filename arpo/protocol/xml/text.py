r"""Calls in XML, as Qwen3-Coder, Qwen3.5 and Nemotron 3 write them: what the model writes, and what is wrong with it.

    <tool_call>
    <function=search>
    <parameter=query>
    Paris
    </parameter>
    </function>
    </tool_call>

Turns and blocks are those of hermes/text.py. Nothing is escaped, and values have no types: the tool's schema says what
a text means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from arpo.protocol.calls import UNKNOWN, Call, checked_call
from arpo.protocol.hermes.text import call_bodies
from arpo.protocol.schema import ToolSchema, value_of

A_CALL = "<function=NAME> <parameter=ARGUMENT> value </parameter> </function> in a tool_call tag"
BAD_XML = f"Error: the call is not one whole function. Write {A_CALL}."
UNCLOSED_CALL = f"Error: the call is cut off. Write {A_CALL}."

_FUNCTION = re.compile(r"<function=([^<>]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>]+)>\n?(.*?)\n?", re.DOTALL)


def read_function(body: str) -> tuple[str, dict[str, str]] | None:
    """Return (name, texts of the parameters) of what is in a block; None where it is not one whole function.

    >>> read_function("<function=search><parameter=query>\\nParis\\n</parameter></function>")
    ('search', {'query': 'Paris'})
    """
    function = _FUNCTION.fullmatch(body.strip())
    if function is None:
        return None
    *parameters, rest = function[2].split("</parameter>")
    found = [_PARAMETER.fullmatch(parameter) for parameter in parameters]
    return None if rest.strip() or None in found else (function[1].strip(), {one[1].strip(): one[2] for one in found})


def parse_calls(text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
    """Return the calls of a turn in order, malformed ones with what is wrong. `offered` are the tools, by name."""
    return [parse_body(body, is_closed, offered) for body, is_closed in call_bodies(text)]


def parse_body(body: str, is_closed: bool, offered: Mapping[str, ToolSchema]) -> Call:
    """Parse one block. A whole function behind which the closing tag is missing is a call, as vLLM's parser has it."""
    function = read_function(body)
    if function is None:
        error = ("bad_xml", BAD_XML) if is_closed else ("unclosed_call", UNCLOSED_CALL)
        return Call(body.strip(), *error, UNKNOWN)
    name, texts = function
    schema = offered.get(name)
    arguments = {key: value_of(schema, key, text) for key, text in texts.items()} if schema else texts
    return checked_call(body, name, arguments, offered)
