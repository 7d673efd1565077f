"""Schemas of tools; arguments, checked against a schema; and the texts of calls.

The text of a call is what the tags hold and what records show. Where a tool takes one text and nothing else, it is that
text; else it is a JSON object:

    <python> print(6 * 7) </python>        {"code": "print(6 * 7)"}
    <add> {"a": 1, "b": 2} </add>          {"a": 1, "b": 2}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from arpo.config.bounded import check_plain, parse_json

MAX_SHOWN_CHARS = 60
"""Characters shown of a wrong value."""
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
T = TypeVar("T")


class About(NamedTuple):
    """Texts with which a tool is introduced in the default system prompt."""

    noun: str
    """Name of the tool with its article: "a search tool"."""
    usage: str
    """Instruction to call it: "to search, write <search> query </search>"."""
    example: str
    """A call and its result. The last tool's is followed by the answer 42, which its result should lead to."""


@dataclass(frozen=True)
class ToolSchema:
    """A tool as a model must know it to call it."""

    name: str
    """The tool's name, which is its tag too."""
    description: str
    """Its purpose, in a sentence or a paragraph for the model."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments: {"type": "object", "properties": {name: schema}, "required": [name, ...]}."""
    about: About | None = None
    """Its introduction in the default system prompt; None = by this schema."""

    def as_function(self) -> dict[str, Any]:
        """Return the entry of `tools=` that chat templates and OpenAI's interface take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @property
    def properties(self) -> dict[str, Any]:
        """Schemas of the arguments, by name."""
        return _part(self.parameters, "properties", dict)

    @property
    def required(self) -> list[str]:
        """Names of the arguments that have no default."""
        return _texts(self.parameters, "required")

    @property
    def text_argument(self) -> str:
        """Name of the only argument, where that is a required string, so that a call is a bare text; else ""."""
        names = list(self.properties)
        is_text = len(names) == 1 and names == self.required and _kind(self.properties[names[0]]) == "string"
        return names[0] if is_text else ""


def text_schema(name: str, description: str, argument: str, meaning: str) -> ToolSchema:
    """Return the schema of a tool that takes one text and nothing else."""
    properties = {argument: {"type": "string", "description": meaning}}
    return ToolSchema(name, description, {"type": "object", "properties": properties, "required": [argument]})


def example_call(schema: ToolSchema) -> str:
    """Return what a call of a tool looks like, with values that only show the types.

    >>> example_call(ToolSchema("add", "", {"properties": {"a": {"type": "integer"}}, "required": ["a"]}))
    '{"a": 1}'
    """
    if name := schema.text_argument:
        choices = _part(schema.properties[name], "enum", list)
        return choices[0] if choices and isinstance(choices[0], str) else name
    shown = schema.required or list(schema.properties)[:1]
    return json.dumps({name: _example(schema.properties.get(name)) for name in shown}, ensure_ascii=False)


def check_arguments(schema: ToolSchema, arguments: Any) -> str:
    """Return "" for arguments with which the tool can be called, else the one-line error that the model reads.

    Checked are the names, and types and enumerations at every depth. What else a schema may ask for (references,
    ranges, names within objects) is left to the tool. `arguments` is whatever the model's JSON holds.

    >>> check_arguments(ToolSchema("root", "", {"properties": {"x": {"type": "number"}}}), {"x": "4"})
    'Error: the argument "x" of root must be a number, not "4".'
    """
    name = schema.name
    if not isinstance(arguments, dict):
        return f"Error: the arguments of {name} must be {_a_call(schema)}, not {_shown(arguments)}."
    for required in schema.required:
        if required not in arguments:
            return f'Error: {name} needs the argument "{required}"; it takes {_a_call(schema)}.'
    others = schema.parameters.get("additionalProperties", False)  # unlike JSON schema: a slip should be read as one
    for argument, value in arguments.items():
        if argument not in schema.properties and others is False:
            takes = _a_call(schema) if schema.properties else "no arguments"
            return f"Error: {name} has no argument {_shown(argument)}; it takes {takes}."
        inner = schema.properties.get(argument, others)
        if wrong := _mismatch(value, inner, f'"{argument}"'):
            place, need, found = wrong
            return f"Error: the argument {place} of {name} must be {need}, not {_shown(found)}."
    try:
        json.dumps(arguments, allow_nan=False)  # no JSON, though Python's reader lets it pass
    except ValueError:
        return f"Error: the arguments of {name} hold a number that is not finite."
    return ""


def argument_of(schema: ToolSchema, arguments: Mapping[str, Any]) -> str:
    """Return checked arguments as the text of a call: the bare text where the tool takes one, else canonical JSON.

    >>> argument_of(ToolSchema("add", "", {"properties": {"a": {}, "b": {}}}), {"b": 2, "a": "é"})
    '{"a": "é", "b": 2}'
    """
    if schema.text_argument:
        return arguments[schema.text_argument]
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False)


def value_of(schema: ToolSchema, argument: str, text: str) -> Any:
    """Return what a bare text means as a value of an argument: the text where that may be of any type, or of no other.

    >>> value_of(ToolSchema("add", "", {"properties": {"a": {"type": "integer"}}}), "a", "4")
    4
    """
    inner = schema.properties.get(argument)
    if not inner:
        return text
    words = {"true": True, "false": False, "null": None, "none": None}  # Python's and JSON's
    try:
        word = text.strip().lower()
        value = words[word] if word in words else read_json(text)
    except ValueError:
        return text
    return text if isinstance(value, str) or _mismatch(value, inner, "") else value


def arguments_of(schema: ToolSchema, argument: str) -> dict[str, Any] | str:
    """Return the checked arguments that the text of a call stands for, or the one-line error that the model reads."""
    if schema.text_argument:
        arguments = {schema.text_argument: argument}
    else:
        try:
            arguments = read_json(argument)
        except ValueError as error:
            return f"Error: the call of {schema.name} is no JSON ({error}); it takes {_a_call(schema)}."
    return check_arguments(schema, arguments) or arguments


def read_json(text: str) -> Any:
    """Return the value of a JSON text that a model wrote. Raises ValueError with the reason in a few words."""
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(error.msg) from None
    check_plain(value)
    return value


# ---- checking


def _mismatch(value: Any, schema: Any, place: str) -> tuple[str, str, Any] | None:
    """Return (place, what it must be, what it is) of the first value that a schema does not allow; None for none."""
    if not isinstance(schema, Mapping):
        return None
    choices = _part(schema, "enum", list)
    if choices and not any(choice == value and type(choice) is type(value) for choice in choices):
        return place, "one of " + ", ".join(json.dumps(one, ensure_ascii=False) for one in choices), value
    if ways := _part(schema, "anyOf", list):
        found = [_mismatch(value, way, place) for way in ways]
        if all(found):
            inside = next((one for one in found if one[0] != place), None)  # the type is right, what it holds is not
            return inside or (place, " or ".join(dict.fromkeys(need for _, need, _ in found)), value)
    kinds = _texts(schema, "type")
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        return place, " or ".join(map(_with_article, kinds)), value
    return next(filter(None, (_mismatch(*member) for member in _members(value, schema, place))), None)


def _members(value: Any, schema: Mapping, place: str) -> list[tuple[Any, Any, str]]:
    """Return (value, schema, place) of what an array or an object holds."""
    if isinstance(value, list):
        return [(one, schema.get("items"), f"{place}[{i}]") for i, one in enumerate(value)]
    if isinstance(value, dict):
        known, others = _part(schema, "properties", dict), schema.get("additionalProperties")
        return [(one, known.get(name, others), f'{place}."{name}"') for name, one in value.items()]
    return []


def _part(schema: Mapping, key: str, kind: type[T]) -> T:
    """Return a part of a schema; an empty one where a stranger's schema has something else there."""
    part = schema.get(key)
    return part if isinstance(part, kind) else kind()


