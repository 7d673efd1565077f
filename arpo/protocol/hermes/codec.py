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
        alone, behind = (
            self._template([QUESTION, {**message, "content": said}], generation=False).removeprefix(asked)
            for said in ("", text)
        )
        calls = alone[alone.index("<tool_call>") : alone.rindex(self.tokenizer.eos_token)]
        before = behind.rpartition(calls)[0]
        space = before[len(before.rstrip()) :]  # one line break of Qwen3's template, two of Qwen3.5's
        return text.rstrip() + space + calls if text else calls
