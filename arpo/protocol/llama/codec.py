"""The codec of calls in Llama's JSON. Tokens are made by template_codec.py."""

from __future__ import annotations

from typing import Any

from arpo.protocol.llama.text import RESERVED, THOUGHTS, parse_calls
from arpo.protocol.template_codec import QUESTION, TemplateCodec

END_OF_MESSAGE = "<|eom_id|>"
"""The other token with which a Llama ends a turn: one that waits for a tool."""


class LlamaCodec(TemplateCodec):
    """Codec for models whose chat template lists tools, and has a call as JSON that is the whole turn."""

    format = "llama"
    call_form = 'a call as a turn of {"name": ..., "parameters": {...}} alone'
    tools_mark = '"parameters"'
    reserved = RESERVED
    parse_calls = staticmethod(parse_calls)

    @property
    def turn_ends(self) -> tuple[str, ...]:
        return (*super().turn_ends, END_OF_MESSAGE)

    def _with_calls(self, text: str, message: dict[str, Any]) -> str:
        if THOUGHTS.sub("", text).strip():
            raise ValueError(
                "a message has a call and a text, but with protocol.format=llama a call is all that its turn says; put "
                "the text into <think> ... </think>, or drop it"
            )
        prompt = self._template([QUESTION], generation=True)
        whole = self._template([QUESTION, {**message, "content": ""}], generation=False).removeprefix(prompt)
        return text + whole[: whole.rindex(self.tokenizer.eos_token)]
