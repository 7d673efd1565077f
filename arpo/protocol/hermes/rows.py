"""SFT rows with calls in JSON, which stay what they are in the file: fields, or text in <tool_call> blocks.

A row may bring its own functions in `tools` (OpenAI's form or bare, as a list or as its JSON); else those of data.tools
are listed, unless the system message lists some itself.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from arpo.protocol.hermes.text import call_bodies
from arpo.protocol.messages import BadRow, Conversation, parse_message, parse_turns, whole_call

RESPONSE, END = "<tool_response>", "</tool_response>"


def parse_row(row: dict) -> Conversation:
    """Parse one conversation of any style. Raises BadRow."""
    messages: list[dict[str, Any]] = []
    names, ids = [], []  # of the newest calls
    for role, group in groupby(parse_turns(row, _turn), key=lambda message: message["role"]):
        turns = list(group)
        found = [message.pop("ids", []) for message in turns]
        if role == "assistant":
            names, ids = _names_of(turns[-1]), found[-1]
        elif role == "tool":
            given = [one for [one] in found]
            # Results that name their calls may stand in any order; those of a rollout are in the order of the calls.
            if len(given) == len(ids) and sorted(given) == sorted({*ids}):
                turns = [turns[given.index(one)] for one in ids]
            for number, message in enumerate(turns):
                message.setdefault("name", names[number] if number < len(names) else "unknown")
        messages += turns
    return Conversation(messages, _functions(row.get("tools")))


def _turn(turn: object, role_key: str, text_key: str) -> list[dict[str, Any]]:
    calls = turn.get("tool_calls") if isinstance(turn, dict) else None
    if calls and not isinstance(calls, list):
        raise BadRow(f"tool_calls must be a list, not {type(calls).__name__}")
    message = parse_message({**turn, text_key: turn.get(text_key) or ""} if calls else turn, role_key, text_key)
    if turn[role_key] == "function_call":
        try:
            found = json.loads(message["content"])
        except ValueError:
            raise BadRow("the text of a function_call is not valid JSON") from None
        calls, message["content"] = found if isinstance(found, list) else [found], ""
    if calls:
        whole = [whole_call(call) for call in calls]
        return [{**message, "tool_calls": whole, "ids": [str(call.get("id")) for call in calls]}]
    if message["role"] != "tool":
        return [message]
    named = {"name": turn["name"]} if isinstance(turn.get("name"), str) else {}
    ids = [str(turn.get("tool_call_id"))]
    return [{**message, **named, "ids": ids, "content": text} for text in _results(message["content"])]


def _results(text: str) -> list[str]:
    """Return the results of a message that has them in <tool_response> blocks, else its text alone."""
    if not (text.strip().startswith(RESPONSE) and text.strip().endswith(END)):
        return [text]
    return [part.partition(END)[0].strip("\n") for part in text.split(RESPONSE)[1:]]


def _names_of(message: dict[str, Any]) -> list[str]:
    if "tool_calls" in message:
        return [call["name"] for call in message["tool_calls"]]
    names = []
    for body, _ in call_bodies(message["content"]):
        try:
            names.append(str(json.loads(body)["name"]))
        except (ValueError, KeyError, TypeError):
            names.append("unknown")
    return names


def _functions(tools: object) -> list[dict] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return None  # names, as questions have them
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return None
    tools = [_without_none(tool) for tool in tools]
    if not all(isinstance(tool.get("function", tool).get("name"), str) for tool in tools):
        raise BadRow("an entry of tools has no name")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _without_none(value: Any) -> Any:
    """Return a schema as it was before parquet gave every object the keys of all objects."""
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    return {k: _without_none(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value
