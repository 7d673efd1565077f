r"""Is a response well-formed? Judged on what the model wrote; tool results are data and can neither help nor hurt.

Well-formed: think tags present and paired, exactly one answer block with a balanced \boxed{}, every call closed and
followed by its result, and no result tag from the model's own pen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from arpo.protocol.tags import PAPER_TOOLS, tag_pattern

Segments = list[tuple[str, bool]]
"""(text, written by the model) runs in order; a tool run is " <result>\n...\n</result>"."""

_RESULT = re.compile(r"\s*<result>.*?</result>", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def derive_segments(response_text: str, tools: Sequence[str] = PAPER_TOOLS) -> Segments:
    r"""Segment a response that is known only as text: a result directly after a closed call is taken for the tool's.

    >>> derive_segments("<search>q</search> <result>\nr\n</result><think>t</think>")
    [('<search>q</search>', True), (' <result>\nr\n</result>', False), ('<think>t</think>', True)]
    """
    segments: Segments = []
    position = 0
    for call in tag_pattern(tuple(tools)).finditer(response_text):
        result = _RESULT.match(response_text, call.end()) if call[1] and call.start() >= position else None
        if result:
            segments += [(response_text[position : call.end()], True), (result[0], False)]
            position = result.end()
    return [*segments, (response_text[position:], True)] if position < len(response_text) else segments


def model_text(segments: Segments) -> str:
    return "".join(text for text, by_model in segments if by_model)


def answer_text(segments: Segments) -> str:
    """Return the text in which a grader looks for the answer: all that the model wrote."""
    return model_text(segments)


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


def has_box(text: str) -> bool:
    return bool(_BOX.search(text))


def extract_answer(segments: Segments) -> tuple[str | None, str]:
    """Return (the boxed answer, "") or (None, the defect): missing_answer, several_answers, unclosed_answer, ..."""
    text = model_text(segments)
    if "<answer>" not in text:
        return None, "missing_answer"
    if text.count("<answer>") > 1 or text.count("</answer>") > 1:
        return None, "several_answers"
    block, closing, _ = text.partition("<answer>")[2].partition("</answer>")
    if not closing:
        return None, "unclosed_answer"
    if (box := last_box(block)) is not None:
        return box, ""
    return None, "unbalanced_box" if has_box(block) else "missing_box"


def format_error(segments: Segments, tools: Sequence[str] = PAPER_TOOLS) -> str:
    """Return "" for a well-formed response, else a short stable name of the first defect found.

    `tools` are the tags of the loaded tools: their calls must be closed and answered. Any other tag is plain text.
    """
    _, error = extract_answer(segments)
    return error or _think_error(model_text(segments)) or _call_error(segments, tag_pattern(tuple(tools)))


def _think_error(text: str) -> str:
    tags = re.findall(r"</?think>", text)
    if not tags:
        return "missing_think"
    return "" if tags == ["<think>", "</think>"] * (len(tags) // 2) else "unpaired_think"


def _call_error(segments: Segments, call_tag: re.Pattern[str]) -> str:
    for i, (text, by_model) in enumerate(segments):
        if not by_model:
            continue
        if "<result>" in text or "</result>" in text:
            return "model_wrote_result"
        has_result = i + 1 < len(segments) and not segments[i + 1][1]
        tags = [(match[1] == "/", match[2]) for match in call_tag.finditer(text)]
        if error := _call_tags_error(tags, has_result):
            return error
    return ""


def _call_tags_error(tags: list[tuple[bool, str]], has_result: bool) -> str:
    """Return the defect of a model run with these (is closing, name) tags; a sound one ends at its first call."""
    if not tags:
        return ""
    if tags[0][0]:
        return "unopened_call"
    if tags[1:2] != [(True, tags[0][1])]:
        return "unclosed_call"
    return "" if len(tags) == 2 and has_result else "call_without_result"


def answered_calls(segments: Segments, tools: Sequence[str] = PAPER_TOOLS) -> set[str]:
    """Return the tags of the calls whose result does not start with "Error", for a response known only as text."""
    answered = set()
    for (text, by_model), (result, result_by_model) in pairwise(segments):
        closing = [match[2] for match in tag_pattern(tuple(tools)).finditer(text) if match[1]]
        has_failed = result.strip().removeprefix("<result>").lstrip().startswith("Error")
        if by_model and not result_by_model and closing and not has_failed:
            answered.add(closing[-1])
    return answered
