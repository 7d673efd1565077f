"""Schemas of tools, checks of arguments against a schema, and the texts of calls.

The text of a call is written between tags and into records. For a tool with a single text as argument, this is the
argument itself. For any other tool the text is a JSON object:

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
"""A wrong value is cut to this length in error messages."""
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
    """A tool's introduction in the default system prompt."""

    noun: str
    """Name of the tool with its article: "a search tool"."""
    usage: str
    """Instruction to call it: "to search, write <search> query </search>"."""
    example: str
    """A call and its result. The answer 42 follows the last tool's example, so the last result should lead to 42."""


@dataclass(frozen=True)
class ToolSchema:
    """A tool's description for the model."""

    name: str
    """The tool's name, and also the tag of a call."""
    description: str
    """The tool's purpose, in a sentence or a paragraph."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments: {"type": "object", "properties": {name: schema}, "required": [name, ...]}."""
    about: About | None = None
    """Introduction in the default system prompt; None = the prompt shows this schema."""

    def as_function(self) -> dict[str, Any]:
        """Return the tool's entry in `tools=`, for chat templates and OpenAI's interface."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @property
    def properties(self) -> dict[str, Any]:
        """Schemas of the arguments, by name."""
        return _value_of_kind(self.parameters, "properties", dict)

    @property
    def required(self) -> list[str]:
        """Names of the arguments without a default."""
        return _texts(self.parameters, "required")

    @property
    def text_argument(self) -> str:
        """Name of the only argument if this is a required string: then a call is a bare text. "" for other tools."""
        names = list(self.properties)
        is_text = len(names) == 1 and names == self.required and _type_name(self.properties[names[0]]) == "string"
        return names[0] if is_text else ""


def text_schema(name: str, description: str, argument: str, meaning: str) -> ToolSchema:
    """Return the schema of a tool with a single argument, a text."""
    properties = {argument: {"type": "string", "description": meaning}}
    return ToolSchema(name, description, {"type": "object", "properties": properties, "required": [argument]})


def example_call(schema: ToolSchema) -> str:
    """Return the text of a call with example values of the right types.

    >>> example_call(ToolSchema("add", "", {"properties": {"a": {"type": "integer"}}, "required": ["a"]}))
    '{"a": 1}'
    """
    name = schema.text_argument
    if name:
        choices = _value_of_kind(schema.properties[name], "enum", list)
        return choices[0] if choices and isinstance(choices[0], str) else name
    names = schema.required or list(schema.properties)[:1]
    return json.dumps({name: _example(schema.properties.get(name)) for name in names}, ensure_ascii=False)


def check_arguments(schema: ToolSchema, arguments: Any) -> str:
    """Return the error for the model (one line), or "" for valid arguments.

    Checks the names, and types and enumerations at every depth. The tool itself must check the rest (references,
    ranges, names within objects). arguments: any value of the model's JSON.

    >>> check_arguments(ToolSchema("root", "", {"properties": {"x": {"type": "number"}}}), {"x": "4"})
    'Error: the argument "x" of root must be a number, not "4".'
    """
    name = schema.name
    if not isinstance(arguments, dict):
        return f"Error: the arguments of {name} must be {_a_call(schema)}, not {_shown(arguments)}."
    for required in schema.required:
        if required not in arguments:
            return f'Error: {name} needs the argument "{required}"; it takes {_a_call(schema)}.'
    # JSON schema's default is True. False here, so that the model reads of a misspelt argument.
    others = schema.parameters.get("additionalProperties", False)
    for argument, value in arguments.items():
        if argument not in schema.properties and others is False:
            takes = _a_call(schema) if schema.properties else "no arguments"
            return f"Error: {name} has no argument {_shown(argument)}; it takes {takes}."
        inner = schema.properties.get(argument, others)
        mismatch = _mismatch(value, inner, f'"{argument}"')
        if mismatch:
            return (
                f"Error: the argument {mismatch.path} of {name} must be {mismatch.need}, not {_shown(mismatch.value)}."
            )
    try:
        json.dumps(arguments, allow_nan=False)  # NaN is not JSON, but Python's json.loads accepts it
    except ValueError:
        return f"Error: the arguments of {name} hold a number that is not finite."
    return ""


def argument_of(schema: ToolSchema, arguments: Mapping[str, Any]) -> str:
    """Return checked arguments as the text of a call: canonical JSON, or a bare text (see `text_argument`).

    >>> argument_of(ToolSchema("add", "", {"properties": {"a": {}, "b": {}}}), {"b": 2, "a": "é"})
    '{"a": "é", "b": 2}'
    """
    if schema.text_argument:
        return arguments[schema.text_argument]
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False)


def value_of(schema: ToolSchema, argument: str, text: str) -> Any:
    """Convert a bare text to the type of an argument. It stays a text if the type does not fit.

    It also stays a text if the schema has no type. Behind a reference ($ref), only objects and arrays are converted.

    >>> value_of(ToolSchema("add", "", {"properties": {"a": {"type": "integer"}}}), "a", "4")
    4
    """
    inner = schema.properties.get(argument)
    if not inner:
        return text
    words = {"true": True, "false": False, "null": None, "none": None}  # Python's and JSON's
    word = text.strip().lower()
    try:
        value = words[word] if word in words else read_json(text)
    except ValueError:
        return text
    return text if isinstance(value, str) or _mismatch(value, inner, "") or not _has_type(inner, value) else value


def arguments_of(schema: ToolSchema, argument: str) -> dict[str, Any] | str:
    """Return the checked arguments in the text of a call, or the one-line error for the model."""
    if schema.text_argument:
        arguments = {schema.text_argument: argument}
    else:
        try:
            arguments = read_json(argument)
        except ValueError as error:
            return f"Error: the call of {schema.name} is no JSON ({error}); it takes {_a_call(schema)}."
    return check_arguments(schema, arguments) or arguments


def read_json(text: str) -> Any:
    """Return the value of a model's JSON text. Raises ValueError with a short reason."""
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(error.msg) from None
    check_plain(value)
    return value


