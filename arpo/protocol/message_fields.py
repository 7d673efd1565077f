"""Fields of rows and messages in SFT files: loss weights, thoughts, and fields that cannot be used."""

from __future__ import annotations

import json
from typing import Any

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
WEIGHT_FIELDS = (
    "weight",
    "loss",
    "loss_weight",
    "loss_scale",
    "loss_mask",
    "step_loss_mask",
    "trainable",
    "train",
    "training",
)
IGNORED_FIELDS = ("id", "uuid", "index", "timestamp", "created_at")
"""Fields without any meaning for the text of a message."""


class BadRow(ValueError):
    """A row of a file that cannot be used. The message names the field and its problem."""


def is_empty(value: object) -> bool:
    """True if a field holds nothing. False and 0 are values: they may be a loss weight under an unknown name."""
    if isinstance(value, dict):
        return all(map(is_empty, value.values()))
    return value is None or value in ("", [], ())


def check_message_fields(message: dict, role_key: str, text_key: str) -> None:
    """Raise BadRow if an assistant's message has an unknown field with a value."""
    known = (role_key, text_key, "tool_calls", "function_call", *THOUGHT_FIELDS, *WEIGHT_FIELDS, *IGNORED_FIELDS)
    unknown = [name for name in message if name not in known and not is_empty(message[name])]
    if unknown:
        raise BadRow(
            f"the assistant's message has the field {unknown[0]!r}, of which nothing would be learnt; move it into "
            f"{text_key}, or drop it"
        )


def check_row_fields(row: dict) -> None:
    """Raise BadRow for images, options of the chat template, and a loss weight of the row."""
    for name in ("images", "image", "videos", "audios"):
        if not is_empty(row.get(name)):
            raise BadRow(f"the row has {name}, but only text is trained; drop the row, or the field")
    options = row.get("chat_template_kwargs")
    has_options = isinstance(options, dict) and any(not is_empty(v) and v is not False for v in options.values())
    if has_options or row.get("enable_thinking"):  # the second is a column of verl's files
        name = "chat_template_kwargs" if has_options else "enable_thinking"
        shown = str(row[name])[:60]
        raise BadRow(f"the row has {name} {shown}, which is not used; set model.enable_thinking, and drop the field")
    for name in ("weight", "loss_weight", "loss_mask", "trainable"):
        if name in row and row[name] is not None and row[name] != 1:
            fix = "rows have no weights: repeat it"
            if row[name] == 0:
                fix = "leave the row out, or set it in its messages"
            raise BadRow(f"the row has {name}={str(row[name])[:60]}; {fix}, and drop the field")
    for name in ("label", "kto_tag"):
        if row.get(name) is False:
            raise BadRow(f"the row has {name}=False, KTO's mark of what is not to be learnt; leave it out")


def is_trained(message: dict, role: str) -> bool:
    """True unless a weight field of the message is 0. Raises BadRow for weights other than 0 and 1.

    Other weights have no common meaning: OpenAI and Together refuse them, LLaMA-Factory multiplies the loss.
    """
    weights = {name: message[name] for name in WEIGHT_FIELDS if message.get(name) is not None}
    for name, weight in weights.items():
        if not isinstance(weight, bool | int | float) or weight not in (0, 1):
            raise BadRow(
                f"{name} of the {role} message must be 0 or 1 (false or true), not {str(weight)[:60]!r}: a message is "
                "trained on, or it is not; to let a conversation count more, repeat its row"
            )
        # slime writes a step_loss_mask of 1 into every message. For messages of other roles it has no effect.
        if weight and role != "assistant" and name != "step_loss_mask":
            raise BadRow(
                f"{name} of the {role} message asks for training on it, but only what the assistant says is trained; "
                "set it to 0"
            )
    if len(set(map(bool, weights.values()))) > 1:
        raise BadRow(f"{' and '.join(weights)} of the {role} message contradict each other")
    return all(weights.values())


def without_loss(message: object) -> object:
    """Return a file's message with the weight 0."""
    message = parse_message_object(message)
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if name not in WEIGHT_FIELDS} | {"weight": 0}


def with_thought(message: dict, text: str) -> str:
    """Return the text with the thought of a thought field in front, as Qwen3's template and most others write it."""
    thoughts = {name: message[name] for name in THOUGHT_FIELDS if not is_empty(message.get(name))}
    if not thoughts:
        return text
    name, thought = next(iter(thoughts.items()))
    if not isinstance(thought, str) or len(set(map(str, thoughts.values()))) > 1:
        raise BadRow(f"{' and '.join(thoughts)} of the assistant message must be one text, its thought")
    if "<think>" not in text:
        return thought_block(thought) + text.lstrip("\n")
    if thought.strip() not in text:
        raise BadRow(f"the assistant message has a thought in {name!r}, and another <think> in its text; drop one")
    return text


def thought_block(thought: str) -> str:
    text = thought.strip("\n")
    return f"<think>\n{text}\n</think>\n\n"


def json_of(text: str, what: str) -> Any:
    """Return the value of a JSON text. Raises BadRow: "{what} not valid JSON"."""
    try:
        return json.loads(text)
    except ValueError:
        raise BadRow(f"{what} not valid JSON") from None


def parse_message_object(message: object) -> object:
    """Return a message. JSON text is parsed: parquet stores objects as JSON text if their types differ between rows."""
    if isinstance(message, str) and message.lstrip().startswith("{"):
        return json_of(message, "a message is")
    return message
