r"""Is a response well-formed, and where is its answer? Only the model's text counts: tool results are data, and can
neither help nor hurt.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

Segments = list[tuple[str, bool]]
"""(text, written by the model) runs in order. The other runs are results, with the template's text around them."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


class FormatRules(ABC):
    r"""Decides if a response is well-formed, and finds its answer. `tools` are the names of the loaded tools.

    Most forms require: a balanced \boxed{} in the last turn outside of its thoughts, and paired thoughts (if any). An
    unknown tool or wrong arguments are no defect: the model reads the error.
    """

    results: re.Pattern[str]
    """The template's text between turns, as in a response. It matches only after a complete call."""

    def derive_segments(self, response_text: str, tools: Sequence[str] = ()) -> Segments:
        """Split a response into segments by its text alone. Any text that looks like results counts as results."""
        segments: Segments = []
        position = 0
        for match in self.results.finditer(response_text):
            segments += [(response_text[position : match.start()], True), (match[0], False)]
            position = match.end()
        if position < len(response_text):
            segments.append((response_text[position:], True))
        return segments

    @abstractmethod
    def graded_text(self, segments: Segments) -> str:
        """Return the text with the answer, boxed or not: the last turn, without thoughts and calls; "" if the response
        ended in results."""

    def extract_answer(self, segments: Segments) -> tuple[str | None, str]:
        """Return (the boxed answer, "") or (None, the defect): missing_answer, unbalanced_box, ..."""
        return boxed_answer(self.graded_text(segments))

    def format_error(self, segments: Segments, tools: Sequence[str] = ()) -> str:
        """Return a short stable name of the first defect, or "" for a well-formed response."""
        _, error = self.extract_answer(segments)
        if error:
            return error
        errors = (self.turn_error(text, has_result, tools) for text, has_result in turns_of(segments))
        return next(filter(None, errors), "")

    @abstractmethod
    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
        """Return the defect of a turn, or ""."""

    @abstractmethod
    def answered_calls(self, segments: Segments, tools: Sequence[str] = ()) -> set[str]:
        """Return the names of the tools with a result that does not start with "Error". Uses the text alone."""


def model_text(segments: Segments) -> str:
    """Return the text written by the model."""
    return "".join(text for text, by_model in segments if by_model)


def turns_of(segments: Segments) -> list[tuple[str, bool]]:
    """Return (text, has a result) of each turn. The text includes a <think> opened by the generation prompt."""
    turns = []
    for i, (text, by_model) in enumerate(segments):
        if by_model:
            is_opened = i > 0 and segments[i - 1][0].rstrip().endswith("<think>")
            has_result = i + 1 < len(segments) and not segments[i + 1][1]
            turns.append(("<think>" + text if is_opened else text, has_result))
    return turns


def last_turn(segments: Segments) -> str:
    """Return the turn that must contain the answer; "" if the response ended in results."""
    return turns_of(segments)[-1][0] if segments and segments[-1][1] else ""


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{} (or \fbox{}). Return None if there is no box, or if it never closes.

    >>> last_box(r"first \boxed{1}, then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    depth = 1
    start = boxes[-1].end()
    # \{ and \} are characters of the formula, not groups. So a backslash is matched together with the next character.
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()].strip()
    return None


def boxed_answer(text: str, *, no_box: str = "missing_answer") -> tuple[str | None, str]:
    """Return (the last box of a text, "") or (None, the defect): `no_box`, or unbalanced_box."""
    box = last_box(text)
    if box is not None:
        return box, ""
    return None, "unbalanced_box" if _BOX.search(text) else no_box


def has_unpaired_think(outside: str, thoughts: list[str]) -> bool:
    """True if there is a <think> or </think> outside of thoughts, or if a thought does not end."""
    return bool(re.search("</?think>", outside)) or not all(thought.endswith("</think>") for thought in thoughts)
