"""Replaces math-verify's comparison of two values, which rounds to six decimals: 0.0 would equal 1/13983816.

Here a decimal is an exact fraction. Two rational numbers are compared exactly. The difference of other numbers is
computed with enough digits to tell a small difference from zero. math_worker.py imports this module by its path.
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
    Integer,
    MatrixBase,
    MatrixExpr,
    Mul,
    Rational,
    Symbol,
    UnevaluatedExpr,
    conjugate,
    im,
    simplify,
    solve,
)
from sympy import (
    re as real_part,
)
from sympy.core.function import AppliedUndef

MIN_DIGITS = 6
"""A decimal with at least this many significant digits may be a rounded truth."""
FLOAT_DIGITS = 15
COMPLEX_NAMES = {"z", "w"}
"""Variables that are always complex. Any other variable is real, unless an answer contains its conjugate (bar)."""
_POINTS = (Rational(17, 13), Rational(-11, 7), Rational(29, 23), Rational(-5, 19), Rational(31, 7), Rational(3, 11))
_PERCENT = UnevaluatedExpr(Rational(1, 100))
_IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")


def install() -> None:
    """Put the comparisons into math-verify. Raises AttributeError if this version has other functions."""
    for module, name, function in (
        (math_verify.grader, "sympy_numeric_eq", numeric_equal),
        (math_verify.grader, "sympy_symbolic_eq", symbolic_equal),
        (math_verify.grader, "solve", _solutions),
        (math_verify.parser, "should_treat_as_complex", _is_complex),
    ):
        getattr(module, name)
        setattr(module, name, function)


def _is_complex(latex: str) -> bool:
    """True if symbols may be complex. math-verify's own rule detects the i in "1 - 2 i", but not in "1-2i"."""
    return bool(_IMAGINARY.search(latex)) or math_verify.grader.should_treat_as_complex(latex)


def _solutions(relation: Basic, symbols: set[Symbol]) -> list:
    """Solve as sympy does. Raises ValueError if there is no solution.

    math-verify compares the solutions of two equations. f(2)=3 and f(2)=7 both have none, and would be equal.
    """
    solutions = solve(relation, symbols)
    if not solutions:
        raise ValueError(f"{relation} has no solution")
    return solutions


def numeric_equal(truth: Basic | MatrixBase, prediction: Basic | MatrixBase, *_: int) -> bool:
    """True if two values are equal. docs/evaluation.md has the rules for rounding and percent."""
    if isinstance(truth, MatrixBase | MatrixExpr) and isinstance(prediction, MatrixBase | MatrixExpr):
        truth = truth.doit()
        prediction = prediction.doit()
        pairs = zip(truth.flat(), prediction.flat(), strict=False)
        return truth.shape == prediction.shape and all(numeric_equal(*pair) or symbolic_equal(*pair) for pair in pairs)
    if not isinstance(truth, Expr) or not isinstance(prediction, Expr):
        return False
    if _is_percent(truth) or _is_percent(prediction):
        # 9 may mean 9%, so compare the numbers without the sign too.
        without_sign = [value.xreplace({_PERCENT: Integer(1)}) for value in (truth, prediction)]
        if numeric_equal(*without_sign):
            return True
    # Conjugates come before doit: as long as z is real, doit would turn |z|^2 into z^2.
    exact_truth, exact_prediction = (exact(value.doit()) for value in _with_conjugates(truth, prediction))
    if exact_truth.free_symbols or exact_prediction.free_symbols:
        return _agree_at_points(exact_truth, exact_prediction)
    if _same_number(exact_truth, exact_prediction):
        return True
    if isinstance(prediction, Float):
        return _is_rounding(exact_prediction, exact_truth, unless_coarser=isinstance(truth, Float))
    return isinstance(truth, Float) and _is_rounding(exact_truth, exact_prediction)


def symbolic_equal(truth: Basic | MatrixBase, prediction: Basic | MatrixBase) -> bool:
    """True if the difference of two formulas simplifies to zero. Values without variables are compared elsewhere."""
    if isinstance(truth, MatrixBase) or not (truth.free_symbols or prediction.free_symbols):
        return False
    exact_truth, exact_prediction = (exact(value) for value in _with_conjugates(truth, prediction))
    return bool(simplify(exact_truth - exact_prediction).is_zero)


