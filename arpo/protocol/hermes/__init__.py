"""Calls as JSON in `<tool_call>` blocks, one or more to a turn: the form of Hermes, Qwen2.5 and Qwen3."""

from arpo.protocol.form import Form
from arpo.protocol.hermes.codec import HermesCodec
from arpo.protocol.hermes.format import HermesRules
from arpo.protocol.hermes.rows import parse_row

__all__ = ["FORM", "HermesCodec"]

FORM = Form(HermesCodec, HermesRules(), parse_row)
