r"""Is a response with calls in JSON well-formed? Judged, as in format.py, on what the model wrote.

Well-formed: the last turn has a balanced \boxed{} outside of its thoughts; thoughts are paired, and may be absent;
every <tool_call> block is closed, holds an object with a name and arguments, and was answered; and no tag of results is
from the model's own pen. A call of an unknown tool, or with wrong arguments, is no defect: the model reads the error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

from arpo.protocol.hermes import BLOCKS, KEYS, call_bodies
from arpo.protocol.schema import read_json
from arpo.rewards.format import Segments, has_box, last_box

# One lazy span over all results of a turn: a pattern that repeated per result could part them in ever more ways.
_RESULTS = re.compile(
    r"(?<=</tool_call>)\s*(?:user|tool)?\s*<tool_response>\n.*?\n</tool_response>\s*assistant\n", re.DOTALL
)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_ERROR = re.compile(r'\s*(?:\{"name": "[^"]*", "content": ")?Error')  # some templates write results as JSON too


def derive_segments(response_text: str, tools: Sequence[str] = ()) -> Segments:
    """Segment a response that is known only as text: turns of results directly after a closed call are the template's.

    >>> text = "<tool_call>{}</tool_call>\nuser\n<tool_response>\nr\n</tool_response>\nassistant\nso"
    >>> [by_model for _, by_model in derive_segments(text)]
    [True, False, True]
    """
    return parted(response_text, _RESULTS)


def parted(response_text: str, results: re.Pattern[str]) -> Segments:
    """Return a response as (text, written by the model) runs, where a pattern finds what the model did not write."""
    segments: Segments = []
    position = 0
    for found in results.finditer(response_text):
        segments += [(response_text[position : found.start()], True), (found[0], False)]
        position = found.end()
    return [*segments, (response_text[position:], True)] if position < len(response_text) else segments


def turns_of(segments: Segments) -> list[tuple[str, bool]]:
    """Return (text, whether a result follows) of each turn, with the <think> that a generation prompt has opened."""
    turns = []
    for i, (text, by_model) in enumerate(segments):
        if by_model:
            opened = i and segments[i - 1][0].rstrip().endswith("<think>")
            turns.append(("<think>" * bool(opened) + text, segments[i + 1 : i + 2] != []))
    return turns


def last_turn(segments: Segments) -> str:
    """Return the turn in which the answer must stand; "" where the response ended in results."""
    return turns_of(segments)[-1][0] if segments and segments[-1][1] else ""


def boxed_answer(text: str) -> tuple[str | None, str]:
    """Return (the last box of a text, "") or (None, the defect): missing_answer, unbalanced_box."""
    if (box := last_box(text)) is not None:
        return box, ""
    return None, "unbalanced_box" if has_box(text) else "missing_answer"


def answer_text(segments: Segments) -> str:
    """Return what the last turn says outside of thoughts and calls; "" where the response ended in results."""
    return BLOCKS.sub("", last_turn(segments))


def extract_answer(segments: Segments) -> tuple[str | None, str]:
    """Return (the last boxed answer of the last turn, "") or (None, the defect): missing_answer, unbalanced_box."""
    return boxed_answer(answer_text(segments))


def format_error(segments: Segments, tools: Sequence[str] = ()) -> str:
    """Return "" for a well-formed response, else a short stable name of the first defect found."""
    _, error = extract_answer(segments)
    return error or next(filter(None, (_turn_error(*turn) for turn in turns_of(segments))), "")


def _turn_error(text: str, has_result: bool) -> str:
    outside, bodies = BLOCKS.sub("", text), call_bodies(text)
    thoughts = [match[0] for match in BLOCKS.finditer(text) if match[1] is None]
    if has_unpaired_think(outside, thoughts):
        return "unpaired_think"
    if re.search("</?tool_response>", outside):
        return "model_wrote_result"
    if "</tool_call>" in outside:
        return "unopened_call"
    if not all(is_closed for _, is_closed in bodies):
        return "unclosed_call"
    if not all(is_well_formed(body, KEYS) for body, _ in bodies):
        return "malformed_call"
    return "call_without_result" if bodies and not has_result else ""


def has_unpaired_think(outside: str, thoughts: list[str]) -> bool:
    """Return whether a tag of thoughts stands outside of them, or one of them has no end."""
    return bool(re.search("</?think>", outside)) or not all(thought.endswith("</think>") for thought in thoughts)


def is_well_formed(body: str, keys: Sequence[str]) -> bool:
    """Return whether a JSON text is an object with a name and, under the first of the keys that it has, an object."""
    try:
        call = read_json(body)
    except ValueError:
        return False
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return False
    return isinstance(next((call[key] for key in keys if key in call), None), dict)


def answered_calls(segments: Segments, tools: Sequence[str] = ()) -> set[str]:
    """Return the tags of the calls whose result does not start with "Error", for a response known only as text."""
    answered = set()
    for (text, by_model), (results, _) in pairwise(segments):
        if by_model:
            for (body, _), result in zip(call_bodies(text), _RESULT.findall(results), strict=False):
                if is_well_formed(body, KEYS) and not _ERROR.match(result):
                    answered.add(json.loads(body)["name"])
    return answered