def _is_percent(value: Basic) -> bool:
    return isinstance(value, Mul) and value.args[-1] == _PERCENT  # the arguments of -9% are (-1, 9, %)


def exact(value: Basic | MatrixBase) -> Basic | MatrixBase:
    """Turn each decimal into a fraction, and i into the imaginary unit."""
    imaginary = {symbol: I for symbol in value.free_symbols if symbol.name == "i"}
    return value.xreplace({number: Rational(str(number)) for number in value.atoms(Float)} | imaginary)


def _with_conjugates(*values: Basic | MatrixBase) -> list[Basic | MatrixBase]:
    r"""Return the values with \bar{z} as the conjugate of z, and with the same variable for the same name.

    math-verify parses all variables as real, and \bar{z} as another variable. So |z|^2 would be z^2, not z\bar{z}.
    """
    symbols = set().union(*(value.free_symbols for value in values))
    name_of_bar = {f"bar{{{symbol.name}}}": symbol.name for symbol in symbols}
    conjugates = {symbol.name: name_of_bar[symbol.name] for symbol in symbols if symbol.name in name_of_bar}
    complex_names = COMPLEX_NAMES | set(conjugates.values())
    replacements = {}
    for symbol in symbols:
        name = conjugates.get(symbol.name, symbol.name)
        variable = Symbol(name) if name in complex_names else Symbol(name, real=True)
        replacements[symbol] = conjugate(variable) if symbol.name in conjugates else variable
    functions = {r"\Re": real_part, r"\Im": im}
    return [
        value.xreplace(replacements).replace(
            lambda call: isinstance(call, AppliedUndef) and call.func.__name__ in functions,
            lambda call: functions[call.func.__name__](*call.args),
        )
        for value in values
    ]


def _same_number(first: Expr, second: Expr) -> bool:
    """True if two numbers are equal: exactly, or in 400 digits."""
    difference = first - second
    if difference.is_Rational:
        return difference.is_zero
    value = difference.evalf(20, maxn=400)
    # A Float of precision 1 has no correct digit: sympy could not tell it from zero.
    if all(part.is_zero or (isinstance(part, Float) and part._prec == 1) for part in value.as_real_imag()):
        return True
    # With complex powers a rest of about 1e-400 may have correct digits.
    return bool(abs(value) < Rational(1, 10**100) * abs(first.evalf(20)))


def _agree_at_points(truth: Expr, prediction: Expr) -> bool:
    """True if two formulas have the same values at a few unusual points. Different formulas do not agree there.

    A point does not count if both values of real formulas are complex: there sqrt(1/n) is not 1/sqrt(n).
    """
    symbols = sorted(truth.free_symbols | prediction.free_symbols, key=str)
    is_complex = truth.has(I) or prediction.has(I) or not all(symbol.is_real for symbol in symbols)
    num_equal = 0
    for shift in range(len(_POINTS)):
        at = {}
        for i, symbol in enumerate(symbols):
            point = _POINTS[(i + shift) % len(_POINTS)] + i
            at[symbol] = point if symbol.is_real else point + I * _POINTS[(i + shift + 1) % len(_POINTS)]
        true_value = truth.subs(at)
        value = prediction.subs(at)
        if _same_number(true_value, value):
            num_equal += 1
        elif is_complex or true_value.evalf(20).is_real or value.evalf(20).is_real:
            return False
    return num_equal > 0


def _is_rounding(decimal: Rational, value: Expr, *, unless_coarser: bool = False) -> bool:
    """True if a decimal (as a fraction) is the value rounded to its decimals, with at least MIN_DIGITS digits.

    unless_coarser: the value is a decimal too, and must have more decimals. See _is_rounding in math_answer.py.
    """
    num_decimals = _num_decimals(decimal)
    num_digits = len(str(abs(decimal.p) * 10**num_decimals // decimal.q))
    if not num_decimals or num_digits < MIN_DIGITS:
        return False
    distance = abs(decimal - value).evalf(20)
    size = abs(value).evalf(20)
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
        decimal *= 10
        num_decimals += 1
    return num_decimals
