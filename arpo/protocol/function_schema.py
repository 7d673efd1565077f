"""The schema of a tool, read off a typed function.

Not `transformers.utils.get_json_schema`: that imports torch, leaves defaults out, wants a description of each argument,
and takes a type that JSON has not for an object, where this says which argument to correct.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from arpo.errors import UserError
from arpo.protocol.schema import ToolSchema

_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def schema_of(function: Callable[..., Any]) -> ToolSchema:
    """Return the schema that a function's name, docstring, types and defaults say.

    Types are str, int, float, bool, list, dict, their list[...] and dict[str, ...], Literal, Optional and unions of
    these. The docstring's first paragraph is the description; the lines `name: text` under its `Args:` describe the
    arguments. Raises UserError for a function that does not say enough.
    """
    where = f"{function.__module__}.{function.__name__}"
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    if not paragraphs[0]:
        raise UserError(f"{where}: a tool's function needs a docstring, for the model reads it; write what it does")
    hints, described = get_type_hints(function), _described_arguments(function.__doc__)
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{where}: a tool's arguments have names; the function must not take {parameter}")
        if name not in hints:
            raise UserError(f"{where}: the argument {name!r} has no type; annotate it, like {name}: str")
        properties[name] = _schema_of_type(hints[name], f"{where}: the argument {name!r}")
        if name in described:
            properties[name]["description"] = described[name]
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            properties[name]["default"] = parameter.default
    if unknown := described.keys() - properties.keys():
        raise UserError(f"{where}: the docstring's Args describe {min(unknown)!r}, which is no argument; correct it")
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    return ToolSchema(function.__name__, " ".join(paragraphs[0].split()), parameters)


def _schema_of_type(hint: Any, where: str) -> dict[str, Any]:
    """Return the schema of a type. Raises UserError for one that JSON has not."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint is None or hint is type(None):
        return {"type": "null"}
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin is Literal and all(isinstance(choice, str | int | bool) for choice in inner):
        kinds = {_NAMES[type(choice)] for choice in inner}
        return ({"type": kinds.pop()} if len(kinds) == 1 else {}) | {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of_type(one, where) for one in inner]}
    if origin is list:
        return {"type": "array", "items": _schema_of_type(inner[0], where)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema_of_type(inner[1], where)}
    raise UserError(
        f"{where} has the type {hint}; use str, int, float, bool, list[...], dict[str, ...], Literal or unions of these"
    )


def _described_arguments(docstring: str | None) -> dict[str, str]:
    """Return the texts of the arguments under `Args:`. A line that is indented deeper goes on with the one above."""
    section = re.search(r"^ *(?:Args|Arguments): *\n((?: +\S.*\n?)+)", inspect.cleandoc(docstring or ""), re.MULTILINE)
    entries = textwrap.dedent(section[1]) if section else ""
    found = re.findall(r"^(\w+)(?: \(.*?\))?:(.*(?:\n .*)*)", entries, re.MULTILINE)
    return {name: " ".join(map(str.strip, text.strip().splitlines())) for name, text in found}
