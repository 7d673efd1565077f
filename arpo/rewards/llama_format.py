r"""Is a response with calls in Llama's JSON well-formed? Judged, as in format.py, on what the model wrote.

Well-formed: the last turn has a balanced \boxed{} outside of its thoughts; thoughts are paired, and may be absent;
every turn before it is, behind thoughts, one object with a name and parameters. As with Hermes, a call of an unknown
tool or with wrong arguments is no defect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

from arpo.protocol.llama import KEYS, THOUGHTS, call_body
from arpo.rewards.format import Segments
from arpo.rewards.hermes_format import boxed_answer, has_unpaired_think, is_well_formed, last_turn, parted, turns_of

_RESULTS = re.compile(r"(?<=})\s*ipython\n\n.*?assistant\n\n", re.DOTALL)


def derive_segments(response_text: str, tools: Sequence[str] = ()) -> Segments:
    r"""Segment a response that is known only as text: an ipython turn directly after a call is the template's.

    >>> [by_model for _, by_model in derive_segments('{"name": "f", "parameters": {}}ipython\n\n"r"assistant\n\nso')]
    [True, False, True]
    """
    return parted(response_text, _RESULTS)


def answer_text(segments: Segments) -> str:
    """Return what the last turn says outside of thoughts; "" where it is a call, or the response ended in results."""
    text = last_turn(segments)
    return THOUGHTS.sub("", text) if call_body(text) is None else ""


def extract_answer(segments: Segments) -> tuple[str | None, str]:
    """Return (the last boxed answer of the last turn, "") or (None, the defect): missing_answer, unbalanced_box."""
    return boxed_answer(answer_text(segments))


def format_error(segments: Segments, tools: Sequence[str] = ()) -> str:
    """Return "" for a well-formed response, else a short stable name of the first defect found."""
    _, error = extract_answer(segments)
    return error or next(filter(None, (_turn_error(text) for text, _ in turns_of(segments))), "")


def _turn_error(text: str) -> str:
    if (body := call_body(text)) is not None:  # whose arguments may contain thoughts
        return "" if is_well_formed(body, KEYS) else "malformed_call"
    return "unpaired_think" if has_unpaired_think(THOUGHTS.sub("", text), THOUGHTS.findall(text)) else ""


def answered_calls(segments: Segments, tools: Sequence[str] = ()) -> set[str]:
    """Return the tags of the calls whose result does not start with "Error", for a response known only as text."""
    answered = set()
    for (text, by_model), (results, _) in pairwise(segments):
        body, result = call_body(text) or "", results.partition("ipython\n\n")[2].lstrip(' "')
        if by_model and is_well_formed(body, KEYS) and not result.startswith("Error"):
            answered.add(json.loads(body)["name"])
    return answered
