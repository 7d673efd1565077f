r"""Calls as XML in <tool_call> blocks: the form of Qwen3-Coder, Qwen3.5, Qwen3.6 and Nemotron 3.

    <tool_call>
    <function=search>
    <parameter=query>
    Paris
    </parameter>
    </function>
    </tool_call>

Turns and blocks are those of hermes.py. Nothing is escaped, so no value can hold a tag that would end it: what vLLM's
parser would cut there is an error here. Values have no types: the tool's schema says what a text means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from arpo.protocol import hermes
from arpo.protocol.calls import UNKNOWN, Call, checked_call
from arpo.protocol.form import Form
from arpo.protocol.hermes import BLOCKS, HermesCodec, HermesRules, call_bodies
from arpo.protocol.messages import Conversation, json_of, whole_call
from arpo.protocol.schema import ToolSchema, value_of

A_CALL = "<function=NAME> <parameter=ARGUMENT> value </parameter> </function> in a tool_call tag"
BAD_XML = f"Error: the call is not one whole function, or a value holds one of its tags. Write {A_CALL}."
UNOPENED_CALL = f"Error: the function is in no tool_call tag. Write {A_CALL}."
UNCLOSED_CALL = f"Error: the call is cut off. Write {A_CALL}."

_FUNCTION = re.compile(r"<function=([^<>]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>]+)>\n?(.*?)\n?", re.DOTALL)
_ENDS_A_VALUE = re.compile(r"<\s*parameter\s*=|<\s*/\s*parameter\s*>|</function>")
_UNOPENED = re.compile(r"<function=.*", re.DOTALL)


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
    if rest.strip() or None in found or any(_ENDS_A_VALUE.search(one[2]) for one in found):
        return None
    return function[1].strip(), {one[1].strip(): one[2] for one in found}


class XmlCodec(HermesCodec):
    """Codec for models whose chat template lists tools, and has calls as XML in <tool_call> blocks."""

    format = "xml"
    call_form = "calls as <tool_call> <function=...> XML </tool_call>"

    @classmethod
    def parse_calls(cls, text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
        calls = super().parse_calls(text, offered)
        if not calls and (function := _UNOPENED.search(BLOCKS.sub("", text))):
            return [Call(function[0].strip(), "unopened_call", UNOPENED_CALL, UNKNOWN)]
        return calls

    @staticmethod
    def parse_body(body: str, is_closed: bool, offered: Mapping[str, ToolSchema]) -> Call:
        """Parse one block. A whole function whose closing tag is missing is a call, as vLLM's parser has it too."""
        function = read_function(body)
        if function is None:
            error = ("bad_xml", BAD_XML) if is_closed else ("unclosed_call", UNCLOSED_CALL)
            return Call(body.strip(), *error, UNKNOWN)
        name, texts = function
        schema = offered.get(name)
        arguments = {key: value_of(schema, key, text) for key, text in texts.items()} if schema else texts
        return checked_call(body, name, arguments, offered)


class XmlRules(HermesRules):
    """The rules of calls in JSON, with one whole function in a block in the place of an object."""

    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
        error = super().turn_error(text, has_result, tools)
        return error or ("unopened_call" if _UNOPENED.search(BLOCKS.sub("", text)) else "")

    @staticmethod
    def name_of(body: str) -> str | None:
        function = read_function(body)
        return function and function[0]


def parse_row(row: dict) -> Conversation:
    """Parse an SFT conversation of any style. Calls in JSON become fields, text in XML stays. Raises BadRow."""
    conversation = hermes.parse_row(row)
    messages = [
        message if any(read_function(body) for body, _ in call_bodies(message["content"])) else with_fields(message)
        for message in conversation.messages
    ]
    return conversation._replace(messages=messages)


def with_fields(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls in <tool_call> blocks, in JSON, are fields. Raises BadRow."""
    bodies = call_bodies(message["content"]) if message["role"] == "assistant" else []
    if not bodies:
        return message
    found = [json_of(body, "the text of a <tool_call> is") for body, _ in bodies]
    said = BLOCKS.sub(lambda block: "" if block[1] is not None else block[0], message["content"])
    return {**message, "content": said.strip(), "tool_calls": [whole_call(call) for call in found]}


FORM = Form(XmlCodec, XmlRules(), parse_row)
