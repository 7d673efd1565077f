"""Replaces math-verify's comparison of two values, which rounds to six decimals: by that, 0.0 equals 1/13983816.

Here a decimal is the fraction that it is. Two rational numbers are compared exactly; of other numbers the difference is
computed to as many digits as it takes to tell it from zero. math_worker.py imports this module by its path.
"""

from __future__ import annotations

import re

import math_verify.grader
import math_verify.parser
from sympy import (
    Basic,
    Expr,
    Float,
    I,
    MatrixBase,
    MatrixExpr,
    Mul,
    Rational,
    Symbol,
    UnevaluatedExpr,
    conjugate,
    im,
    simplify,
)
from sympy import (
    re as real_part,
)
from sympy.core.function import AppliedUndef

MIN_DIGITS = 6
"""Significant digits of a decimal that may be the truth rounded to its own decimals."""
FLOAT_DIGITS = 15
COMPLEX_NAMES = {"z", "w"}
"""Variables that are complex wherever they stand. Any other one is real, unless one of the two answers has its bar."""
_POINTS = (Rational(17, 13), Rational(-11, 7), Rational(29, 23), Rational(-5, 19), Rational(31, 7), Rational(3, 11))
_PERCENT = UnevaluatedExpr(Rational(1, 100))
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")


def install() -> None:
    """Put the comparisons into math-verify. Raises AttributeError where its version has others."""
    for module, name, own in (
        (math_verify.grader, "sympy_numeric_eq", numeric_equal),
        (math_verify.grader, "sympy_symbolic_eq", symbolic_equal),
        (math_verify.parser, "should_treat_as_complex", _is_complex),
    ):
        getattr(module, name)
        setattr(module, name, own)


def _is_complex(latex: str) -> bool:
    """Return whether symbols may be complex. math-verify's rule sees the i of "1 - 2 i" but not that of "1-2i"."""
    return bool(_IMAGINARY.search(latex)) or math_verify.grader.should_treat_as_complex(latex)


def numeric_equal(truth: Basic | MatrixBase, prediction: Basic | MatrixBase, *_: int) -> bool:
    """Return whether two values are equal, with what docs/evaluation.md says of rounding and of percent."""
    if isinstance(truth, MatrixBase | MatrixExpr) and isinstance(prediction, MatrixBase | MatrixExpr):
        truth, prediction = truth.doit(), prediction.doit()
        pairs = zip(truth.flat(), prediction.flat(), strict=False)
        return truth.shape == prediction.shape and all(numeric_equal(*pair) or symbolic_equal(*pair) for pair in pairs)
    if not isinstance(truth, Expr) or not isinstance(prediction, Expr):
        return False
    if _is_percent(truth) or _is_percent(prediction):  # 9 may stand for 9%
        bare = [value.args[0] if _is_percent(value) else value for value in (truth, prediction)]
        if numeric_equal(*bare):
            return True
    # before doit, which would make z^2 of |z|^2 while z is real
    exact_truth, exact_prediction = (exact(value.doit()) for value in _with_conjugates(truth, prediction))
    if exact_truth.free_symbols or exact_prediction.free_symbols:
        return _agree_at_points(exact_truth, exact_prediction)
    if _same_number(exact_truth, exact_prediction):
        return True
    if isinstance(prediction, Float):
        return _is_rounding(exact_prediction, exact_truth, unless_coarser=isinstance(truth, Float))
    return isinstance(truth, Float) and _is_rounding(exact_truth, exact_prediction)


def symbolic_equal(truth: Basic | MatrixBase, prediction: Basic | MatrixBase) -> bool:
    """Return whether the difference of two formulas can be simplified to zero. Numbers have been compared already."""
    if isinstance(truth, MatrixBase) or not (truth.free_symbols or prediction.free_symbols):
        return False
    exact_truth, exact_prediction = (exact(value) for value in _with_conjugates(truth, prediction))
    return bool(simplify(exact_truth - exact_prediction).is_zero)


def _is_percent(value: Basic) -> bool:
    return isinstance(value, Mul) and len(value.args) == 2 and value.args[1] == _PERCENT


