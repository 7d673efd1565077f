"""Reads SFT conversations of all common formats as messages, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from arpo.config.bounded import check_plain
from arpo.data import read_rows
from arpo.errors import UserError
from arpo.protocol import FORMS
from arpo.protocol.message_fields import BadRow, is_empty, json_of, without_loss
from arpo.protocol.messages import as_list


def read_conversations(
    path: str | Path, *, part: int = 0, num_parts: int = 1, parse: Callable[[dict], Any] = FORMS["tags"].parse_row
) -> Iterator[tuple[str, Any]]:
    """Yield ("file:line", [{role: system | user | assistant | tool, content}]) for each row.

    `parse` is the `parse_row` of the form of tool calls. TRL's prompt and completion, and Alpaca's instruction, input
    and output become messages, too. `part` and `num_parts` are as in `read_rows`.
    Raises UserError with file and line at the first conversation that cannot be used.

    >>> next(read_conversations("sft.jsonl"))  # {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt"...
    ('sft.jsonl:1', [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}])
    """
    for place, row in read_rows(path, part=part, num_parts=num_parts):
        try:
            conversation = parse(_with_messages(row))
            check_plain([*conversation])  # again, since the messages' text may have contained JSON
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: {error}; repair or remove it") from None
        yield place, conversation


def _with_messages(row: dict) -> dict:
    """Return the row with `messages`, if it has TRL's or Alpaca's fields; any other row unchanged. Raises BadRow.

    As in their own trainers, TRL's prompt is not trained on, and the answers in Alpaca's `history` are.
    """
    if row.get("messages") or row.get("conversations"):
        return row
    if isinstance(row.get("instruction"), str):
        more = "" if is_empty(row.get("input")) else row["input"]
        if not isinstance(more, str):
            raise BadRow(f"input must be text, not {type(more).__name__}")
        question = "\n\n".join(filter(None, [row["instruction"], more]))
        return row | {"messages": [*_history(row.get("history")), *_messages(question, row.get("output"))]}
    prompt = as_list(row.get("prompt"))
    completion = as_list(row.get("completion"))
    if prompt is None or completion is None:
        return row
    if not isinstance(prompt, list):
        prompt = _messages(prompt, None)
    if not isinstance(completion, list):
        completion = _messages(None, completion)
    return row | {"messages": [*map(without_loss, prompt), *completion]}


def _messages(question: object, answer: object) -> list[dict[str, object]]:
    """Return a user message and an assistant message; a None has no message."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [message for message in messages if message["content"] is not None]


def _history(history: object) -> list[dict[str, object]]:
    """Return the messages of Alpaca's `history`. Raises BadRow."""
    if isinstance(history, str):
        history = json_of(history, "history is")
    history = history or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRow("history must be a list of [question, answer]")
    return [message for question, answer in history for message in _messages(question, answer)]
