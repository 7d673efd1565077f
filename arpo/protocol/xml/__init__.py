"""Calls as XML in `<tool_call>` blocks: the form of Qwen3-Coder, Qwen3.5, Qwen3.6 and Nemotron 3."""

from arpo.protocol.form import Form
from arpo.protocol.xml.codec import XmlCodec
from arpo.protocol.xml.format import XmlRules
from arpo.protocol.xml.rows import parse_row

__all__ = ["FORM", "XmlCodec"]

FORM = Form(XmlCodec, XmlRules(), parse_row)
