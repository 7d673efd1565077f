"""The codec of calls in Llama's JSON. Tokens are made as those of hermes_codec.py are; see there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from arpo.protocol.hermes import is_call
from arpo.protocol.hermes_codec import QUESTION, HermesCodec
from arpo.protocol.llama import KEYS, RESERVED, THOUGHTS, call_body, parse_calls
from arpo.protocol.schema import ToolSchema, read_json
from arpo.protocol.tags import Call

END_OF_MESSAGE = "<|eom_id|>"
"""The other token with which a Llama ends a turn: one that waits for a tool."""


class LlamaCodec(HermesCodec):
    """Codec for models whose chat template lists tools, and has a call as JSON that is the whole turn.

    Raises UserError, besides that of Codec, for a template that does not.
    """

    format = "llama"
    call_form = 'a call as a turn of {"name": ..., "parameters": {...}} alone'

    @property
    def reserved(self) -> tuple[str, ...]:
        return RESERVED

    @property
    def turn_ends(self) -> tuple[str, ...]:
        return (*super().turn_ends, END_OF_MESSAGE)

    def _writes_calls(self, called: str) -> bool:
        turn = called.removeprefix(self._template([QUESTION], generation=True)).partition(self.tokenizer.eos_token)[0]
        try:
            return is_call(read_json(call_body(turn) or ""), KEYS[-1:])
        except ValueError:
            return False

    def _lists_tools(self, system: str) -> bool:
        return '"parameters"' in system

    def _parse(self, text: str, offered: Mapping[str, ToolSchema]) -> list[Call]:
        return parse_calls(text, offered)

    def _with_calls(self, text: str, message: dict[str, Any]) -> str:
        if THOUGHTS.sub("", text).strip():
            raise ValueError(
                "a message has a call and a text, but with protocol.format=llama a call is all that its turn says; put "
                "the text into <think> ... </think>, or drop it"
            )
        prompt = self._template([QUESTION], generation=True)
        whole = self._template([QUESTION, {**message, "content": ""}], generation=False).removeprefix(prompt)
        return text + whole[: whole.rindex(self.tokenizer.eos_token)]
