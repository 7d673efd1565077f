"""The program of the child process that compares two answers with math-verify (arpo/jail/child.py).

sympy can take forever, or all memory, on what a policy writes. Here either ends this process only: the kernel kills it
when one comparison has used up its CPU time, whichever code it is stuck in, and the parent starts another one.
"""

from __future__ import annotations

import logging
import re

CPU_S = 2.0
WALL_S = 60.0
MEMORY_BYTES = 2 << 30
LAST_LETTER = re.compile(r"(?<![A-Za-z\\])([A-Za-z])\s*$")


def prepare() -> None:
    import math_numbers

    logging.disable(logging.CRITICAL)
    math_numbers.install()
    answer(["1", "2"])  # imports all else, before the jail hides it


def answer(request: list[str]) -> bool:
    """["prediction", "answer"] -> True if math-verify can prove them equal."""
    from math_sets import equal_as_sets
    from math_text import from_python
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic

    prediction, truth = request
    # no ExprExtractionConfig: of what it cannot read it takes the last number, so that "n = 3k, k > 1" would be 1
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    try:
        # braces around a last letter: it is a variable, which math-verify would drop for a unit
        texts = [LAST_LETTER.sub(r"{\1}", from_python(text)) for text in (truth, prediction)]
        boxes = [rf"\boxed{{{text}}}" for text in texts]
        # without math-verify's own timeouts, which are signals too and would disarm ours
        parsed = [parse(box, extraction, parsing_timeout=None) for box in boxes]
        if verify(parsed[0], parsed[1], timeout_seconds=None):
            return True
        if not all(isinstance(values[0], Basic) for values in parsed):
            return False
        return bool(equal_as_sets(parsed[0][0], texts[0], parsed[1][0], texts[1]))
    except (Exception, MemoryError, RecursionError):  # whatever sympy makes of it, it is no proof of equality
        return False
