"""Equality of two mathematical answers: cheap exact checks first, math-verify in a child process for the rest."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from arpo.jail.child import Child, ChildDied
from arpo.protocol.format_rules import last_box
from arpo.rewards import math_worker
from arpo.rewards.math_text import from_unicode, respelled
from arpo.rewards.qa import option_letter, unwrap

MAX_CHARS = 1000
"""Longest answer that is compared as a formula; longer ones must be literally equal."""
FLOAT_DIGITS = 15
"""Significant digits from which on a decimal is taken for a float that was printed: 0.30000000000000004 is 0.3."""

_UNITS = {
    alias: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre",
        "in inch inches", "ft foot feet", "yd yard", "mi mile", "mg milligram", "g gram", "kg kilogram", "lb pound",
        "oz ounce", "ml mL milliliter millilitre", "l L liter litre", "ms millisecond", "s sec second", "min minute",
        "h hr hour", "day", "week", "month", "year", "degree", "cent", "dollar", "euro",
    )
    for alias in names.split()
}  # fmt: skip
"""Spelling of a unit, in the singular -> its name."""

_GAP = r"(?:\s|~|\\[,;: ])"
_NUMBER = re.compile(r"[-+]?(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)")
_GROUPED = re.compile(rf"[-+]?[1-9]\d{{0,2}}(?:{_GAP}\d{{3}})+(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}")
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)/(\d+)")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_UNIT = r"(?P<%s>[A-Za-z]+)(?:\^\{?(?P<%s>[23])\}?)?"
_QUANTITY = re.compile(
    rf"(?P<number>.*[\d)}}])(?P<gap>{_GAP}*){_UNIT % ('unit', 'power')}(?:/{_UNIT % ('per', 'per_power')})?", re.DOTALL
)
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}")
_RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+")
_EQUALS = re.compile(r"(?<![<>!:])=(?!=)|\\approx(?![A-Za-z])")
_DASH = re.compile(r"\u2212|(?<![\w)}])[\u2010-\u2013]")  # a minus, unless it is the dash of a range: 3\u20135
_FRACTION = re.compile(r"([-+]?\d+)/(\d*[1-9]\d*)|([-+]?)\\frac\{(\d+)\}\{(\d*[1-9]\d*)\}")
_LETTERS = re.compile(r"[^\W\d_]{3}")
_WORDS = re.compile(r"[^\W\d_]{4,}(?:[ '-][^\W\d_]+)*|[^\W\d_]+(?: [^\W\d_]{2,})+")
_UNREAD = re.compile(
    r"\\(?:[a-z]?dots|not|neg|lnot|l?or|land|vee|wedge|implies|iff|to|mid|middle|boxed|fbox|sout|[bx]?cancel)(?![A-Za-z])"
    r"|\\[A-Za-z]*arrow(?![A-Za-z])|\.\.\.|\d\s*'|%.*\n\s*\S|^(?!.*\\begin\b).*\\\\(?![A-Za-z])",
    re.DOTALL,
)
"""What math-verify drops or stops at: dots of a list, an alternative, what takes back the rest, a line break."""
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
    r"""Return whether the two are the same value. Sign, decimals, slashes count; spelling and LaTeX spacing do not, nor
    does a unit that only one of them has. docs/evaluation.md lists what was decided in doubtful cases.

    >>> math_equal("0.5", r"\frac{1}{2}"), math_equal("5", "-5"), math_equal("105", "1.05"), math_equal("1,000", "1000")
    (True, False, False, True)
    """
    is_same_text = prediction.strip() == answer.strip()
    prediction, answer = _clean(prediction), _clean(last_box(answer) or answer)  # some truths are sentences with a box
    if not prediction:
        return False
    if is_same_text or prediction == answer or _without_spacing(prediction) == _without_spacing(answer):
        return True
    if max(len(prediction), len(answer)) > MAX_CHARS or _UNREAD.search(prediction) or _UNREAD.search(answer):
        return False
    whole = prediction, answer
    (prediction, unit), (answer, wanted_unit) = _quantity(prediction), _quantity(answer)
    if (unit and wanted_unit and unit != wanted_unit) or _is_false_equation(prediction):
        return False
    if any(_RATIO.fullmatch(a) and _NUMBER.fullmatch(b) for a, b in ((prediction, answer), (answer, prediction))):
        return False  # a ratio equals a ratio or a fraction, but 3:4 is not 0.75
    if _DECIMAL_COMMA.fullmatch(prediction) and not _NUMBER.fullmatch(prediction) and _rational(answer) is not None:
        prediction = prediction.replace(",", ".")  # no list of numbers: one number is wanted
    numbers = _rational(prediction), _rational(answer)
    if None not in numbers:
        is_fraction = not _NUMBER.fullmatch(prediction)
        return numbers[0] == numbers[1] or _is_rounding(
            *((answer, prediction) if is_fraction else (prediction, answer))
        )
    if re.fullmatch(r"\(?[A-Z]\)?", answer):
        return (option_letter(prediction) or prediction.strip("()")) == answer.strip("()")
    if _WORDS.fullmatch(answer) or (_LETTERS.fullmatch(answer) and _LETTERS.fullmatch(prediction)):
        return prediction.casefold() == answer.casefold()  # to sympy, words are products: listen = silent
    bases = _BASE.match(prediction), _BASE.match(answer)
    if all(bases) and bases[0][2] != bases[1][2]:
        return False  # math-verify drops the subscript
    if bases[0] and numbers[1] is not None:
        return _in_base(bases[0][1], int(bases[0][2])) == numbers[1]
    # where one of them has a unit, that may be a variable: mass times g
    return _is_proven_equal(prediction, answer) or (bool(unit) != bool(wanted_unit) and _is_proven_equal(*whole))


def _clean(text: str) -> str:
    text = unwrap(_DASH.sub("-", respelled(from_unicode(text))))
    for left, right in ((r"\(", r"\)"), (r"\[", r"\]")):
        text = text.removeprefix(left).removesuffix(right).strip() if text.startswith(left) else text
    return text.rstrip(".").strip() if text != "." else text


def _without_spacing(text: str) -> str:
    r"""Remove LaTeX spacing and sizes, and blanks unless they part two words or numbers ("1 2" is not "12")."""
    text = re.sub(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\[!,;: ]|~", " ", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\[a-z]?dots(?![A-Za-z])|\.\.\.", r"\\dots ", text)
    return re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)


def _quantity(text: str) -> tuple[str, str]:
    r"""Part a text from its unit ("" = none), and write a number plainly. "1\,000 dollars" -> ("1000", "dollar")"""
    unit = ""
    if match := _QUANTITY.fullmatch(text):
        name, per = _unit_name(match["unit"]), _unit_name(match["per"])
        is_apart = match["gap"] or match["per"] or len(match["unit"]) > 1  # 5m may be a product
        if name and is_apart and (per or not match["per"]):
            text, unit = match["number"], f"{name}^{match['power'] or 1}/{per}^{match['per_power'] or 1}"
    if len(text) > 100:
        return text, unit
    if _GROUPED.fullmatch(text):
        return re.sub(_GAP, "", text), unit
    if _SCIENTIFIC.fullmatch(text):
        return str(Fraction(text)), unit
    if match := _REPEATING.fullmatch(text):
        sign, whole, once, again = match.groups()
        nines = (10 ** len(again) - 1) * 10 ** len(once)
        return f"{sign}{int(whole + once + again or 0) - int(whole + once or 0)}/{nines}", unit
    if (match := _MIXED.fullmatch(text)) and 0 < int(match[3]) < int(match[4]):
        return f"{match[1]}{int(match[2]) * int(match[4]) + int(match[3])}/{match[4]}", unit
    return text, unit


def _unit_name(word: str | None) -> str:
    """Return the name of a unit in any spelling; "" for another word, or for none."""
    if not word:
        return ""
    return _UNITS.get(word) or (_UNITS.get(word.removesuffix("s"), "") if len(word) > 2 else "")


def _is_false_equation(text: str) -> bool:
    """Return whether two sides are plain numbers that differ: 4=5. (A decimal at the end may be rounded: 10/3=3.33.)"""
    *sides, last = (side.strip() for side in _EQUALS.split(text))
    if not sides or (result := _rational(last)) is None:
        return False
    decimals = len(last.partition(".")[2])
    rounding = Fraction(1, 2 * 10**decimals) if decimals or r"\approx" in text else 0
    return any(abs(value - result) > rounding for side in sides if (value := _rational(side)) is not None)


def _is_rounding(text: str, exact: str) -> bool:
    """Return whether a text is a decimal of six significant digits, and `exact` rounded to its decimals. If that is a
    decimal too, it must have more of them. A float as Python prints it may be off by its own last digit."""
    (_, _, decimals), digits = text.partition("."), re.sub(r"\D", "", text).lstrip("0")
    if not _NUMBER.fullmatch(text) or not decimals or len(digits) < 6:
        return False
    distance, value = abs(_rational(text) - _rational(exact)), _rational(exact)
    if len(digits) >= FLOAT_DIGITS and distance <= abs(value) / 10 ** (FLOAT_DIGITS - 1):
        return True
    if _NUMBER.fullmatch(exact) and len(exact.partition(".")[2]) <= len(decimals):
        return False
    return distance <= Fraction(1, 2 * 10 ** len(decimals))


def _in_base(digits: str, base: int) -> int | None:
    """("101", 2) -> 5; None where these are no digits of that base."""
    try:
        return int(digits, base) if 2 <= base <= 36 else None
    except ValueError:
        return None


def _rational(text: str) -> Fraction | None:
    r"""Return the exact value of a plain number or fraction: "1,000.5", "-3/4", "\frac{3}{4}"; else None."""
    if len(text) > 100:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if match := _FRACTION.fullmatch(text):
        return Fraction(int(match[1]), int(match[2])) if match[1] else Fraction(f"{match[3]}{match[4]}/{match[5]}")
    return None


_child = Child(
    Path(__file__).with_name("math_worker.py"),
    memory_bytes=math_worker.MEMORY_BYTES,
    cpu_s=math_worker.CPU_S,
    wall_s=math_worker.WALL_S,
)


def _is_proven_equal(prediction: str, answer: str) -> bool:
    """Return math-verify's verdict; False where it ran out of time or memory."""
    try:
        return _child.ask([prediction, answer]) is True
    except ChildDied:
        return False
