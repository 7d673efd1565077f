"""SFT rows for calls in XML: those in JSON, in fields or in <tool_call> blocks, are fields; text in XML stays."""

from __future__ import annotations

from arpo.protocol.hermes.rows import parse_row as parse_json_row
from arpo.protocol.hermes.text import call_bodies
from arpo.protocol.llama.rows import with_fields
from arpo.protocol.messages import Conversation
from arpo.protocol.xml.text import read_function


def parse_row(row: dict) -> Conversation:
    """Parse one conversation of any style. Raises BadRow."""
    conversation = parse_json_row(row)
    messages = [
        message if any(read_function(body) for body, _ in call_bodies(message["content"])) else with_fields(message)
        for message in conversation.messages
    ]
    return conversation._replace(messages=messages)
