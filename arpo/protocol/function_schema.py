"""The schema of a tool, derived from a typed function.

We do not use `transformers.utils.get_json_schema`: it imports torch, leaves out defaults, requires a description of
each argument, and takes unknown types for objects. Here the error names the argument to correct.
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

END_OF_DESCRIPTION = re.compile(r"\n\n|\n *(?:Args|Arguments|Returns|Raises): *(?=\n)")
"""An empty line, or the head of a section directly behind the first paragraph."""
FOREIGN_STYLE = re.compile(r"^ *(?::param\b|Parameters\n *-{3,})", re.MULTILINE)
"""Descriptions of arguments in the style of Sphinx or NumPy, which would not be read."""
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def schema_of(function: Callable[..., Any]) -> ToolSchema:
    """Return the schema given by a function's name, docstring, types and defaults.

    Types are str, int, float, bool, list, dict, their list[...] and dict[str, ...], Literal, Optional and unions of
    these. The docstring's first paragraph is the description. Lines `name: text` under its `Args:` describe the
    arguments. Raises UserError if docstring or types are missing.
    """
    where = f"{function.__module__}.{function.__name__}"
    docstring = inspect.cleandoc(function.__doc__ or "")
    description = END_OF_DESCRIPTION.split(docstring)[0]
    if not description:
        raise UserError(f"{where}: a tool's function needs a docstring, for the model reads it; write what it does")
    if foreign := FOREIGN_STYLE.search(docstring):
        style = foreign[0].split()[0]
        raise UserError(
            f"{where}: the docstring describes arguments under {style}; write lines `name: text` under Args:"
        )
    hints = get_type_hints(function)
    descriptions = _argument_descriptions(docstring, where)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{where}: a tool's arguments have names; the function must not take {parameter}")
        if name not in hints:
            raise UserError(f"{where}: the argument {name!r} has no type; annotate it, like {name}: str")
        properties[name] = _schema_of_type(hints[name], f"{where}: the argument {name!r}")
        if name in descriptions:
            properties[name]["description"] = descriptions[name]
        if parameter.default is parameter.empty:
            required.append(name)
        elif parameter.default is not None:
            properties[name]["default"] = parameter.default
    unknown = descriptions.keys() - properties.keys()
    if unknown:
        raise UserError(f"{where}: the docstring's Args describe {min(unknown)!r}, which is no argument; correct it")
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return ToolSchema(function.__name__, " ".join(description.split()), parameters)


def _schema_of_type(hint: Any, where: str) -> dict[str, Any]:
    """Return the schema of a type. Raises UserError for a type that JSON does not have."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if hint is Any:
        return {}
    if hint is None or hint is type(None):
        return {"type": "null"}
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if origin is Literal and all(isinstance(choice, str | int | bool) for choice in inner):
        types_of_choices = {_NAMES[type(choice)] for choice in inner}
        schema: dict[str, Any] = {"type": types_of_choices.pop()} if len(types_of_choices) == 1 else {}
        return schema | {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of_type(member, where) for member in inner]}
    if origin is list:
        return {"type": "array", "items": _schema_of_type(inner[0], where)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema_of_type(inner[1], where)}
    raise UserError(
        f"{where} has the type {hint}; use str, int, float, bool, list[...], dict[str, ...], Literal or unions of these"
    )


def _argument_descriptions(docstring: str, where: str) -> dict[str, str]:
    """Return the descriptions under `Args:` by argument. A line with deeper indentation continues the line above.

    Lines may be empty. The section ends at the next line that is not indented deeper than `Args:`. Raises UserError for
    another line than `name: text`.
    """
    section = re.search(r"^( *)(?:Args|Arguments): *\n((?:(?:\1 +\S.*)?\n)+)", docstring + "\n", re.MULTILINE)
    if section is None:
        return {}
    descriptions = {}
    for entry in re.findall(r"^\S.*(?:\n(?: .*)?)*", textwrap.dedent(section[2]), re.MULTILINE):
        described = re.match(r"(\w+)(?: \(.*?\))?:", entry)
        if described is None:
            line = entry.splitlines()[0]
            raise UserError(f"{where}: the docstring's Args have the line {line!r}; write `name: text`, or indent it")
        descriptions[described[1]] = " ".join(entry[described.end() :].split())
    return descriptions
