"""Reading SFT conversations of every common style as messages, one row after the other.

The styles are ShareGPT `conversations` (from / value, as LLaMA-Factory reads them, `system` beside them), OpenAI
`messages` (role / content, tool_calls), and whole trajectories inside one assistant turn. Function calls written as
JSON, in fields or in <tool_call> blocks of the text, become the text protocol's tags. A `tools`
field is ignored: the system prompt says what the tools are. (For protocol.format=hermes see json_calls.py.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from arpo.data import BadRow, parse_message, read_rows
from arpo.data.prompts import BOX, DAMAGED_BOX
from arpo.errors import UserError


def read_conversations(
    path: str | Path, *, part: int = 0, num_parts: int = 1, parse: Callable[[dict], Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield (place, [{role: system | user | assistant | tool, content}]) of each row; parts are as in `read_rows`.

    `parse` is another parser than `parse_conversation`, for calls in JSON that of json_calls.py.
    Raises UserError naming file and line at the first conversation that cannot be used.

    >>> next(read_conversations("sft.jsonl"))  # {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt"...
    ('sft.jsonl:1', [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}])
    """
    for place, row in read_rows(path, part=part, num_parts=num_parts):
        try:
            yield place, (parse or parse_conversation)(row)
        except BadRow as error:
            raise UserError(f"{place}: {error}; repair or remove it") from None


def parse_conversation(row: dict) -> list[dict[str, str]]:
    """Parse one conversation of either style. Raises BadRow."""
    return parse_turns(row, lambda *turn: [_turn(*turn)])


def parse_turns(row: dict, parse: Callable[[object, str, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Parse each turn with `parse`(turn, role key, text key), and check the order of the messages. Raises BadRow."""
    turns = row.get("conversations") or row.get("messages")
    if not isinstance(turns, list) or not turns:
        raise BadRow("needs a list 'conversations' (ShareGPT) or 'messages' (OpenAI)")
    keys = ("from", "value") if isinstance(turns[0], dict) and "from" in turns[0] else ("role", "content")
    messages = [message for turn in turns for message in parse(turn, *keys)]
    if row.get("system") and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": str(row["system"])})
    _check_order([message["role"] for message in messages])
    if any(m["role"] == "assistant" and not m["content"].strip() and "tool_calls" not in m for m in messages):
        raise BadRow("an assistant message is empty")
    return [{**m, "content": m["content"].replace(DAMAGED_BOX, BOX)} for m in messages]


def _check_order(roles: list[str]) -> None:
    for previous, role in pairwise(["", *roles]):
        if role == "system" and previous:
            raise BadRow("the system message must come first")
        if role == "tool" and previous not in ("assistant", "tool"):
            raise BadRow("a tool message must follow an assistant message")
        if role == "assistant" and previous in ("", "system"):
            raise BadRow("the first message must be a user's: an assistant has nothing to answer")
    if "assistant" not in roles:
        raise BadRow("there is no assistant message to learn from")
    if roles[-1] == "tool":
        raise BadRow("the last message is a tool result, to which the assistant does not answer")


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


def whole_call(call: object) -> dict[str, Any]:
    """Return {"name", "arguments"} of a call, OpenAI's or bare; arguments may be JSON in a text. Raises BadRow."""
    call = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BadRow(f"a function call must be an object with 'name' and 'arguments', not {str(call)[:80]!r}")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise BadRow(f"the arguments of the call of {call['name']!r} are not valid JSON") from None
    # parquet gives every call the arguments of all calls, those of others as None
    if not isinstance(arguments, dict | None):
        raise BadRow(f"the arguments of the call of {call['name']!r} must be an object of one or more arguments")
    return {"name": call["name"], "arguments": {k: v for k, v in (arguments or {}).items() if v is not None}}
