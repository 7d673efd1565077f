"""SFT rows with calls in tags.

Function calls written as JSON, in fields or in <tool_call> blocks of the text, become tags. So may whole trajectories
stand inside one assistant turn. A `tools` field is ignored: the system prompt says what the tools are.
"""

from __future__ import annotations

import json

from arpo.protocol.messages import BadRow, parse_message, parse_turns, whole_call


def parse_row(row: dict) -> list[dict[str, str]]:
    """Parse one conversation of either style. Raises BadRow."""
    return parse_turns(row, lambda *turn: [_turn(*turn)])


def _turn(turn: object, role_key: str, text_key: str) -> dict[str, str]:
    """Parse a message and write its calls as text: <search> query </search>."""
    if isinstance(turn, dict) and (calls := turn.get("tool_calls")):
        if not isinstance(calls, list) or len(calls) > 1:
            raise BadRow("one message has several tool_calls, but in the text protocol a turn ends with its first call")
        message = parse_message({**turn, text_key: turn.get(text_key) or ""}, role_key, text_key)
        return {**message, "content": message["content"] + _tag_of_call(calls[0])}
    message = parse_message(turn, role_key, text_key)
    if turn[role_key] == "function_call":
        try:
            call = json.loads(message["content"])
        except ValueError:
            return message  # written in the text protocol already
        return {**message, "content": _tag_of_call(call[0] if isinstance(call, list) and len(call) == 1 else call)}
    if message["role"] == "assistant" and "<tool_call>" in message["content"]:
        return {**message, "content": _with_tag(message["content"])}
    return message


def _with_tag(text: str) -> str:
    """'<tool_call>{"name": "search", "arguments": {"query": "Paris"}}</tool_call>' -> '<search> Paris </search>'."""
    before, _, rest = text.partition("<tool_call>")
    body, closed, after = rest.partition("</tool_call>")
    if not closed or after.strip():
        raise BadRow("a <tool_call> must end its message: in the text protocol a turn ends with its first call")
    try:
        call = json.loads(body)
    except ValueError:
        raise BadRow("the text of a <tool_call> is not valid JSON") from None
    return before + _tag_of_call(call)


def _tag_of_call(call: object) -> str:
    """{"name": "search", "arguments": {"query": "Paris"}} -> "<search> Paris </search>"."""
    name, arguments = whole_call(call).values()
    values = list(arguments.values())
    if len(values) != 1 or not isinstance(values[0], str):
        raise BadRow(f"the call of {name!r} must have one argument, a text: all that a tag can hold")
    return f"<{name}> {values[0]} </{name}>"
