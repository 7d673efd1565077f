"""The codec of calls in XML. Tokens are made by template_codec.py."""

from __future__ import annotations

from arpo.protocol.hermes.codec import HermesCodec
from arpo.protocol.xml.text import parse_calls


class XmlCodec(HermesCodec):
    """Codec for models whose chat template lists tools, and has calls as XML in <tool_call> blocks."""

    format = "xml"
    call_form = "calls as <tool_call> <function=...> XML </tool_call>"
    parse_calls = staticmethod(parse_calls)
