"""Equality of two mathematical answers: cheap exact checks first, math-verify in a worker process for the rest."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from arpo.rewards.qa import option_letter, unwrap

MAX_CHARS = 1000
"""Longest answer that is compared as a formula; longer ones must be literally equal."""

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)")
_FRACTION = re.compile(r"([-+]?\d+)/(\d*[1-9]\d*)|([-+]?)\\frac\{(\d+)\}\{(\d*[1-9]\d*)\}")
_WORDS = re.compile(r"[^\W\d_]{4,}(?:[ '-][^\W\d_]+)*|[^\W\d_]+(?: [^\W\d_]{2,})+")
_BASE = re.compile(r"^([0-9A-Fa-f]+)_\{?(\d+)\}?$")


def math_accuracy(prediction: str, answers: list[str]) -> float:
    """Return 1.0 if the prediction equals one of the accepted answers, else 0.0."""
    return float(any(math_equal(prediction, answer) for answer in answers))


def exact_accuracy(prediction: str, answers: list[str]) -> float:
    """Return 1.0 for the same number or text, else 0.0. "37*482" is not 17834: the arithmetic is the task."""
    numbers = [_rational(answer.strip()) for answer in answers]
    number, text = _rational(prediction.strip()), prediction.strip().casefold()
    return float((number is not None and number in numbers) or text in [a.strip().casefold() for a in answers])


@lru_cache(maxsize=65536)
def math_equal(prediction: str, answer: str) -> bool:
    r"""Return whether the two are the same value. Sign, decimals, slashes count; spelling, units, LaTeX spacing do not.

    >>> math_equal("0.5", r"\frac{1}{2}"), math_equal("5", "-5"), math_equal("105", "1.05"), math_equal("1,000", "1000")
    (True, False, False, True)
    """
    prediction, answer = _clean(prediction), _clean(answer)
    if not prediction:
        return False
    if prediction == answer or _without_spacing(prediction) == _without_spacing(answer):
        return True
    if max(len(prediction), len(answer)) > MAX_CHARS:
        return False
    numbers = _rational(prediction), _rational(answer)
    if None not in numbers:
        if numbers[0] == numbers[1] or not ("/" in prediction + answer or "\\" in prediction + answer):
            return numbers[0] == numbers[1]
    elif re.fullmatch(r"\(?[A-Z]\)?", answer):
        return option_letter(prediction) == answer.strip("()")
    elif _WORDS.fullmatch(answer):
        return prediction.casefold() == answer.casefold()  # to sympy, words are products: listen = silent
    bases = _BASE.match(prediction), _BASE.match(answer)
    if all(bases) and bases[0][2] != bases[1][2]:
        return False  # math-verify drops the subscript
    return _worker.equal(prediction, answer)


def _clean(text: str) -> str:
    text = unwrap(text.replace("\u2212", "-"))
    for left, right in ((r"\(", r"\)"), (r"\[", r"\]")):
        text = text.removeprefix(left).removesuffix(right).strip() if text.startswith(left) else text
    return text.rstrip(".").strip() if text != "." else text


def _without_spacing(text: str) -> str:
    r"""Remove LaTeX spacing and sizes, and blanks unless they part two words or numbers ("1 2" is not "12")."""
    text = re.sub(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\[!,;: ]|~", " ", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)


def _rational(text: str) -> Fraction | None:
    r"""Return the exact value of a plain number or fraction: "1,000.5", "-3/4", "\frac{3}{4}"; else None."""
    if len(text) > 100:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if match := _FRACTION.fullmatch(text):
        return Fraction(int(match[1]), int(match[2])) if match[1] else Fraction(f"{match[3]}{match[4]}/{match[5]}")
    return None


class _Worker:
    """math_worker.py behind a pipe; restarted when a comparison killed it. Safe to use from any thread."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Drop the process: the child of a fork must not talk into its parent's pipe."""
        self._lock, self._process = threading.Lock(), None

    def _start(self) -> subprocess.Popen:
        path = Path(__file__).with_name("math_worker.py")
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace",
        )  # fmt: skip
        if process.stdout.readline() != "ready\n":
            code = process.wait()
            raise RuntimeError(f"the math-verify worker did not start (exit code {code}); see its message above")
        return process

    def equal(self, prediction: str, answer: str) -> bool:
        """Return math-verify's verdict; False where it ran out of time or memory."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            process = self._process
            reply = ""
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps([prediction, answer]) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            if not reply:  # killed by its own timer
                process.communicate()
                self._process = None
            return reply == "1\n"


_worker = _Worker()
