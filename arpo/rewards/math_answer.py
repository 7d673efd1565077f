"""Equality of two mathematical answers: first cheap exact checks, then math-verify in a child process."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from arpo.jail.child import Child, ChildDied
from arpo.protocol.format_rules import last_box
from arpo.rewards import math_worker
from arpo.rewards.math_text import PYTHON, from_unicode, respelled
from arpo.rewards.qa import BRACED, option_letter, unwrap

MAX_CHARS = 1000
"""Longer answers are not compared as formulas: they must be literally equal."""
FLOAT_DIGITS = 15
"""A decimal with at least this many significant digits counts as a printed float: 0.30000000000000004 is 0.3."""

_UNITS = {
    alias: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre",
        "in inch inches", "ft foot feet", "yd yard", "mi mile", "mg milligram", "g gram", "kg kilogram", "lb pound",
        "oz ounce", "ml mL milliliter millilitre", "l L liter litre", "ms millisecond", "s sec second", "min minute",
        "h hr hour", "day", "week", "month", "year", "degree", "radian", "cent", "dollar", "euro",
        "unit",
    )
    for alias in names.split()
}  # fmt: skip
"""Spelling of a unit in the singular -> its name."""

_GAP = r"(?:\s|~|\\[,;: ])"
_NUMBER = re.compile(r"[-+]?(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)")
_GROUPED = re.compile(rf"[-+]?[1-9]\d{{0,2}}(?:{_GAP}\d{{3}})+(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}")
_MIXED = re.compile(r"([-+]?)(\d+)\s+(\d+)/(\d+)")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_UNIT = r"(?P<%s>[A-Za-z]+)(?:\^\{?(?P<%s>[23])\}?)?"
_QUANTITY = re.compile(
    rf"(?P<number>.*(?:[\d)}}]|\\pi|\u03c0))(?P<gap>{_GAP}*){_UNIT % ('unit', 'power')}"
    rf"(?:(?:{_GAP}*/{_GAP}*|\s+per\s+){_UNIT % ('per', 'per_power')})?",
    re.DOTALL,
)
_COUNTED = re.compile(
    rf"(?P<number>.*(?:[\d)}}]|\\pi|\u03c0)){_GAP}*"  # 2cosx is a product: only Chinese may follow without a gap
    rf"(?P<words>[\u4e00-\u9fff]+|(?<=[\s~,;:])(?:[A-Za-z]{{4,}}|(?:[A-Za-z]{{3,}}|of)(?:[ -]+(?:[A-Za-z]{{2,}}|a))+))",
    re.DOTALL,
)
_CHANGES_NUMBER = re.compile(
    # Anywhere among the words.
    r"\b(?:or|and|if|not|nor|neither|either|unless|except|without|instead|depending|less|more|least|most|than|times"
    r"|plus|minus|over|root|power|exponent|base|mod|modulo|remainder|choose|factorial|added|subtracted|multiplied|divided"
    r"|increased|decreased|reduced|squared|cubed|doubled|tripled|quadrupled|halved|twice|thrice|hal(?:f|ves)"
    r"|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth)s?|percent\w*|per cent|per mill?e|pct"
    r"|basis points|zero|one|two|three|four|five|six|seven|eight|nine|tens?|dozens?|\w*hundred\w*|\w*thousand\w*"
    r"|\w*illions?|lakhs?|crores?|(?:sin|cos|tan|log|exp)[abnxyz]?)\b"
    # Directly after the number: "5 below zero".
    r"|^(?:to|through|by|from|below|above|under|with|but|for|when|where|while|versus)\b"
    # At the end: in "5 negative integers" it changes nothing.
    r"|\b(?:below|above|short|negative|binary|octal|repeating|recurring|higher|lower|greater|smaller|larger|fewer|wrong"
    r"|incorrect|false|undefined|impossible|inverse|reciprocal|infinity|up|down|onwards?|upwards?)$"
    # In Chinese: 10^4, 10^8, thousand, hundred, ten, part, half, times, from ... on, or.
    r"|[\u4e07\u4ebf\u5343\u767e\u5341\u5206\u534a\u500d\u4ee5\u6216]",
    re.IGNORECASE,
)
"""Words after a number that are no name of what was counted: 17 thousand is not 17."""
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2}")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar)\{(\d+)\}")
_RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+")
_MARK_AT_END = re.compile(r"(?:\\[,;:!]|(?<![.,;\\])[.,;])\s*$")  # but not dots: 3.14... is not 3.14
_IN_BRACES = re.compile(rf"\{{({BRACED})\}}")
_EQUALS = re.compile(r"(?<![<>!:])=(?!=)|\\approx(?![A-Za-z])")
_DASH = re.compile(r"\u2212|(?<![\w)}])[\u2010-\u2013]")  # a minus, unless it is the dash of a range: 3\u20135
_FRACTION = re.compile(r"([-+]?\d+)/(\d*[1-9]\d*)|([-+]?)\\frac\{(\d+)\}\{(\d*[1-9]\d*)\}")
_LETTERS = re.compile(r"[^\W\d_]{3}")
_WORDS = re.compile(r"[^\W\d_]{4,}(?:[ '-][^\W\d_]+)*|[^\W\d_]+(?: [^\W\d_]{2,})+")
_UNREAD = re.compile(
    r"\\(?:[a-z]?dots|not|neg|lnot|or|vee|wedge|implies|iff|to|mid|middle|boxed|fbox|sout|[bx]?cancel)(?![A-Za-z])"
    r"|\\[A-Za-z]*arrow(?![A-Za-z])|\.\.\.|(?:[\d)}\]]|\\[A-Za-z]+)\s*'|%.*\n\s*\S|^(?!.*\\begin\b).*\\\\(?![A-Za-z])",
    re.DOTALL,
)
"""math-verify would drop these signs, or stop at them: dots of a list, an alternative, a negation, a line break."""
_BASE = re.compile(r"^([-+]?[0-9A-Fa-f]+)_\{?(\d+)\}?$")


def math_accuracy(prediction: str, answers: list[str]) -> float:
    """Return 1.0 if the prediction equals any accepted answer, and 0.0 if not."""
    return float(any(math_equal(prediction, answer) for answer in answers))


def exact_accuracy(prediction: str, answers: list[str]) -> float:
    """Return 1.0 for the same number or text, otherwise 0.0. "37*482" is not 17834: the arithmetic is the task."""
    text = prediction.strip()
    number = _rational(text)
    for answer in map(str.strip, answers):
        if text.casefold() == answer.casefold() or (number is not None and number == _rational(answer)):
            return 1.0
    return 0.0


@lru_cache(maxsize=65536)
def math_equal(prediction: str, answer: str) -> bool:
    r"""True if both texts have the same value. docs/evaluation.md lists the decisions in doubtful cases.

    Sign, decimals and slashes count. Spelling and LaTeX spacing do not count, and neither does a unit in only one text.

    >>> math_equal("0.5", r"\frac{1}{2}"), math_equal("5", "-5"), math_equal("105", "1.05"), math_equal("1,000", "1000")
    (True, False, False, True)
    """
    is_same_text = prediction.strip() == answer.strip()
    prediction = _clean(prediction)
    answer = _clean(last_box(answer) or answer)  # some answers in data files are sentences with a box
    if not prediction:
        return False
    if is_same_text or prediction == answer or _without_spacing(prediction) == _without_spacing(answer):
        return True
    if max(len(prediction), len(answer)) > MAX_CHARS or _UNREAD.search(prediction) or _UNREAD.search(answer):
        return False
    if not _is_balanced(prediction) or not _is_balanced(answer):
        return False
    prediction_with_unit = prediction
    answer_with_unit = answer
    prediction, unit = _split_unit(prediction)
    answer, true_unit = _split_unit(answer)
    if (unit and true_unit and unit != true_unit) or _is_false_equation(prediction):
        return False
    # A ratio may equal a ratio or a fraction, but 3:4 is not 0.75.
    if any(_RATIO.fullmatch(a) and _NUMBER.fullmatch(b) for a, b in ((prediction, answer), (answer, prediction))):
        return False
    # If the answer is one number, "3,14" is a decimal and not a list.
    if _DECIMAL_COMMA.fullmatch(prediction) and not _NUMBER.fullmatch(prediction) and _rational(answer) is not None:
        prediction = prediction.replace(",", ".")
    number = _rational(prediction)
    true_number = _rational(answer)
    if number is not None and true_number is not None:
        if number == true_number:
            return True
        is_decimal = bool(_NUMBER.fullmatch(prediction))
        return _is_rounding(prediction, answer) if is_decimal else _is_rounding(answer, prediction)
    if re.fullmatch(r"\(?[A-Z]\)?", answer):
        return (option_letter(prediction) or prediction.strip("()")) == answer.strip("()")
    # For sympy words are products of letters: listen = silent.
    if _WORDS.fullmatch(answer) or (_LETTERS.fullmatch(answer) and _LETTERS.fullmatch(prediction)):
        return prediction.casefold() == answer.casefold()
    # math-verify drops the subscript of 101_2, so bases are compared here.
    in_base = _BASE.match(prediction)
    true_in_base = _BASE.match(answer)
    if in_base and true_in_base and in_base[2] != true_in_base[2]:
        return False
    if in_base and true_number is not None:
        return _in_base(in_base[1], int(in_base[2])) == true_number
    if _is_proven_equal(prediction, answer):
        return True
    # If only one text has a unit, this may be a variable: in "5 g" the g may be the acceleration of gravity.
    return bool(unit) != bool(true_unit) and _is_proven_equal(prediction_with_unit, answer_with_unit)


def _clean(text: str) -> str:
    text = unwrap(_DASH.sub("-", respelled(from_unicode(text))))
    for left, right in ((r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(left):
            text = text.removeprefix(left).removesuffix(right).strip()
    if braced := _IN_BRACES.fullmatch(text):
        text = braced[1].strip()
    return _MARK_AT_END.sub("", text) or text


def _is_balanced(text: str) -> bool:
    """True if a box holds the text. math-verify would read "1}^n" as 1: there the box ends."""
    return last_box(rf"\boxed{{{text}}}") == text.strip()


def _without_spacing(text: str) -> str:
    r"""Remove LaTeX spacing and sizes, and blanks. A blank between words or numbers stays ("1 2" is not "12")."""
    text = re.sub(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\[!,;: ]|~", " ", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\[a-z]?dots(?![A-Za-z])|\.\.\.", r"\\dots ", text)
    return re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)


def _split_unit(text: str) -> tuple[str, str]:
    r"""Return (text without its unit, unit); unit "" = none. Numbers are normalized too: "1\,000 dollars" -> ("1000",
    "dollar^1/^1")."""
    unit = ""
    quantity = _QUANTITY.fullmatch(text)
    if quantity:
        name = _unit_name(quantity["unit"])
        per = _unit_name(quantity["per"])
        # 5m may be a product. A gap, a long word or a second unit shows that it is a unit.
        is_unit = quantity["gap"] or quantity["per"] or len(quantity["unit"]) > 1
        if name and is_unit and (per or not quantity["per"]):
            text = quantity["number"]
            if name != "unit":  # "5 units" names no unit
                unit = f"{name}^{quantity['power'] or 1}/{per}^{quantity['per_power'] or 1}"
    return _plain_number(_without_noun(text)), unit


def _without_noun(text: str) -> str:
    """Remove what was counted: "17 red marbles" -> "17". Words that change the number stay: "17 thousand"."""
    counted = _COUNTED.fullmatch(text)
    if not counted or _WORD.search(counted["number"]):
        return text
    words = counted["words"]
    return text if _CHANGES_NUMBER.search(words) or PYTHON.search(words) else counted["number"]


def _plain_number(text: str) -> str:
    r"""Write a number without groups, exponent or period, and a mixed number as a fraction. Other texts stay.

    "1\,000" -> "1000", "5e-1" -> "1/2", "0.\overline{3}" -> "3/9", "2 1/2" -> "5/2"
    """
    if len(text) > 100:
        return text
    if _GROUPED.fullmatch(text):
        return re.sub(_GAP, "", text)
    if _SCIENTIFIC.fullmatch(text):
        return str(Fraction(text))
    repeating = _REPEATING.fullmatch(text)
    if repeating:
        sign, whole, once, period = repeating.groups()
        denominator = (10 ** len(period) - 1) * 10 ** len(once)
        numerator = int(whole + once + period or 0) - int(whole + once or 0)
        return f"{sign}{numerator}/{denominator}"
    mixed = _MIXED.fullmatch(text)
    if mixed:
        sign = mixed[1]
        whole, numerator, denominator = (int(digits) for digits in mixed.groups()[1:])
        if 0 < numerator < denominator:
            return f"{sign}{whole * denominator + numerator}/{mixed[4]}"
    return text


def _unit_name(word: str | None) -> str:
    """Return the name of a unit in any spelling; "" for any other word."""
    if not word:
        return ""
    return _UNITS.get(word) or (_UNITS.get(word.removesuffix("s"), "") if len(word) > 2 else "")


def _is_false_equation(text: str) -> bool:
    """True if two sides are different plain numbers: 4=5. A decimal on the last side may be rounded: 10/3=3.33."""
    *sides, last = (side.strip() for side in _EQUALS.split(text))
    result = _rational(last)
    if not sides or result is None:
        return False
    num_decimals = len(last.partition(".")[2])
    tolerance = Fraction(1, 2 * 10**num_decimals) if num_decimals or r"\approx" in text else 0
    values = [_rational(side) for side in sides]
    return any(value is not None and abs(value - result) > tolerance for value in values)


def _is_rounding(text: str, exact: str) -> bool:
    """True if a text is a decimal with at least six significant digits, and `exact` rounded to its decimals.

    If `exact` is a decimal too, it must have more decimals. A printed float may differ in its last digit.
    """
    decimals = text.partition(".")[2]
    digits = re.sub(r"\D", "", text).lstrip("0")
    if not _NUMBER.fullmatch(text) or not decimals or len(digits) < 6:
        return False
    value = _rational(exact)
    distance = abs(_rational(text) - value)
    if len(digits) >= FLOAT_DIGITS and distance <= abs(value) / 10 ** (FLOAT_DIGITS - 1):
        return True
    if _NUMBER.fullmatch(exact) and len(exact.partition(".")[2]) <= len(decimals):
        return False
    return distance <= Fraction(1, 2 * 10 ** len(decimals))


def _in_base(digits: str, base: int) -> int | None:
    """("101", 2) -> 5. Return None if these are no digits of the base."""
    try:
        return int(digits, base) if 2 <= base <= 36 else None
    except ValueError:
        return None


def _rational(text: str) -> Fraction | None:
    r"""Return the exact value of a plain number or fraction: "1,000.5", "-3/4", "\frac{3}{4}". Otherwise None."""
    if len(text) > 100:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    fraction = _FRACTION.fullmatch(text)
    if fraction is None:
        return None
    if fraction[1]:
        return Fraction(int(fraction[1]), int(fraction[2]))
    return Fraction(f"{fraction[3]}{fraction[4]}/{fraction[5]}")


_child = Child(
    Path(__file__).with_name("math_worker.py"),
    memory_bytes=math_worker.MEMORY_BYTES,
    cpu_s=math_worker.CPU_S,
    wall_s=math_worker.WALL_S,
)


def _is_proven_equal(prediction: str, answer: str) -> bool:
    """Return math-verify's verdict. Return False if it runs out of time or memory."""
    try:
        return _child.ask([prediction, answer]) is True
    except ChildDied:
        return False
