r"""A call as JSON, without other text in the turn: the form of Llama 3.1 and later. Those models need no SFT for it.

    --protocol.format extras/llama.py:LLAMA --data.system_prompt default

    <think> ... </think>{"name": "search", "parameters": {"query": "Paris"}}

A turn is either one call, with thoughts but no other text, or the final answer. A turn ends with the model's end token,
and the chat template writes the text after the turn: see arpo/protocol/template_codec.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from arpo.protocol import hermes
from arpo.protocol.calls import Call, name_of_call, read_call
from arpo.protocol.form import Form
from arpo.protocol.format_rules import FormatRules, Segments, has_unpaired_think, last_turn
from arpo.protocol.messages import Conversation
from arpo.protocol.schema import ToolSchema
from arpo.protocol.template_codec import QUESTION, TemplateCodec
from arpo.protocol.xml import with_fields

A_CALL = '{"name": the name of a tool, "parameters": {...}} and nothing else'
THOUGHTS = re.compile(r"(?<!\s)\s*<think>.*?(?:</think>|\Z)", re.DOTALL)
"""Thoughts with the space before them. The space is matched in one attempt: a match from each of its characters would
take time quadratic in the length."""
_AN_OBJECT = re.compile(r"\{\s*[\"']")
END_OF_MESSAGE = "<|eom_id|>"
"""Llama's second end token: it ends a turn with a call of a tool."""


def call_body(text: str) -> str | None:
    """Return the text after the first thoughts of a turn, if it begins like a JSON object; None for an answer.

    >>> call_body('<think>{"a": 1}</think> {"name": "f"'), call_body('So {"name": "f"}'), call_body("{1, 2}")
    ('{"name": "f"', None, None)
    """
    begin = 0
    while thought := THOUGHTS.match(text, begin):  # only before the call, not inside its arguments
        begin = thought.end()
    said = text[begin:].strip()
    return said if _AN_OBJECT.match(said) else None


class LlamaCodec(TemplateCodec):
    """Codec for chat templates that list tools and write a call as JSON, without other text in the turn."""

    format = "extras/llama.py:LLAMA"
    call_form = 'a call as a turn of {"name": ..., "parameters": {...}} alone'
    tools_mark = '"parameters"'
    reserved = ("think",)

    @staticmethod
    def parse_calls(text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
        body = call_body(text)
        return [] if body is None else [read_call(body, offered, "parameters", A_CALL)]

    @property
    def turn_ends(self) -> tuple[str, ...]:
        return (*super().turn_ends, END_OF_MESSAGE)

    def _with_calls(self, text: str, message: dict[str, Any]) -> str:
        if THOUGHTS.sub("", text).strip():
            raise ValueError(
                "a message has a call and a text, but with this form a call is all that its turn says; put "
                "the text into <think> ... </think>, or drop it"
            )
        prompt = self._template([QUESTION], generation=True)
        whole = self._template([QUESTION, {**message, "content": ""}], generation=False).removeprefix(prompt)
        return text + whole[: whole.rindex(self.tokenizer.eos_token)]


class LlamaRules(FormatRules):
    """The rules of `FormatRules`, and one more: a turn beginning like a JSON object is a complete object with name and
    parameters."""

    results = re.compile(r"(?<=})\s*ipython\n\n.*?assistant\n\n", re.DOTALL)

    def graded_text(self, segments: Segments) -> str:
        text = last_turn(segments)
        return THOUGHTS.sub("", text) if call_body(text) is None else ""

    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
        if (body := call_body(text)) is not None:  # arguments may contain thoughts
            return "malformed_call" if name_of_call(body, "parameters") is None else ""
        return "unpaired_think" if has_unpaired_think(THOUGHTS.sub("", text), THOUGHTS.findall(text)) else ""

    def answered_calls(self, segments: Segments, tools: Sequence[str] = ()) -> set[str]:
        answered = set()
        for (text, by_model), (results, _) in pairwise(segments):
            body = call_body(text) or ""
            result = results.partition("ipython\n\n")[2].lstrip(' "')
            name = name_of_call(body, "parameters")
            if by_model and name and not result.startswith("Error"):
                answered.add(name)
        return answered


def parse_row(row: dict) -> Conversation:
    """Parse one conversation of any style, with the calls of <tool_call> blocks in fields. Raises BadRow."""
    conversation = hermes.parse_row(row, names_of=lambda text: hermes.names_in(text) or _name_in(text))
    return conversation._replace(messages=[with_fields(message) for message in conversation.messages])


def _name_in(text: str) -> list[str]:
    body = call_body(text)
    return [] if body is None else [name_of_call(body, "parameters") or "unknown"]


LLAMA = Form(LlamaCodec, LlamaRules(), parse_row)
