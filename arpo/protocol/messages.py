"""Conversations as the files of every style have them: rows, messages, and the calls in their fields.

The styles are ShareGPT `conversations` (from / value, as LLaMA-Factory reads them, `system` beside them) and OpenAI
`messages` (role / content, tool_calls). What becomes of calls is the form's to say (`Form.parse_row`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
# The published RL files were written with "\boxed" in a Python string without r"": \b became a backspace character.
DAMAGED_BOX, BOX = "\x08oxed", "\\boxed"


class BadRow(ValueError):
    """One row that cannot be used; the message names the field and what is wrong with it."""


class Conversation(NamedTuple):
    """A conversation whose messages may have `tool_calls`, [{"name", "arguments"}, ...]."""

    messages: list[dict[str, Any]]
    functions: list[dict] | None
    """The template's `tools=`; None = the loaded tools."""


def parse_message(value: object, role_key: str, text_key: str) -> dict[str, str]:
    """Return a message of any style as {role: system | user | assistant | tool, content}. Raises BadRow."""
    if not isinstance(value, dict) or role_key not in value:
        raise BadRow(f"a message must be an object with {role_key!r} and {text_key!r}, not {str(value)[:80]!r}")
    role = ROLES.get(value[role_key])
    if role is None:
        raise BadRow(f"{role_key} {value[role_key]!r} is unknown; use one of {', '.join(ROLES)}")
    text = value.get(text_key)
    if isinstance(text, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in text):
        text = "".join(part["text"] for part in text)  # OpenAI's content parts
    if not isinstance(text, str):
        raise BadRow(f"{text_key} of the {role} message must be text, not {type(text).__name__}")
    return {"role": role, "content": text}


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


def json_of(text: str, what: str) -> Any:
    """Return the value of a JSON text. Raises BadRow, which says what is none."""
    try:
        return json.loads(text)
    except ValueError:
        raise BadRow(f"{what} not valid JSON") from None


def whole_call(call: object) -> dict[str, Any]:
    """Return {"name", "arguments"} of a call, OpenAI's or bare; arguments may be JSON in a text. Raises BadRow."""
    call = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BadRow(f"a function call must be an object with 'name' and 'arguments', not {str(call)[:80]!r}")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = json_of(arguments, f"the arguments of the call of {call['name']!r} are")
    # parquet gives every call the arguments of all calls, those of others as None
    if not isinstance(arguments, dict | None):
        raise BadRow(f"the arguments of the call of {call['name']!r} must be an object of one or more arguments")
    return {"name": call["name"], "arguments": {k: v for k, v in (arguments or {}).items() if v is not None}}