def _texts(schema: Mapping, key: str) -> list[str]:
    """Return the texts of a part that is one, or a list of some."""
    part = schema.get(key)
    return [one for one in (part if isinstance(part, list) else [part]) if isinstance(one, str)]


def _is_a(value: Any, kind: str) -> bool:
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if isinstance(value, float) and not math.isfinite(value):  # no JSON, though Python's reader lets it pass
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, object))


def _a_call(schema: ToolSchema) -> str:
    """Return how a call looks: {"a": integer, "b": string (optional)}"""
    entries = [
        f'"{name}": {_kind(inner)}' + ("" if name in schema.required else " (optional)")
        for name, inner in schema.properties.items()
    ]
    return f"a JSON object {{{', '.join(entries)}}}"


def _kind(schema: Any) -> str:
    return " or ".join(_texts(schema, "type") if isinstance(schema, Mapping) else ()) or "value"


def _example(schema: Any) -> Any:
    """Return some value of a type; "..." where the schema does not name one."""
    if not isinstance(schema, Mapping):
        return "..."
    if choices := _part(schema, "enum", list):
        return choices[0]
    values = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return values.get(_kind(schema), "...")


def _with_article(kind: str) -> str:
    return "null" if kind == "null" else f"a{'n' if kind[:1] in 'aeiou' else ''} {kind}"


def _shown(value: Any) -> str:
    """Return a value as one line of JSON, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
