r"""Is a response with calls in tags well-formed?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from arpo.protocol.calls import tag_pattern
from arpo.protocol.format_rules import FormatRules, Segments, boxed_answer, model_text
from arpo.protocol.tags.text import PAPER_TOOLS

_RESULT = re.compile(r"\s*<result>.*?</result>", re.DOTALL)


class TagsRules(FormatRules):
    r"""Think tags present and paired, exactly one answer block with a balanced \boxed{}, every call closed and followed
    by its result, and no result tag from the model's own pen. A tag of no loaded tool is plain text."""

    def derive_segments(self, response_text: str, tools: Sequence[str] = PAPER_TOOLS) -> Segments:
        r"""Segment a response that is known only as text: a result directly after a closed call is the tool's.

        >>> TagsRules().derive_segments("<search>q</search> <result>\nr\n</result><think>t</think>")
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

    def graded_text(self, segments: Segments) -> str:
        return model_text(segments)  # evaluations count an answer outside of its block too

    def extract_answer(self, segments: Segments) -> tuple[str | None, str]:
        text = model_text(segments)
        if "<answer>" not in text:
            return None, "missing_answer"
        if text.count("<answer>") > 1 or text.count("</answer>") > 1:
            return None, "several_answers"
        block, closing, _ = text.partition("<answer>")[2].partition("</answer>")
        return boxed_answer(block, no_box="missing_box") if closing else (None, "unclosed_answer")

    def format_error(self, segments: Segments, tools: Sequence[str] = PAPER_TOOLS) -> str:
        _, error = self.extract_answer(segments)
        return error or _think_error(model_text(segments)) or super().format_error(segments, tools)

    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
        if "<result>" in text or "</result>" in text:
            return "model_wrote_result"
        tags = [(match[1] == "/", match[2]) for match in tag_pattern(tuple(tools)).finditer(text)]
        if not tags:
            return ""
        if tags[0][0]:
            return "unopened_call"
        if tags[1:2] != [(True, tags[0][1])]:
            return "unclosed_call"
        return "" if len(tags) == 2 and has_result else "call_without_result"  # a turn ends at its first call

    def answered_calls(self, segments: Segments, tools: Sequence[str] = PAPER_TOOLS) -> set[str]:
        answered = set()
        for (text, by_model), (result, result_by_model) in pairwise(segments):
            closing = [match[2] for match in tag_pattern(tuple(tools)).finditer(text) if match[1]]
            has_failed = result.strip().removeprefix("<result>").lstrip().startswith("Error")
            if by_model and not result_by_model and closing and not has_failed:
                answered.add(closing[-1])
        return answered


def _think_error(text: str) -> str:
    tags = re.findall(r"</?think>", text)
    if not tags:
        return "missing_think"
    return "" if tags == ["<think>", "</think>"] * (len(tags) // 2) else "unpaired_think"
