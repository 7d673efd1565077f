r"""Calls as XML in <tool_call> blocks: the form of Qwen3-Coder, Qwen3.5, Qwen3.6 and Nemotron 3.

    <tool_call>
    <function=search>
    <parameter=query>
    Paris
    </parameter>
    </function>
    </tool_call>

Turns and blocks are as in hermes.py. The form has no escapes, so a value must not contain a tag that would end the
value. vLLM's parser would cut there; here this is an error. Values have no types: the tool's schema decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from arpo.protocol import hermes
from arpo.protocol.calls import UNKNOWN, Call, checked_call
from arpo.protocol.form import Form
from arpo.protocol.hermes import BLOCKS, HermesCodec, HermesRules, call_bodies
from arpo.protocol.messages import Conversation, json_of, parse_call_object
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
    """Return (name, texts of the parameters) of a block's content. Return None if it is not one complete function.

    >>> read_function("<function=search><parameter=query>\\nParis\\n</parameter></function>")
    ('search', {'query': 'Paris'})
    """
    function = _FUNCTION.fullmatch(body.strip())
    if function is None:
        return None
    *parameters, rest = function[2].split("</parameter>")
    matches = [_PARAMETER.fullmatch(parameter) for parameter in parameters]
    if rest.strip() or None in matches or any(_ENDS_A_VALUE.search(match[2]) for match in matches):
        return None
    return function[1].strip(), {match[1].strip(): match[2] for match in matches}


class XmlCodec(HermesCodec):
    """Codec for chat templates that list tools and write calls as XML in <tool_call> blocks."""

    format = "xml"
    call_form = "calls as <tool_call> <function=...> XML </tool_call>"

    @classmethod
    def parse_calls(cls, text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
        calls = super().parse_calls(text, offered)
        function = _UNOPENED.search(BLOCKS.sub("", text))
        if function and not calls:
            return [Call(function[0].strip(), "unopened_call", UNOPENED_CALL, UNKNOWN)]
        return calls

    @staticmethod
    def parse_body(body: str, is_closed: bool, offered: Mapping[str, ToolSchema]) -> Call:
        """Parse one block. A complete function without the block's closing tag is a call, as for vLLM's parser."""
        function = read_function(body)
        if function is None:
            if is_closed:
                return Call(body.strip(), "bad_xml", BAD_XML, UNKNOWN)
            return Call(body.strip(), "unclosed_call", UNCLOSED_CALL, UNKNOWN)
        name, texts = function
        schema = offered.get(name)
        arguments = {key: value_of(schema, key, text) for key, text in texts.items()} if schema else texts
        return checked_call(body, name, arguments, offered)


class XmlRules(HermesRules):
    """The rules of calls in JSON, with one complete function per block instead of an object."""

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
    """Return the message with the JSON calls of its <tool_call> blocks in the field `tool_calls`. Raises BadRow."""
    bodies = call_bodies(message["content"]) if message["role"] == "assistant" else []
    if not bodies:
        return message
    calls = [parse_call_object(json_of(body, "the text of a <tool_call> is")) for body, _ in bodies]
    # BLOCKS also matches thoughts. They stay in the text.
    text = BLOCKS.sub(lambda block: "" if block[1] is not None else block[0], message["content"])
    return {**message, "content": text.strip(), "tool_calls": calls}


FORM = Form(XmlCodec, XmlRules(), parse_row)
