"""Conversations as the files of every style have them: rows, messages, and the calls in their fields.

The styles are ShareGPT `conversations` (from / value, as LLaMA-Factory reads them, `system` beside them) and OpenAI
`messages` (role / content, tool_calls). What becomes of calls is the form's to say (`Form.parse_row`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

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
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
WEIGHT_FIELDS = (
    "weight", "loss", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask", "trainable", "train", "training",
)  # fmt: skip
ASIDE_FIELDS = ("id", "uuid", "index", "timestamp", "created_at")
"""Fields that say nothing about the text of a message."""
PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning": "thought",
    "thinking": "thought",
    "tool_call": "call",
}
"""What a part of a message is, by its `type`: OpenAI's, Anthropic's, and LLaMA-Factory's."""
# The published RL files were written with "\boxed" in a Python string without r"": \b became a backspace character.
DAMAGED_BOX, BOX = "\x08oxed", "\\boxed"


class BadRow(ValueError):
    """One row that cannot be used; the message names the field and what is wrong with it."""


class Conversation(NamedTuple):
    """A conversation whose messages may have `tool_calls`, [{"name", "arguments"}, ...]."""

    messages: list[dict[str, Any]]
    functions: list[dict] | None
    """The template's `tools=`; None = the loaded tools."""


def parse_message(value: object, role_key: str, text_key: str) -> dict[str, Any]:
    """Return a message of any style as {role: system | user | assistant | tool, content}. Raises BadRow.

    Thoughts in a field of their own become <think> ... </think> in front of the text. Calls in fields, in parts, or as
    the JSON of a role that is a call, are a list `tool_calls` as the file has it. Raises BadRow for a field of the
    assistant that has a value and no meaning here.
    """
    value = _object_of(value)
    if not isinstance(value, dict) or role_key not in value:
        raise BadRow(f"a message must be an object with {role_key!r} and {text_key!r}, not {str(value)[:80]!r}")
    role = ROLES.get(str(value[role_key]))
    if role is None:
        raise BadRow(f"{role_key} {value[role_key]!r} is unknown; use one of {', '.join(ROLES)}")
    text, calls = value.get(text_key), []
    if role == "assistant":
        _check_fields(value, role_key, text_key)
        calls = _calls_in_fields(value)
    if isinstance(text, list):
        text, more = _joined_parts(text, text_key, role)
        calls += more
    if not isinstance(text, str) and not (text is None and calls):
        raise BadRow(f"{text_key} of the {role} message must be text, not {type(text).__name__}")
    message = {"role": role, "content": text or ""}
    if value[role_key] in CALL_ROLES and (found := _calls_of_text(message["content"], str(value[role_key]))):
        message["content"], calls = "", [*found, *calls]
    if role == "assistant":
        message["content"] = _with_thought(value, message["content"])
    return message | ({"tool_calls": calls} if calls else {})


