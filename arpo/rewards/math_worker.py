"""A process of its own for math-verify: it reads ["prediction", "answer"] lines and writes "1" or "0" lines.

sympy can take forever or all memory on what a policy writes. Here either ends this process only: the kernel kills it
when one comparison has used up its CPU time, whichever code it is stuck in, and the parent starts another one.
Run by path, without the package, so that it starts in half a second; in a jail, for what it parses is a policy's.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from pathlib import Path

CPU_S = 2.0  # CPU seconds, not wall time, so that a busy machine gives the same rewards as an idle one
WALL_S = 60
MEMORY_BYTES = 2 << 30
LAST_LETTER = re.compile(r"(?<![A-Za-z\\])([A-Za-z])\s*$")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes stdin
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    folder = Path(__file__).resolve().parent
    sys.path += [str(folder), str(folder.parent / "tools")]
    import math_numbers
    from math_sets import equal_as_sets
    from math_text import from_python
    from sandbox.parser_jail import confine_parser
    from sympy import Basic

    math_numbers.install()
    confine_parser()
    # no ExprExtractionConfig: of what it cannot read it takes the last number, so that "n = 3k, k > 1" would be 1
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]
    print("ready", flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.alarm(WALL_S)
        prediction, answer = json.loads(line)
        try:
            # without math-verify's own timeouts, which are signals too and would disarm ours
            # braces around a last letter: it is a variable, which math-verify would drop for a unit
            texts = [LAST_LETTER.sub(r"{\1}", from_python(text)) for text in (answer, prediction)]
            boxes = [rf"\boxed{{{text}}}" for text in texts]
            parsed = [parse(box, extraction, parsing_timeout=None) for box in boxes]
            equal = bool(verify(parsed[0], parsed[1], timeout_seconds=None))
            if not equal and all(isinstance(values[0], Basic) for values in parsed):
                equal = equal_as_sets(parsed[0][0], texts[0], parsed[1][0], texts[1])
        except (Exception, MemoryError, RecursionError):  # whatever sympy makes of it, it is no proof of equality
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        print(int(equal), flush=True)


if __name__ == "__main__":
    main()
