r"""Is a response well-formed, and where does its answer stand? Judged on what the model wrote: tool results are data,
and can neither help nor hurt.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

Segments = list[tuple[str, bool]]
"""(text, written by the model) runs in order; the others are the results of calls, and what stands around them."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


class FormatRules(ABC):
    r"""Judges whether a response is well-formed, and finds its answer. `tools` are the names of the loaded tools.

    As with most forms: the last turn has a balanced \boxed{} outside of its thoughts, thoughts are paired, and may be
    absent. A call of an unknown tool, or with wrong arguments, is no defect: the model reads the error.
    """

    results: re.Pattern[str]
    """What the template writes between turns, in the text of a response; found only behind a whole call."""

    def derive_segments(self, response_text: str, tools: Sequence[str] = ()) -> Segments:
        """Segment a response that is known only as text: what looks like results is taken for them."""
        segments: Segments = []
        position = 0
        for found in self.results.finditer(response_text):
            segments += [(response_text[position : found.start()], True), (found[0], False)]
            position = found.end()
        return [*segments, (response_text[position:], True)] if position < len(response_text) else segments

    @abstractmethod
    def graded_text(self, segments: Segments) -> str:
        """Return the text in which a grader looks for an answer, boxed or not: of the last turn, without thoughts and
        calls; "" where the response ended in results."""

    def extract_answer(self, segments: Segments) -> tuple[str | None, str]:
        """Return (the boxed answer, "") or (None, the defect): missing_answer, unbalanced_box, ..."""
        return boxed_answer(self.graded_text(segments))

    def format_error(self, segments: Segments, tools: Sequence[str] = ()) -> str:
        """Return "" for a well-formed response, else a short stable name of the first defect found."""
        _, error = self.extract_answer(segments)
        return error or next(filter(None, (self.turn_error(*turn, tools) for turn in turns_of(segments))), "")

    @abstractmethod
    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
        """Return the defect of a turn, else ""."""

    @abstractmethod
    def answered_calls(self, segments: Segments, tools: Sequence[str] = ()) -> set[str]:
        """Return the tools of the calls whose result does not start with "Error", for a response known only as text."""


def model_text(segments: Segments) -> str:
    """Return all that the model wrote."""
    return "".join(text for text, by_model in segments if by_model)


def turns_of(segments: Segments) -> list[tuple[str, bool]]:
    """Return (text, whether a result follows) of each turn, with the <think> that a generation prompt has opened."""
    turns = []
    for i, (text, by_model) in enumerate(segments):
        if by_model:
            opened = i and segments[i - 1][0].rstrip().endswith("<think>")
            has_result = i + 1 < len(segments) and not segments[i + 1][1]
            turns.append(("<think>" * bool(opened) + text, has_result))
    return turns


def last_turn(segments: Segments) -> str:
    """Return the turn in which the answer must stand; "" where the response ended in results."""
    return turns_of(segments)[-1][0] if segments and segments[-1][1] else ""


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{} (or \fbox{}); None where there is none or it never closes.

    >>> last_box(r"first \boxed{1}, then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    depth, start = 1, boxes[-1].end()
    # \{ and \} are characters of the formula, not groups: a backslash is matched together with what follows it
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()].strip()
    return None


def boxed_answer(text: str, *, no_box: str = "missing_answer") -> tuple[str | None, str]:
    """Return (the last box of a text, "") or (None, the defect): `no_box`, or unbalanced_box."""
    if (box := last_box(text)) is not None:
        return box, ""
    return None, "unbalanced_box" if _BOX.search(text) else no_box


def has_unpaired_think(outside: str, thoughts: list[str]) -> bool:
    """Return whether a tag of thoughts stands outside of them, or one of them has no end."""
    return bool(re.search("</?think>", outside)) or not all(thought.endswith("</think>") for thought in thoughts)