def parse_turns(row: dict, parse: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the messages of a row in their order, checked, each as `parse` makes it. Raises BadRow.

    `parse` gets {role, content}, with `tool_calls` as the file has them, and of a result its `name` and `tool_call_id`.
    A message that is not to be trained on has trained=False.
    """
    turns = as_list(row.get("conversations")) or as_list(row.get("messages"))
    if not isinstance(turns, list) or not turns:
        raise BadRow("needs a list 'conversations' (ShareGPT) or 'messages' (OpenAI)")
    _check_row(row)
    turns = [_object_of(turn) for turn in turns]
    keys = ("from", "value") if isinstance(turns[0], dict) and "from" in turns[0] else ("role", "content")
    raw: list[dict[str, Any]] = []
    for turn in turns:
        message = parse_message(turn, *keys)
        if message["role"] == "tool":
            message |= {key: str(turn[key]) for key in ("name", "tool_call_id") if turn.get(key) is not None}
        if not _is_trained(turn, message["role"]) and message["role"] in ("assistant", "tool"):
            message["trained"] = False
        if message["role"] == "assistant" and raw and raw[-1]["role"] == "assistant":
            raw[-1] = _one_turn(raw[-1], message, is_call=turn[keys[0]] in CALL_ROLES)
        else:
            raw.append(message)
    if row.get("system"):
        if raw[0]["role"] == "system" and raw[0]["content"] != str(row["system"]):
            raise BadRow("the row has a system prompt in `system` and another one in its messages; drop one")
        raw = [{"role": "system", "content": str(row["system"])}, *raw[raw[0]["role"] == "system" :]]
    _check_order([message["role"] for message in raw])
    messages = [message for one in raw for message in parse(one)]
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
        if role == "user" and previous == "tool":
            raise BadRow("a user's message follows a tool result, to which the assistant has not answered")
    if "assistant" not in roles:
        raise BadRow("there is no assistant message to learn from")
    if roles[-1] == "tool":
        raise BadRow("the last message is a tool result, to which the assistant does not answer")


# ---- fields


def _is_empty(value: object) -> bool:
    """Return whether a field says nothing. False and 0 do: they may be the weight of a name that is not known."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return value is None or value in ("", [], ())


def _check_fields(value: dict, role_key: str, text_key: str) -> None:
    known = (role_key, text_key, "tool_calls", "function_call", *THOUGHT_FIELDS, *WEIGHT_FIELDS, *ASIDE_FIELDS)
    if unknown := [name for name in value if name not in known and not _is_empty(value[name])]:
        raise BadRow(
            f"the assistant's message has the field {unknown[0]!r}, of which nothing would be learnt; move it into "
            f"{text_key}, or drop it"
        )


def _check_row(row: dict) -> None:
    for name in ("images", "image", "videos", "audios"):
        if not _is_empty(row.get(name)):
            raise BadRow(f"the row has {name}, but only text is trained; drop the row, or the field")
    wanted = row.get("chat_template_kwargs")
    if isinstance(wanted, dict) and any(not _is_empty(value) and value is not False for value in wanted.values()):
        raise BadRow(
            f"the row has chat_template_kwargs {str(wanted)[:60]}, which are not heard; set model.enable_thinking, and "
            "drop the field"
        )
    for name in ("weight", "loss_weight", "loss_mask", "trainable"):
        if name in row and row[name] is not None and row[name] != 1:
            fix = (
                "leave the row out, or set it in its messages" if row[name] == 0 else "rows have no weights: repeat it"
            )
            raise BadRow(f"the row has {name}={str(row[name])[:60]}; {fix}, and drop the field")
    if row.get("label") is False and row.get("completion"):
        raise BadRow("the row has label=False, KTO's mark of what is not to be learnt; leave it out")


def _is_trained(value: dict, role: str) -> bool:
    """Return whether a message counts in the loss by its own fields. Raises BadRow for all but 0 and 1.

    Other weights have no common meaning: OpenAI and Together refuse them, LLaMA-Factory multiplies the loss.
    """
    weights = {name: value[name] for name in WEIGHT_FIELDS if value.get(name) is not None}
    for name, weight in weights.items():
        if not isinstance(weight, bool | int | float) or weight not in (0, 1):
            raise BadRow(
                f"{name} of the {role} message must be 0 or 1 (false or true), not {str(weight)[:60]!r}: a message is "
                "trained on, or it is not; to let a conversation count more, repeat its row"
            )
        # slime writes its step_loss_mask of 1 into every message: there it means no more than "as usual"
        if weight and role != "assistant" and name != "step_loss_mask":
            raise BadRow(
                f"{name} of the {role} message asks for training on it, but only what the assistant says is trained; "
                "set it to 0"
            )
    if len(set(map(bool, weights.values()))) > 1:
        raise BadRow(f"{' and '.join(weights)} of the {role} message contradict each other")
    return all(weights.values())


def without_loss(value: object) -> object:
    """Return a message of a file with the weight 0."""
    value = _object_of(value)
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if name not in WEIGHT_FIELDS} | {"weight": 0}


def _with_thought(value: dict, text: str) -> str:
    """Return the text with the thought of a field before it, as Qwen3's template and most others write one."""
    thoughts = {name: value[name] for name in THOUGHT_FIELDS if not _is_empty(value.get(name))}
    if not thoughts:
        return text
    name, thought = next(iter(thoughts.items()))
    if not isinstance(thought, str) or len(set(map(str, thoughts.values()))) > 1:
        raise BadRow(f"{' and '.join(thoughts)} of the assistant message must be one text, its thought")
    if "<think>" not in text:
        return written_thought(thought) + text.lstrip("\n")
    if thought.strip() not in text:
        raise BadRow(f"the assistant message has a thought in {name!r}, and another <think> in its text; drop one")
    return text


