"""Conversations from files of every style: rows, messages, and calls in messages.

The styles are ShareGPT `conversations` (from / value, as in LLaMA-Factory, with `system` beside `conversations`) and
OpenAI `messages` (role / content, tool_calls). The form decides the further handling of calls (`Form.parse_row`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from arpo.protocol.message_fields import (
    IGNORED_FIELDS,
    BadRow,
    check_message_fields,
    check_row_fields,
    is_empty,
    is_trained,
    json_of,
    parse_message_object,
    thought_block,
    with_thought,
)

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function": "tool",
}
CALL_ROLES = ("function_call", "tool_call")
"""Roles of messages that are calls, as JSON or in the form's own text."""
PART_KINDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning": "thought",
    "thinking": "thought",
    "tool_call": "call",
}
"""`type` of a part of a message (in OpenAI's, Anthropic's and LLaMA-Factory's files) -> its kind."""
THOUGHT = re.compile(r"(?:\s*<think>.*?</think>\s*)?", re.DOTALL)
"""A thought at the start of a text, with the blanks around it. Matches "" if there is none."""
# The published RL files were written with "\boxed" in a Python string without r"": \b became a backspace character.
DAMAGED_BOX = "\x08oxed"
BOX = "\\boxed"


class Conversation(NamedTuple):
    """A conversation. Its messages may have `tool_calls`, [{"name", "arguments"}, ...]."""

    messages: list[dict[str, Any]]
    functions: list[dict] | list[str] | None
    """The template's `tools=`, or the names of loaded tools; None = all loaded tools."""


def parse_message(value: object, role_key: str, text_key: str) -> dict[str, Any]:
    """Return a message of any style as {role: system | user | assistant | tool, content}. Raises BadRow.

    A thought in a separate field becomes <think> ... </think> in front of the text. Calls (in fields, in parts, or as
    the JSON of a message with a call role) become a list `tool_calls`, unchanged. An unknown field of the assistant
    with a value is a BadRow.
    """
    value = parse_message_object(value)
    if not isinstance(value, dict) or role_key not in value:
        raise BadRow(f"a message must be an object with {role_key!r} and {text_key!r}, not {str(value)[:80]!r}")
    role = ROLES.get(str(value[role_key]))
    if role is None:
        raise BadRow(f"{role_key} {value[role_key]!r} is unknown; use one of {', '.join(ROLES)}")
    text = value.get(text_key)
    calls = []
    if role == "assistant":
        check_message_fields(value, role_key, text_key)
        calls = _calls_in_fields(value)
    if isinstance(text, list):
        text, calls_in_parts = _joined_parts(text, text_key, role)
        calls += calls_in_parts
    if not isinstance(text, str) and not (text is None and calls):
        raise BadRow(f"{text_key} of the {role} message must be text, not {type(text).__name__}")
    text = text or ""
    if value[role_key] in CALL_ROLES:
        text, calls_in_text = _calls_in_text(text, str(value[role_key]))
        calls = [*calls_in_text, *calls]
    if role == "assistant":
        text = with_thought(value, text)
    message = {"role": role, "content": text}
    if calls:
        message["tool_calls"] = calls
    return message


