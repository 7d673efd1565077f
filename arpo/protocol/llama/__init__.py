"""A call as JSON that is the whole turn: the form of Llama 3.1 and later."""

from arpo.protocol.form import Form
from arpo.protocol.llama.codec import LlamaCodec
from arpo.protocol.llama.format import LlamaRules
from arpo.protocol.llama.rows import parse_row

__all__ = ["FORM", "LlamaCodec"]

FORM = Form(LlamaCodec, LlamaRules(), parse_row)
