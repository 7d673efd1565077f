"""Checks that the values of a dataclass, read from JSON, have the types of the fields."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

KINDS: dict[Any, tuple[type, ...]] = {float: (float, int)}
"""Type of a field -> the allowed types of the value. Any other type allows only itself. A bool does not count as an int
here."""


def check_types(instance: Any) -> None:
    """Raise TypeError for the first field with a value of a wrong type.

    A list may stand for a tuple, a text for an enum of texts, and an integer for a float.
    """
    values = vars(instance)
    for name, kinds, test, hint in _tests(type(instance)):
        value = values[name]
        if type(value) not in kinds or not (test is None or test(value)):
            raise TypeError(f"{name} is {str(value)[:60]!r}, not {getattr(hint, '__name__', hint)}")


@cache
def _tests(kind: type) -> list[tuple[str, frozenset[type], Callable[[Any], bool] | None, Any]]:
    """Return for each field: the name, the allowed types of the value, a test of the value's parts, and the field's
    type."""
    hints = get_type_hints(kind)
    return [(field.name, *_test(hints[field.name]), hints[field.name]) for field in fields(kind)]


def _test(hint: Any) -> tuple[frozenset[type], Callable[[Any], bool] | None]:
    """Return the allowed types of a value with this hint, and a test of the value's parts (None: there is nothing to
    test)."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):
        tests = [_test(kind) for kind in arguments]

        def fits(value: Any) -> bool:
            return any(type(value) in kinds and (test is None or test(value)) for kinds, test in tests)

        return frozenset().union(*(kinds for kinds, _ in tests)), fits
    if origin in (list, dict):
        kinds, test = _test(arguments[-1])

        def fits(value: Any) -> bool:
            parts = value if origin is list else value.values()
            return kinds.issuperset(map(type, parts)) and (test is None or all(map(test, parts)))

        return frozenset({origin}), fits
    if origin is tuple:
        is_open = arguments[-1] is ...
        tests = [_test(kind) for kind in arguments if kind is not ...]

        def fits(value: Any) -> bool:
            wanted = tests * len(value) if is_open else tests
            pairs = zip(value, wanted, strict=False)
            return len(value) == len(wanted) and all(
                type(part) in kinds and (test is None or test(part)) for part, (kinds, test) in pairs
            )

        return frozenset({list, tuple}), fits
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return frozenset({str, hint}), None
    assert isinstance(hint, type) and (hint in (float, int, str, bool, dict, types.NoneType) or is_dataclass(hint)), (
        hint
    )
    return frozenset(KINDS.get(hint, (hint,))), None