def written_thought(thought: str) -> str:
    text = thought.strip("\n")
    return f"<think>\n{text}\n</think>\n\n"


def _joined_parts(parts: list, text_key: str, role: str) -> tuple[str, list]:
    """Return the text of a message in parts, and its calls."""
    text, calls = "", []
    for part in parts:
        kind = PARTS.get(str(part.get("type") or "text")) if isinstance(part, dict) else None
        keys = ("text", "value", part.get("type", "text")) if kind else ()
        said = next((part[key] for key in keys if isinstance(part.get(key), str)), None)
        if said is None or (kind != "text" and role != "assistant"):
            raise BadRow(f"{text_key} of the {role} message has a part that is no text: {str(part)[:80]!r}")
        if kind == "call":
            calls += _calls_of_text(said, "tool_call")
        elif calls:
            raise BadRow(f"{text_key} of the {role} message goes on behind a call, with which its turn ends")
        else:
            text += written_thought(said) if kind == "thought" else said
    return text, calls


# ---- calls


def _calls_in_fields(value: dict) -> list:
    calls = value.get("tool_calls") or []
    calls = json_of(calls, "tool_calls are") if isinstance(calls, str) else calls
    if not isinstance(calls, list):
        raise BadRow(f"tool_calls must be a list, not {type(calls).__name__}")
    old = value.get("function_call")
    return [*calls] if _is_empty(old) else [*calls, old]


def _calls_of_text(text: str, role: str) -> list:
    """Return the calls of a message that is one; none where they are written in a form of text, with tags."""
    if "<" in text and not text.lstrip().startswith(("{", "[")):
        return []
    found = json_of(text, f"the text of a {role} is")
    return found if isinstance(found, list) else [found]


def _one_turn(said: dict[str, Any], call: dict[str, Any], *, is_call: bool) -> dict[str, Any]:
    """Join a message and the call behind it: between them the model would have to end its turn."""
    more = call.get("tool_calls", [])
    if not (is_call or (more and not call["content"].strip())):
        raise BadRow("two assistant messages follow each other; make them one, or put a user's between them")
    if said.get("trained", True) != call.get("trained", True):
        raise BadRow("an assistant's text and the call behind it are one turn, but one of them has the weight 0")
    if "tool_calls" in said and call["content"].strip():
        raise BadRow("a call in a text follows a call in a field; write both in one form")
    calls = [*said.get("tool_calls", []), *more]
    return {**said, "content": said["content"] + call["content"], **({"tool_calls": calls} if calls else {})}


def json_of(text: str, what: str) -> Any:
    """Return the value of a JSON text. Raises BadRow, which says what is none."""
    try:
        return json.loads(text)
    except ValueError:
        raise BadRow(f"{what} not valid JSON") from None


def _object_of(value: object) -> object:
    """Return a message, which may be a text of JSON: in parquet, types that differ between rows are kept as that."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return json_of(value, "a message is")
    return value


def as_list(value: object) -> object:
    """Return messages, which may be a JSON text (csv has nothing else); any other value as it is."""
    if not isinstance(value, str) or not re.match(r"\s*\[\s*\{", value):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in found) else value


def whole_call(call: object) -> dict[str, Any]:
    """Return {"name", "arguments"} of a call, OpenAI's or bare; arguments may be JSON in a text. Raises BadRow."""
    call = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BadRow(f"a function call must be an object with 'name' and 'arguments', not {str(call)[:80]!r}")
    known = ("name", "arguments", "type", *ASIDE_FIELDS)
    if unknown := [name for name in call if name not in known and not _is_empty(call[name])]:
        raise BadRow(f"the call of {call['name']!r} has the field {unknown[0]!r}; its arguments belong in 'arguments'")
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = json_of(arguments, f"the arguments of the call of {call['name']!r} are")
    if not isinstance(arguments, dict | None):
        raise BadRow(f"the arguments of the call of {call['name']!r} must be an object of one or more arguments")
    return {"name": call["name"], "arguments": arguments or {}}
