"""The program of the child process that compares two answers with math-verify (arpo/jail/child.py).

On a policy's text sympy may run forever, or take all memory. Here this ends only the child: the kernel kills the child
after a limit of CPU time per comparison, in whatever code, and the parent starts another child.
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
    answer(["1", "2"])  # imports everything else before the jail hides it


def answer(request: list[str]) -> bool:
    """["prediction", "answer"] -> True if math-verify can prove them equal."""
    from math_sets import equal_as_sets
    from math_text import from_python
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic, Eq

    prediction, truth = request
    # Without ExprExtractionConfig. From an unreadable text it would take the last number: "n = 3k, k > 1" would be 1.
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    try:
        # A last letter is a variable. Without braces math-verify would take it for a unit, and drop it.
        texts = [LAST_LETTER.sub(r"{\1}", from_python(text)) for text in (truth, prediction)]
        boxes = [rf"\boxed{{{text}}}" for text in texts]
        # Without math-verify's timeouts: they are signals too, and would turn ours off.
        # "first_match": the whole box or nothing. Otherwise math-verify would take 1/2 from "> \\frac{1}{2}".
        parsed = [parse(box, extraction, extraction_mode="first_match", parsing_timeout=None) for box in boxes]
        true_value = parsed[0][0]
        if isinstance(true_value, Eq) and not true_value.free_symbols:
            parsed[0] = [true_value.rhs]  # the truth "63 + 14 = 77" asks for 77
        if verify(parsed[0], parsed[1], timeout_seconds=None):
            return True
        if not all(isinstance(values[0], Basic) for values in parsed):
            return False
        return bool(equal_as_sets(parsed[0][0], texts[0], parsed[1][0], texts[1]))
    except (Exception, MemoryError, RecursionError):  # sympy may raise anything, and no error proves equality
        return False
