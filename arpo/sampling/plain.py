"""Dataclasses as plain JSON values, and back by their type hints. So a checkpoint holds no code that a reader runs."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

SCALARS = (int, float, str, bool)


def to_plain(value: Any) -> Any:
    """Return a value as JSON can hold it: a dict whose keys are no strings as pairs, a set sorted.

    {(0,): 1} -> [[[0], 1]]
    """
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(one) for key, one in value.items()}
        return [[to_plain(key), to_plain(one)] for key, one in value.items()]
    if isinstance(value, set):
        return [to_plain(one) for one in sorted(value)]
    if isinstance(value, list | tuple):
        is_flat = len(value) > 0 and type(value[0]) in SCALARS  # hints give a list one type: tokens, logprobs
        return list(value) if is_flat and isinstance(value, list) else [to_plain(one) for one in value]
    return value


def from_plain(kind: Any, plain: Any) -> Any:
    """Invert `to_plain` for a value of this type. Raises TypeError, ValueError or KeyError for what is none."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if plain is None else from_plain(next(arg for arg in args if arg is not NoneType), plain)
    if is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: from_plain(hints[name], one) for name, one in plain.items()})
    if origin is dict:
        pairs = plain.items() if isinstance(plain, dict) else plain
        return {from_plain(args[0], key): from_plain(args[1], one) for key, one in pairs}
    if origin in (list, set):
        return origin(plain) if args[0] in SCALARS else origin(from_plain(args[0], one) for one in plain)
    if origin is tuple:
        kinds = [args[0]] * len(plain) if args[-1] is Ellipsis else args
        return tuple(from_plain(one, value) for one, value in zip(kinds, plain, strict=True))
    return kind(plain) if isinstance(kind, type) and issubclass(kind, Enum) else plain


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
