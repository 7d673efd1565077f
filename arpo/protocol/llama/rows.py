"""SFT rows for Llama's form, whose text has no blocks: calls in <tool_call> blocks become fields."""

from __future__ import annotations

import json
from typing import Any

from arpo.protocol.hermes.rows import parse_row as parse_json_row
from arpo.protocol.hermes.text import BLOCKS, call_bodies
from arpo.protocol.messages import BadRow, Conversation, whole_call


def parse_row(row: dict) -> Conversation:
    """Parse one conversation of any style, with the calls of <tool_call> blocks in fields. Raises BadRow."""
    conversation = parse_json_row(row)
    return conversation._replace(messages=[with_fields(message) for message in conversation.messages])


def with_fields(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls in <tool_call> blocks, in JSON, are fields. Raises BadRow."""
    bodies = call_bodies(message["content"]) if message["role"] == "assistant" else []
    if not bodies:
        return message
    try:
        found = [json.loads(body) for body, _ in bodies]
    except ValueError:
        raise BadRow("the text of a <tool_call> is not valid JSON") from None
    said = BLOCKS.sub(lambda block: "" if block[1] is not None else block[0], message["content"])
    return {**message, "content": said.strip(), "tool_calls": [whole_call(call) for call in found]}