def with_integers(value: Any, schema: Any) -> Any:
    """Return a checked value with an int for each float where the schema has an integer, at every depth.

    JSON has one kind of number: 3.0 is an integer.

    >>> with_integers([3.0, None], {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}})
    [3, None]
    """
    if not isinstance(schema, Mapping):
        return value
    alternatives = _alternatives(schema)
    fitting = [alternative for alternative in alternatives if not _mismatch(value, alternative, "")]
    if fitting:
        return with_integers(value, fitting[0])
    if isinstance(value, float):
        return int(value) if "integer" in _texts(schema, "type") and value.is_integer() else value
    members = [with_integers(member, inner) for member, inner, _ in _members(value, schema, "")]
    if isinstance(value, list):
        return members
    return dict(zip(value, members, strict=True)) if isinstance(value, dict) else value


# ---- checking


class Mismatch(NamedTuple):
    """A value that a schema does not allow."""

    path: str
    """Position of the value: "x"[2]."name"."""
    need: str
    """Description of an allowed value: "a number"."""
    value: Any


def _mismatch(value: Any, schema: Any, path: str) -> Mismatch | None:
    """Return the first value that the schema does not allow, or None."""
    if not isinstance(schema, Mapping):
        return None
    choices = _value_of_kind(schema, "enum", list)
    if choices and not any(choice == value and type(choice) is type(value) for choice in choices):
        need = "one of " + ", ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return Mismatch(path, need, value)
    alternatives = _alternatives(schema)
    mismatches = [_mismatch(value, alternative, path) for alternative in alternatives]
    if mismatches and all(mismatches):
        for mismatch in mismatches:
            if mismatch.path != path:  # the type fits this alternative, but a value within it is wrong
                return mismatch
        needs = dict.fromkeys(mismatch.need for mismatch in mismatches)
        return Mismatch(path, " or ".join(needs), value)
    type_names = _texts(schema, "type")
    if type_names and not any(_is_a(value, name) for name in type_names):
        return Mismatch(path, " or ".join(map(_with_article, type_names)), value)
    members = _members(value, schema, path)
    mismatches = (_mismatch(member, inner, inner_path) for member, inner, inner_path in members)
    return next(filter(None, mismatches), None)


def _members(value: Any, schema: Mapping, path: str) -> list[tuple[Any, Any, str]]:
    """Return (value, schema, path) of each member of an array or an object."""
    if isinstance(value, list):
        return [(member, schema.get("items"), f"{path}[{i}]") for i, member in enumerate(value)]
    if isinstance(value, dict):
        properties = _value_of_kind(schema, "properties", dict)
        others = schema.get("additionalProperties")
        return [(member, properties.get(name, others), f'{path}."{name}"') for name, member in value.items()]
    return []


def _alternatives(schema: Mapping) -> list[Any]:
    """Return the schemas of which a value must fit at least one; [] = the schema names none."""
    return _value_of_kind(schema, "anyOf", list) or _value_of_kind(schema, "oneOf", list)


def _has_type(schema: Any, value: Any) -> bool:
    """True if the schema, or an alternative that the value fits, has types; for an object or array also a reference."""
    if not isinstance(schema, Mapping):
        return False
    names = {"type", "enum", "$ref", "allOf"} if isinstance(value, dict | list) else {"type", "enum"}
    fitting = [alternative for alternative in _alternatives(schema) if not _mismatch(value, alternative, "")]
    return not names.isdisjoint(schema) or any(_has_type(alternative, value) for alternative in fitting)


def _value_of_kind(schema: Mapping, key: str, kind: type[T]) -> T:
    """Return a schema's value under a key. Return an empty one if the value is missing or of another type."""
    value = schema.get(key)
    return value if isinstance(value, kind) else kind()


def _texts(schema: Mapping, key: str) -> list[str]:
    """Return the texts under a key: a single text, or a list of texts. Other values are dropped."""
    value = schema.get(key)
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]


def _is_a(value: Any, type_name: str) -> bool:
    # For Python a bool is an int. In JSON it is not.
    if type_name == "boolean" or isinstance(value, bool):
        return type_name == "boolean" and isinstance(value, bool)
    if isinstance(value, float) and not math.isfinite(value):  # NaN is not JSON, but Python's json.loads accepts it
        return False
    if type_name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(type_name, object))


def _a_call(schema: ToolSchema) -> str:
    """Return the shape of a call: {"a": integer, "b": string (optional)}"""
    entries = [
        f'"{name}": {_type_name(inner)}' + ("" if name in schema.required else " (optional)")
        for name, inner in schema.properties.items()
    ]
    return f"a JSON object {{{', '.join(entries)}}}"


def _type_name(schema: Any) -> str:
    return " or ".join(_texts(schema, "type") if isinstance(schema, Mapping) else ()) or "value"


def _example(schema: Any) -> Any:
    """Return an example value; "..." if the schema has no type."""
    if not isinstance(schema, Mapping):
        return "..."
    choices = _value_of_kind(schema, "enum", list)
    if choices:
        return choices[0]
    values = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return values.get(_type_name(schema), "...")


def _with_article(type_name: str) -> str:
    if type_name == "null":
        return "null"
    return f"an {type_name}" if type_name[:1] in "aeiou" else f"a {type_name}"


def _shown(value: Any) -> str:
    """Return a value as one line of JSON, cut to MAX_SHOWN_CHARS."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
