"""The codec of calls in <tool_call> blocks. Tokens are made by template_codec.py."""

from __future__ import annotations

from typing import Any

from arpo.protocol.hermes.text import RESERVED, parse_calls
from arpo.protocol.template_codec import QUESTION, TemplateCodec


class HermesCodec(TemplateCodec):
    """Codec for models whose chat template lists tools, and has calls as JSON in <tool_call> blocks."""

    format = "hermes"
    call_form = "calls as <tool_call> JSON </tool_call>"
    tools_mark = "<tools>"
    reserved = RESERVED
    parse_calls = staticmethod(parse_calls)

    def _with_calls(self, text: str, message: dict[str, Any]) -> str:
        asked = self._template([QUESTION], generation=False)
        whole = self._template([QUESTION, {**message, "content": ""}], generation=False).removeprefix(asked)
        calls = whole[whole.index("<tool_call>") : whole.rindex(self.tokenizer.eos_token)]
        return text + "\n" * bool(text) + calls
