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
    r"""Segments of a response known only as text: a result directly after a closed call is taken for the tool's.

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


def last_box(text: str) -> str | None:
    r"""Content of the last \boxed{} (or \fbox{}); None where there is none or it never closes.

    >>> last_box(r"first \boxed{1}, then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    depth, start = 1, boxes[-1].end()
    position = start
    while position < len(text):
        if text[position] == "\\":
            position += 2  # \{ and \} are characters of the formula, not groups
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
        position += 1
    return None


def extract_answer(segments: Segments) -> tuple[str | None, str]:
    """(the boxed answer, "") or (None, why there is none): missing_answer, several_answers, unclosed_answer, ..."""
    text = model_text(segments)
    num_opened, num_closed = text.count("<answer>"), text.count("</answer>")
    if num_opened == 0:
        return None, "missing_answer"
    if num_opened > 1 or num_closed > 1:
        return None, "several_answers"
    start, end = text.find("<answer>") + len("<answer>"), text.find("</answer>")
    if end < start:
        return None, "unclosed_answer"
    block = text[start:end]
    box = last_box(block)
    if box is None:
        return None, "unbalanced_box" if _BOX.search(block) else "missing_box"
    return box, ""


def format_error(segments: Segments, tools: Sequence[str] = PAPER_TOOLS) -> str:
    """ "" for a well-formed response, else a short stable name of the first defect found.

    `tools` are the tags of the loaded tools: their calls must be closed and answered. Any other tag is plain text.
    """
    _, error = extract_answer(segments)
    return error or _think_error(model_text(segments)) or _call_error(segments, tag_pattern(tuple(tools)))


def _think_error(text: str) -> str:
    tags = re.findall(r"</?think>", text)
    if not tags:
        return "missing_think"
    paired = tags == ["<think>", "</think>"] * (len(tags) // 2)
    return "" if paired else "unpaired_think"


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
    """`tags`: (is it closing, name) in one model run, which ends at its first call: the rollout stops there."""
    opened = None
    for position, (closing, name) in enumerate(tags):
        if not closing:
            if opened:
                return "unclosed_call"
            opened = name
        elif opened != name:
            return "unclosed_call" if opened else "unopened_call"
        elif position + 1 < len(tags) or not has_result:
            return "call_without_result"
        else:
            opened = None
    return "unclosed_call" if opened else ""


def answered_calls(segments: Segments, tools: Sequence[str] = PAPER_TOOLS) -> set[str]:
    """Tags of the calls whose result does not start with "Error"; where the executed calls themselves are not known."""
    call_tag = tag_pattern(tuple(tools))
    answered = set()
    for (text, by_model), (result, result_by_model) in pairwise(segments):
        if not by_model or result_by_model:
            continue
        closing = [match[2] for match in call_tag.finditer(text) if match[1]]
        body = result.strip().removeprefix("<result>").lstrip()
        if closing and not body.startswith("Error"):
            answered.add(closing[-1])
    return answered
