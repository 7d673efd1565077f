"""Reading SFT conversations of every common style as messages, one row after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from arpo.config.bounded import check_plain
from arpo.data import read_rows
from arpo.errors import UserError
from arpo.protocol import FORMS


def read_conversations(
    path: str | Path, *, part: int = 0, num_parts: int = 1, parse: Callable[[dict], Any] = FORMS["tags"].parse_row
) -> Iterator[tuple[str, Any]]:
    """Yield (place, [{role: system | user | assistant | tool, content}]) of each row; parts are as in `read_rows`.

    `parse` is the `parse_row` of the form of calls.
    Raises UserError naming file and line at the first conversation that cannot be used.

    >>> next(read_conversations("sft.jsonl"))  # {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt"...
    ('sft.jsonl:1', [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}])
    """
    for place, row in read_rows(path, part=part, num_parts=num_parts):
        try:
            conversation = parse(row)
            check_plain([*conversation])  # calls may be JSON within a text
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: {error}; repair or remove it") from None
        yield place, conversation
