"""Solved inequalities as sets. "x \neq 2" is the union of two intervals, and so is "x < -1 or x > 1".

math-verify compares an inequality with a set only if the truth is the inequality. A relation must be solved: a variable
on one side, and an expression without this variable on the other. So "x^2 < 4" does not answer "solve x^2 < 4".
math_worker.py imports this module by its path.
"""

from __future__ import annotations

import re

from latex2sympy2_extended.logic import And
from math_numbers import exact, numeric_equal
from sympy import (
    Basic,
    Eq,
    FiniteSet,
    Ge,
    Gt,
    Intersection,
    Interval,
    Le,
    Lt,
    Ne,
    Reals,
    Set,
    Symbol,
    Union,
    oo,
)
from sympy.core.relational import Relational

_OR = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])")
_AND = re.compile(r"(?<![A-Za-z])and(?![A-Za-z])")
_MIRRORED = {Lt: Gt, Gt: Lt, Le: Ge, Ge: Le, Ne: Ne, Eq: Eq}


def equal_as_sets(truth: Basic, truth_text: str, prediction: Basic, prediction_text: str) -> bool:
    """True if one answer is a solved relation, and the other is the same relation or its set.

    The texts show if a list of relations is joined by "or" or by "and".
    """
    solved_truth = solved_set(truth, truth_text)
    solved_prediction = solved_set(prediction, prediction_text)
    if solved_truth is None and solved_prediction is None:
        return False
    if solved_truth is None or solved_prediction is None:
        other = truth if solved_truth is None else prediction
        if not isinstance(other, Set) or isinstance(other, FiniteSet):
            return False
        _, values = solved_truth or solved_prediction
        return _same_set(exact(values), exact(other))
    true_variable, true_values = solved_truth
    variable, values = solved_prediction
    return true_variable == variable and _same_set(exact(true_values), exact(values))


def solved_set(value: Basic, text: str) -> tuple[str, Set] | None:
    """Return (variable, set of its values) of a solved relation, or of several. Return None for anything else."""
    if isinstance(value, And):
        relations = list(value._unsorted_args)
    elif isinstance(value, FiniteSet):
        relations = list(value.args)
    else:
        relations = [value]
    relations = _expand_unequal(relations)
    if not relations or all(isinstance(r, Eq) and not isinstance(r.rhs, Set) for r in relations):
        return None  # math-verify compares equations
    variable = _variable(relations)
    if variable is None:
        return None
    sets = [_values(relation, variable) for relation in relations]
    if None in sets:
        return None
    is_chain = isinstance(value, And)  # like -1 < x < 1
    if is_chain or len(sets) == 1:
        return variable.name, _intersect(sets)
    has_and = bool(_AND.search(text))
    if _OR.search(text):
        return None if has_and else (variable.name, Union(*sets))
    # In a list without "or" and "and" all relations hold, unless they exclude each other, like x < -1, x > 1.
    intersection = _intersect(sets)
    if intersection.is_empty and not has_and:
        return variable.name, Union(*sets)
    return variable.name, intersection


def _expand_unequal(relations: list[Basic]) -> list[Basic]:
    """Read "x != 2, 3" as "x != 2, x != 3"."""
    unequal = [relation for relation in relations if isinstance(relation, Ne)]
    numbers = [value for value in relations if getattr(value, "is_number", False)]
    if len(unequal) == 1 and numbers and len(numbers) + 1 == len(relations):
        return unequal + [Ne(unequal[0].lhs, number, evaluate=False) for number in numbers]
    return relations


def _variable(relations: list[Basic]) -> Symbol | None:
    """Return the variable that is one side of every relation. In x > a it is the left one."""
    if not all(isinstance(relation, Relational) for relation in relations):
        return None
    for candidate in (*relations[0].args, *relations[-1].args):
        if isinstance(candidate, Symbol) and all(candidate in relation.args for relation in relations):
            return candidate
    return None


def _values(relation: Relational, variable: Symbol) -> Set | None:
    """Return the values of the variable that fulfil the relation. Return None if it is not solved for the variable."""
    kind = type(relation)
    bound = relation.rhs
    if relation.lhs != variable:
        kind = _MIRRORED.get(kind)
        bound = relation.lhs
    if variable in bound.free_symbols:
        return None
    if isinstance(bound, Set):
        return bound if kind is Eq else None  # math-verify parses "x \in A" as an equation
    if kind is Eq:
        return FiniteSet(bound)
    if kind is Ne:
        return Union(Interval.open(-oo, bound), Interval.open(bound, oo))
    if kind in (Lt, Le):
        return Interval(-oo, bound, True, kind is Lt)
    return Interval(bound, oo, kind is Gt, True) if kind in (Gt, Ge) else None


def _intersect(sets: list[Set]) -> Set:
    """Intersect sets. Bounds may be letters: x > a and x < b give an interval, where sympy cannot compare a and b."""
    if len(sets) == 2 and all(isinstance(interval, Interval) for interval in sets):
        upper, lower = sorted(sets, key=lambda interval: interval.start is not -oo)
        if upper.start is -oo and lower.end is oo:
            return Interval(lower.start, upper.end, lower.left_open, upper.right_open)
    return Intersection(*sets)


def _same_set(first: Set, second: Set) -> bool:
    if first == second or first.symmetric_difference(second).is_empty:
        return True
    first_intervals = sorted(_intervals(first), key=str)
    second_intervals = sorted(_intervals(second), key=str)
    if not first_intervals or len(first_intervals) != len(second_intervals):
        return False
    return all(_same_interval(a, b) for a, b in zip(first_intervals, second_intervals, strict=True))


def _same_interval(a: Interval, b: Interval) -> bool:
    return (
        (a.left_open, a.right_open) == (b.left_open, b.right_open)
        and (a.start == b.start or numeric_equal(a.start, b.start))
        and (a.end == b.end or numeric_equal(a.end, b.end))
    )


def _intervals(value: Set) -> list[Interval]:
    """Return the intervals of a set. Return [] for a set with other parts."""
    if not isinstance(value, Interval | Union):
        value = Reals.intersect(value)
    parts = list(value.args) if isinstance(value, Union) else [value]
    return parts if all(isinstance(part, Interval) for part in parts) else []
