"""Is a response with calls in <tool_call> blocks well-formed?"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

from arpo.protocol.calls import is_well_formed
from arpo.protocol.format_rules import FormatRules, Segments, has_unpaired_think, last_turn
from arpo.protocol.hermes.text import BLOCKS, KEYS, call_bodies

_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_ERROR = re.compile(r'\s*(?:\{"name": "[^"]*", "content": ")?Error')  # some templates write results as JSON too


class HermesRules(FormatRules):
    """Besides what `FormatRules` says: every block is closed, holds an object with a name and arguments, and was
    answered; no tag of results is from the model's own pen."""

    # One lazy span over all results of a turn: a pattern that repeated per result could part them in ever more ways.
    results = re.compile(
        r"(?<=</tool_call>)\s*+(?:user|tool)?\s*+<tool_response>\n.*?\n</tool_response>\s*assistant\n", re.DOTALL
    )

    def graded_text(self, segments: Segments) -> str:
        return BLOCKS.sub("", last_turn(segments))

    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
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
        if any(self.name_of(body) is None for body, _ in bodies):
            return "malformed_call"
        return "call_without_result" if bodies and not has_result else ""

    def answered_calls(self, segments: Segments, tools: Sequence[str] = ()) -> set[str]:
        answered = set()
        for (text, by_model), (results, _) in pairwise(segments):
            if by_model:
                for (body, _), result in zip(call_bodies(text), _RESULT.findall(results), strict=False):
                    if (name := self.name_of(body)) and not _ERROR.match(result):
                        answered.add(name)
        return answered

    @staticmethod
    def name_of(body: str) -> str | None:
        """Return the name of the tool that a well-formed block calls; None for any other."""
        return json.loads(body)["name"] if is_well_formed(body, KEYS) else None