def parse_turns(row: dict, parse: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the checked messages of a row, in order. Raises BadRow.

    parse: converts a message, to one or more. It gets {role, content}, with `tool_calls` as in the file, and for a
    result also `name` and `tool_call_id`. A message without loss has trained=False.
    """
    turns = as_list(row.get("conversations")) or as_list(row.get("messages"))
    if not isinstance(turns, list) or not turns:
        forms = "'conversations' (ShareGPT) or 'messages' (OpenAI), or prompt and completion, or instruction and output"
        raise BadRow(f"needs a list {forms}; has {', '.join(map(str, row)) or 'nothing'}")
    check_row_fields(row)
    turns = [parse_message_object(turn) for turn in turns]
    is_sharegpt = isinstance(turns[0], dict) and "from" in turns[0]
    role_key, text_key = ("from", "value") if is_sharegpt else ("role", "content")
    parsed: list[dict[str, Any]] = []
    for turn in turns:
        message = parse_message(turn, role_key, text_key)
        role = message["role"]
        if role == "tool":
            message |= {key: str(turn[key]) for key in ("name", "tool_call_id") if turn.get(key) is not None}
        if not is_trained(turn, role) and role in ("assistant", "tool"):
            message["trained"] = False
        if role == "assistant" and parsed and parsed[-1]["role"] == "assistant":
            parsed[-1] = _join_call(parsed[-1], message, is_call=turn[role_key] in CALL_ROLES)
        else:
            parsed.append(message)
    if row.get("system"):
        parsed = _with_row_system(parsed, str(row["system"]))
    _check_order([message["role"] for message in parsed])
    messages = [converted for message in parsed for converted in parse(message)]
    if any(m["role"] == "assistant" and not m["content"].strip() and "tool_calls" not in m for m in messages):
        raise BadRow("an assistant message is empty")
    return [{**m, "content": m["content"].replace(DAMAGED_BOX, BOX)} for m in messages]


def _with_row_system(messages: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """Return the messages with the system prompt of the row's field `system`."""
    has_system = messages[0]["role"] == "system"
    if has_system and messages[0]["content"] != system:
        raise BadRow("the row has a system prompt in `system` and another one in its messages; drop one")
    return [{"role": "system", "content": system}, *messages[has_system:]]


def _check_order(roles: list[str]) -> None:
    for previous, role in pairwise(["", *roles]):
        if role == "system" and previous:
            raise BadRow("the system message must come first")
        if role == "tool" and previous not in ("assistant", "tool"):
            raise BadRow("a tool message must follow an assistant message")
        if role == "assistant" and previous in ("", "system"):
            raise BadRow("the first message must be a user's: an assistant has nothing to answer")
        if role == "user" and previous == "tool":
            raise BadRow("a user's message follows a tool result, to which the assistant has not answered")
    if "assistant" not in roles:
        raise BadRow("there is no assistant message to learn from")
    if roles[-1] == "tool":
        raise BadRow("the last message is a tool result, to which the assistant does not answer")


def as_list(value: object) -> object:
    """Return messages as a list if they are a JSON text (csv has no other type), any other value unchanged."""
    if not isinstance(value, str) or not re.match(r"\s*\[\s*\{", value):
        return value
    try:
        messages = json.loads(value)
    except ValueError:
        return value
    if all(isinstance(message, dict) and {"role", "from"} & message.keys() for message in messages):
        return messages
    return value


def _joined_parts(parts: list, text_key: str, role: str) -> tuple[str, list]:
    """Return the text and the calls of a message in parts."""
    text = ""
    calls = []
    for part in parts:
        kind = PART_KINDS.get(str(part.get("type") or "text")) if isinstance(part, dict) else None
        keys = ("text", "value", part.get("type", "text")) if kind else ()
        part_text = next((part[key] for key in keys if isinstance(part.get(key), str)), None)
        if part_text is None or (kind != "text" and role != "assistant"):
            raise BadRow(f"{text_key} of the {role} message has a part that is no text: {str(part)[:80]!r}")
        if kind == "call":
            part_text, calls_in_part = _calls_in_text(part_text, "tool_call")
            text += part_text
            calls += calls_in_part
        elif calls:
            raise BadRow(f"{text_key} of the {role} message goes on behind a call, with which its turn ends")
        elif kind == "thought":
            text += thought_block(part_text)
        else:
            text += part_text
    return text, calls


# ---- calls


def _calls_in_fields(message: dict) -> list:
    calls = message.get("tool_calls") or []
    if isinstance(calls, str):
        calls = json_of(calls, "tool_calls are")
    if not isinstance(calls, list):
        raise BadRow(f"tool_calls must be a list, not {type(calls).__name__}")
    old_call = message.get("function_call")  # OpenAI's field before tool_calls
    return [*calls] if is_empty(old_call) else [*calls, old_call]


def _calls_in_text(text: str, role: str) -> tuple[str, list]:
    """Return the thought and the calls of a message with a call role. If the calls are in tags: (the text, [])."""
    thought = THOUGHT.match(text)[0]
    rest = text[len(thought) :]
    if "<" in rest and not rest.lstrip().startswith(("{", "[")):
        return text, []
    calls = json_of(rest, f"the text of a {role} is")
    return thought, calls if isinstance(calls, list) else [calls]


def _join_call(message: dict[str, Any], call: dict[str, Any], *, is_call: bool) -> dict[str, Any]:
    """Join an assistant's message and the call in the next message. Apart, the model would end the turn in between.

    is_call: True if the second message has a call role.
    """
    new_calls = call.get("tool_calls", [])
    if not (is_call or (new_calls and not call["content"].strip())):
        raise BadRow("two assistant messages follow each other; make them one, or put a user's between them")
    if message.get("trained", True) != call.get("trained", True):
        raise BadRow("an assistant's text and the call behind it are one turn, but one of them has the weight 0")
    if "tool_calls" in message and call["content"].strip():
        raise BadRow("a call in a text follows a call in a field; write both in one form")
    joined = {**message, "content": message["content"] + call["content"]}
    calls = [*message.get("tool_calls", []), *new_calls]
    if calls:
        joined["tool_calls"] = calls
    return joined


def parse_call_object(call: object) -> dict[str, Any]:
    """Return a call, in OpenAI's form or bare, as {"name", "arguments"}. Arguments may be JSON in a text. Raises
    BadRow."""
    call = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BadRow(f"a function call must be an object with 'name' and 'arguments', not {str(call)[:80]!r}")
    known = ("name", "arguments", "type", *IGNORED_FIELDS)
    unknown = [name for name in call if name not in known and not is_empty(call[name])]
    if unknown:
        raise BadRow(f"the call of {call['name']!r} has the field {unknown[0]!r}; its arguments belong in 'arguments'")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = json_of(arguments, f"the arguments of the call of {call['name']!r} are")
    if not isinstance(arguments, dict | None):
        raise BadRow(f"the arguments of the call of {call['name']!r} must be an object of one or more arguments")
    return {"name": call["name"], "arguments": arguments or {}}
