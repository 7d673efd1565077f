"""Calls in tags, `<search> query </search>`, with the results inside the assistant's one turn: the papers' form."""

from arpo.protocol.form import Form
from arpo.protocol.tags.codec import TagsCodec
from arpo.protocol.tags.format import TagsRules
from arpo.protocol.tags.rows import parse_row
from arpo.protocol.tags.text import PAPER_TOOLS, merge_tool_messages, render_result, reserved_tags

__all__ = ["FORM", "PAPER_TOOLS", "TagsCodec", "merge_tool_messages", "render_result", "reserved_tags"]

FORM = Form(TagsCodec, TagsRules(), parse_row, template_lists_tools=False)
