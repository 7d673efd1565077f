"""Reading SFT conversations of every common style as messages, one row after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from arpo.config.bounded import check_plain
from arpo.data import read_rows
from arpo.errors import UserError
from arpo.protocol import FORMS
from arpo.protocol.messages import BadRow, as_list, json_of, without_loss


def read_conversations(
    path: str | Path, *, part: int = 0, num_parts: int = 1, parse: Callable[[dict], Any] = FORMS["tags"].parse_row
) -> Iterator[tuple[str, Any]]:
    """Yield (place, [{role: system | user | assistant | tool, content}]) of each row; parts are as in `read_rows`.

    `parse` is the `parse_row` of the form of calls. TRL's prompt and completion, and Alpaca's instruction, input and
    output are messages too.
    Raises UserError naming file and line at the first conversation that cannot be used.

    >>> next(read_conversations("sft.jsonl"))  # {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt"...
    ('sft.jsonl:1', [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}])
    """
    for place, row in read_rows(path, part=part, num_parts=num_parts):
        try:
            conversation = parse(_with_messages(row))
            check_plain([*conversation])  # calls may be JSON within a text
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: {error}; repair or remove it") from None
        yield place, conversation


def _with_messages(row: dict) -> dict:
    """Return a row of TRL or Alpaca with `messages`, any other as it is. Raises BadRow.

    As their makers have it, TRL's prompt is not trained on, and the answers of Alpaca's `history` are.
    """
    if row.get("messages") or row.get("conversations"):
        return row
    if isinstance(row.get("instruction"), str):
        more = row.get("input")
        asked = row["instruction"] + (f"\n\n{more}" if isinstance(more, str) and more else "")
        return row | {"messages": [*_earlier(row.get("history")), *_pair(asked, row.get("output"))]}
    asked, said = as_list(row.get("prompt")), as_list(row.get("completion"))
    if asked is None or said is None:
        return row
    asked = asked if isinstance(asked, list) else _pair(asked, None)
    said = said if isinstance(said, list) else _pair(None, said)
    return row | {"messages": [*map(without_loss, asked), *said]}


def _pair(asked: object, said: object) -> list[dict[str, object]]:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return [message for message in messages if message["content"] is not None]


def _earlier(history: object) -> list[dict[str, object]]:
    history = (json_of(history, "history is") if isinstance(history, str) else history) or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRow("history must be a list of [question, answer]")
    return [message for asked, said in history for message in _pair(asked, said)]