def exact(value: Basic | MatrixBase) -> Basic | MatrixBase:
    """Make a fraction of each decimal, and the imaginary unit of i."""
    imaginary = {symbol: I for symbol in value.free_symbols if symbol.name == "i"}
    return value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)} | imaginary)


def _with_conjugates(*values: Basic | MatrixBase) -> list[Basic | MatrixBase]:
    r"""Let the same name be the same variable in all values, and let \bar{z} be the conjugate of z.

    math-verify reads all variables as real, and \bar{z} as one more variable: |z|^2 would be z^2, and no z\bar{z}."""
    symbols = set().union(*(value.free_symbols for value in values))
    barred = {f"bar{{{symbol.name}}}": symbol.name for symbol in symbols}
    barred = {symbol.name: barred[symbol.name] for symbol in symbols if symbol.name in barred}
    complex_names = COMPLEX_NAMES | set(barred.values())
    meanings = {}
    for symbol in symbols:
        name = barred.get(symbol.name, symbol.name)
        variable = Symbol(name) if name in complex_names else Symbol(name, real=True)
        meanings[symbol] = conjugate(variable) if symbol.name in barred else variable
    parts = {r"\Re": real_part, r"\Im": im}
    return [
        value.xreplace(meanings).replace(
            lambda part: isinstance(part, AppliedUndef) and part.func.__name__ in parts,
            lambda part: parts[part.func.__name__](*part.args),
        )
        for value in values
    ]


def _same_number(one: Expr, other: Expr) -> bool:
    """Return whether two numbers are equal: exactly, or in all of 400 digits."""
    difference = one - other
    if difference.is_Rational:
        return difference.is_zero
    value = difference.evalf(20, maxn=400)
    if all(part.is_zero or (isinstance(part, Float) and part._prec == 1) for part in value.as_real_imag()):
        return True
    # complex powers leave a rest of 1e-400 or so, with digits
    return bool(abs(value) < Rational(1, 10**100) * abs(one.evalf(20)))


def _agree_at_points(truth: Expr, prediction: Expr) -> bool:
    """Return whether two formulas have the same values at a few odd points, where no two different ones agree.

    A point proves nothing where both values of real formulas are complex: there sqrt(1/n) is not 1/sqrt(n)."""
    symbols = sorted(truth.free_symbols | prediction.free_symbols, key=str)
    is_complex = truth.has(I) or prediction.has(I) or not all(symbol.is_real for symbol in symbols)
    num_equal = 0
    for shift in range(len(_POINTS)):
        at = {}
        for i, symbol in enumerate(symbols):
            point = _POINTS[(i + shift) % len(_POINTS)] + i
            at[symbol] = point if symbol.is_real else point + I * _POINTS[(i + shift + 1) % len(_POINTS)]
        values = truth.subs(at), prediction.subs(at)
        if _same_number(*values):
            num_equal += 1
        elif is_complex or any(value.evalf(20).is_real for value in values):
            return False
    return num_equal > 0


def _is_rounding(decimal: Rational, value: Expr, *, unless_coarser: bool = False) -> bool:
    """Return whether a decimal, made a fraction, is a value rounded to its decimals and has MIN_DIGITS digits or more.
    With `unless_coarser` the value is a decimal too, and must have more of them. See _is_rounding of math_answer.py."""
    num_decimals = _num_decimals(decimal)
    num_digits = len(str(abs(decimal.p) * 10**num_decimals // decimal.q))
    if not num_decimals or num_digits < MIN_DIGITS:
        return False
    distance, size = abs(decimal - value).evalf(20), abs(value).evalf(20)
    if not distance.is_real:
        return False
    if num_digits >= FLOAT_DIGITS and distance <= size / 10 ** (FLOAT_DIGITS - 1):
        return True
    if unless_coarser and _num_decimals(value) <= num_decimals:
        return False
    return bool(distance <= Rational(1, 2 * 10**num_decimals))


def _num_decimals(decimal: Rational) -> int:
    num_decimals = 0
    while decimal.q > 1 and num_decimals < 400:
        decimal, num_decimals = decimal * 10, num_decimals + 1
    return num_decimals
