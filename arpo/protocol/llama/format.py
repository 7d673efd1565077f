"""Is a response with calls in Llama's JSON well-formed?"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise

from arpo.protocol.calls import is_well_formed
from arpo.protocol.format_rules import FormatRules, Segments, has_unpaired_think, last_turn
from arpo.protocol.llama.text import KEYS, THOUGHTS, call_body


class LlamaRules(FormatRules):
    """Besides what `FormatRules` says: a turn that begins as an object is a whole one with a name and parameters."""

    results = re.compile(r"(?<=})\s*ipython\n\n.*?assistant\n\n", re.DOTALL)

    def graded_text(self, segments: Segments) -> str:
        text = last_turn(segments)
        return THOUGHTS.sub("", text) if call_body(text) is None else ""

    def turn_error(self, text: str, has_result: bool, tools: Sequence[str]) -> str:
        if (body := call_body(text)) is not None:  # whose arguments may contain thoughts
            return "" if is_well_formed(body, KEYS) else "malformed_call"
        return "unpaired_think" if has_unpaired_think(THOUGHTS.sub("", text), THOUGHTS.findall(text)) else ""

    def answered_calls(self, segments: Segments, tools: Sequence[str] = ()) -> set[str]:
        answered = set()
        for (text, by_model), (results, _) in pairwise(segments):
            body, result = call_body(text) or "", results.partition("ipython\n\n")[2].lstrip(' "')
            if by_model and is_well_formed(body, KEYS) and not result.startswith("Error"):
                answered.add(json.loads(body)["name"])
        return answered
