"""Solved inequalities as sets: "x \neq 2" is the union of two intervals, and "x < -1 or x > 1" is one too.

math-verify compares an inequality with a set only where the truth is the inequality. An answer to "solve x^2 < 4" may
not be "x^2 < 4", so here too a relation must be solved: a variable on one side, and on the other what is free of it.
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
    """Return whether one answer is a solved relation, and the other is the same one or its set.

    The texts tell whether a list of relations is joined by "or" or by "and"."""
    solved = [solved_set(truth, truth_text), solved_set(prediction, prediction_text)]
    if solved == [None, None]:
        return False
    if None in solved:
        other = prediction if solved[1] is None else truth
        if not isinstance(other, Set) or isinstance(other, FiniteSet):
            return False
        _, allowed = solved[0] or solved[1]
        return _same_set(exact(allowed), exact(other))
    return solved[0][0] == solved[1][0] and _same_set(exact(solved[0][1]), exact(solved[1][1]))


def solved_set(value: Basic, text: str) -> tuple[str, Set] | None:
    """Return the variable of a solved relation, or of several, and the set of its values; None for anything else."""
    if isinstance(value, And):
        relations, is_chain = list(value._unsorted_args), True
    elif isinstance(value, FiniteSet):
        relations, is_chain = list(value.args), False
    else:
        relations, is_chain = [value], False
    relations = _with_omitted(relations)
    if not relations or all(isinstance(r, Eq) and not isinstance(r.rhs, Set) for r in relations):
        return None  # equations are math-verify's
    variable = _variable(relations)
    if variable is None:
        return None
    sets = [_values(relation, variable) for relation in relations]
    if None in sets:
        return None
    if is_chain or len(sets) == 1:
        return variable.name, _all_of(sets)
    if _OR.search(text):
        return None if _AND.search(text) else (variable.name, Union(*sets))
    # a list without a word: all of them hold, unless they exclude each other, as x < -1, x > 1
    allowed = _all_of(sets)
    return variable.name, Union(*sets) if allowed.is_empty and not _AND.search(text) else allowed


def _with_omitted(relations: list[Basic]) -> list[Basic]:
    """Read "x != 2, 3" as "x != 2, x != 3"."""
    unequal = [relation for relation in relations if isinstance(relation, Ne)]
    numbers = [value for value in relations if getattr(value, "is_number", False)]
    if len(unequal) == 1 and numbers and len(numbers) + 1 == len(relations):
        return unequal + [Ne(unequal[0].lhs, number, evaluate=False) for number in numbers]
    return relations


def _variable(relations: list[Basic]) -> Symbol | None:
    """Return the variable that is a side of all relations. In x > a that is the left one."""
    if not all(isinstance(relation, Relational) for relation in relations):
        return None
    for candidate in (*relations[0].args, *relations[-1].args):
        if isinstance(candidate, Symbol) and all(candidate in relation.args for relation in relations):
            return candidate
    return None


def _values(relation: Relational, variable: Symbol) -> Set | None:
    """Return the values of a variable that a relation allows; None where it is not solved for the variable."""
    kind, bound = type(relation), relation.rhs
    if relation.lhs != variable:
        kind, bound = _MIRRORED.get(kind), relation.lhs
    if variable in bound.free_symbols:
        return None
    if isinstance(bound, Set):
        return bound if kind is Eq else None  # math-verify reads "x \in A" as an equation
    if kind is Eq:
        return FiniteSet(bound)
    if kind is Ne:
        return Union(Interval.open(-oo, bound), Interval.open(bound, oo))
    if kind in (Lt, Le):
        return Interval(-oo, bound, True, kind is Lt)
    return Interval(bound, oo, kind is Gt, True) if kind in (Gt, Ge) else None


def _all_of(sets: list[Set]) -> Set:
    """Intersect sets. A lower and an upper bound make an interval also where they are letters."""
    if len(sets) == 2 and all(isinstance(one, Interval) for one in sets):
        upper, lower = sorted(sets, key=lambda one: one.start is not -oo)
        if upper.start is -oo and lower.end is oo:
            return Interval(lower.start, upper.end, lower.left_open, upper.right_open)
    return Intersection(*sets)


def _same_set(one: Set, other: Set) -> bool:
    if one == other or one.symmetric_difference(other).is_empty:
        return True
    pieces = [sorted(_intervals(value), key=str) for value in (one, other)]
    return len(pieces[0]) == len(pieces[1]) > 0 and all(
        (a.left_open, a.right_open) == (b.left_open, b.right_open)
        and (a.start == b.start or numeric_equal(a.start, b.start))
        and (a.end == b.end or numeric_equal(a.end, b.end))
        for a, b in zip(*pieces, strict=True)
    )


def _intervals(value: Set) -> list[Interval]:
    """Return the intervals of a set that consists of intervals only, else nothing."""
    value = Reals.intersect(value) if not isinstance(value, Interval | Union) else value
    pieces = list(value.args) if isinstance(value, Union) else [value]
    return pieces if all(isinstance(piece, Interval) for piece in pieces) else []
