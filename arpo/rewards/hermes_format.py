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

from arpo.protocol.hermes import BLOCKS, call_bodies
from arpo.protocol.schema import read_json
from arpo.rewards.format import Segments, has_box, last_box

# One lazy span over all results of a turn: a pattern that repeated per result could part them in ever more ways.
_RESULTS = re.compile(
    r"(?<=</tool_call>)\s*(?:user|tool)?\s*<tool_response>\n.*?\n</tool_response>\s*assistant\n", re.DOTALL
)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def derive_segments(response_text: str, tools: Sequence[str] = ()) -> Segments:
    """Segment a response that is known only as text: turns of results directly after a closed call are the template's.

    >>> text = "<tool_call>{}</tool_call>\nuser\n<tool_response>\nr\n</tool_response>\nassistant\nso"
    >>> [by_model for _, by_model in derive_segments(text)]
    [True, False, True]
    """
    segments: Segments = []
    position = 0
    for results in _RESULTS.finditer(response_text):
        segments += [(response_text[position : results.start()], True), (results[0], False)]
        position = results.end()
    return [*segments, (response_text[position:], True)] if position < len(response_text) else segments


def turns_of(segments: Segments) -> list[tuple[str, bool]]:
    """Return (text, whether a result follows) of each turn, with the <think> that a generation prompt has opened."""
    turns = []
    for i, (text, by_model) in enumerate(segments):
        if by_model:
            opened = i and segments[i - 1][0].rstrip().endswith("<think>")
            turns.append(("<think>" * bool(opened) + text, segments[i + 1 : i + 2] != []))
    return turns


def answer_text(segments: Segments) -> str:
    """Return what the last turn says outside of thoughts and calls; "" where the response ended in results."""
    turns = turns_of(segments)
    return BLOCKS.sub("", turns[-1][0]) if turns and segments[-1][1] else ""


def extract_answer(segments: Segments) -> tuple[str | None, str]:
    """Return (the last boxed answer of the last turn, "") or (None, the defect): missing_answer, unbalanced_box."""
    text = answer_text(segments)
    if (box := last_box(text)) is not None:
        return box, ""
    return None, "unbalanced_box" if has_box(text) else "missing_answer"


def format_error(segments: Segments, tools: Sequence[str] = ()) -> str:
    """Return "" for a well-formed response, else a short stable name of the first defect found."""
    turns = turns_of(segments)
    _, error = extract_answer(segments)
    return error or next(filter(None, (_turn_error(text, has_result) for text, has_result in turns)), "")


def _turn_error(text: str, has_result: bool) -> str:
    outside, bodies = BLOCKS.sub("", text), call_bodies(text)
    thoughts = [match[0] for match in BLOCKS.finditer(text) if match[1] is None]
    if re.search("</?think>", outside) or not all(thought.endswith("</think>") for thought in thoughts):
        return "unpaired_think"
    if re.search("</?tool_response>", outside):
        return "model_wrote_result"
    if "</tool_call>" in outside:
        return "unopened_call"
    if not all(is_closed for _, is_closed in bodies):
        return "unclosed_call"
    if not all(_is_call(body) for body, _ in bodies):
        return "malformed_call"
    return "call_without_result" if bodies and not has_result else ""


def _is_call(body: str) -> bool:
    try:
        call = read_json(body)
    except ValueError:
        return False
    return isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)


def answered_calls(segments: Segments, tools: Sequence[str] = ()) -> set[str]:
    """Return the tags of the calls whose result does not start with "Error", for a response known only as text."""
    answered = set()
    for (text, by_model), (results, _) in pairwise(segments):
        if by_model:
            for (body, _), result in zip(call_bodies(text), _RESULT.findall(results), strict=False):
                if _is_call(body) and not result.lstrip().startswith("Error"):
                    answered.add(json.loads(body)["name"])
    return answered
