"""Schemas of tools: made from functions, checked against calls, written as the text of a call and read back."""

import itertools
import json
from typing import Any, Literal, Optional

import pytest

from arpo.errors import UserError
from arpo.protocol.function_schema import schema_of
from arpo.protocol.prompts import About, default_system_prompt
from arpo.protocol.schema import ToolSchema, argument_of, arguments_of, check_arguments, example_call, text_schema

TEXT = {"type": "string"}


def convert(
    value: float,
    unit: Literal["km", "mile"],
    digits: int = 2,
    labels: list[str] | None = None,
    options: dict[str, bool] | None = None,
    note: Optional[str] = None,  # noqa: UP045
):
    """Convert a length
    to metres.

    More, which the model does not read.

    Args:
        value: the length,
            in `unit`
        unit (str): its unit

    Returns:
        text: nothing of this is an argument
    """


CONVERT = schema_of(convert)


def test_a_functions_schema_says_names_types_defaults_and_descriptions():
    assert (CONVERT.name, CONVERT.description) == ("convert", "Convert a length to metres.")
    assert CONVERT.parameters == {
        "type": "object",
        "properties": {
            "value": {"type": "number", "description": "the length, in `unit`"},
            "unit": {"type": "string", "enum": ["km", "mile"], "description": "its unit"},
            "digits": {"type": "integer", "default": 2},
            "labels": {"anyOf": [{"type": "array", "items": TEXT}, {"type": "null"}]},
            "options": {
                "anyOf": [{"type": "object", "additionalProperties": {"type": "boolean"}}, {"type": "null"}],
            },
            "note": {"anyOf": [TEXT, {"type": "null"}]},
        },
        "required": ["value", "unit"],
    }
    function = {"name": CONVERT.name, "description": CONVERT.description, "parameters": CONVERT.parameters}
    assert CONVERT.as_function() == {"type": "function", "function": function}


def spaced(a: int, b: int, c: int):
    """Does.

    Args:
        a: First. One of:

            - 1: low
            - 2: high

        b (int): Second: with a colon.
        c: Third.

    Returns:
        d: nothing of this is an argument
    """


def test_empty_lines_between_arguments_cost_no_description():
    """llama_index #22687: descriptions of parameters were lost, and nothing said so."""
    described = {name: schema["description"] for name, schema in schema_of(spaced).properties.items()}
    assert described == {"a": "First. One of: - 1: low - 2: high", "b": "Second: with a colon.", "c": "Third."}


def close(a: int) -> int:
    """Does
    it.
    Args:
        a: First.
    Returns:
        what comes of it
    """


def test_a_section_directly_behind_the_description_is_no_part_of_it():
    schema = schema_of(close)
    assert (schema.description, schema.properties["a"]["description"]) == ("Does it.", "First.")


def untyped(a):
    """Does."""


def undescribed(a: int): ...


def starred(*a: int):
    """Does."""


def strange(a: bytes):
    """Does."""


def renamed(a: int):
    """Does.

    Args:
        b: no longer there
    """


def in_sphinx_style(a: int):
    """Does.

    :param a: First.
    """


def in_numpy_style(a: int):
    """Does.

    Parameters
    ----------
    a : int
        First.
    """


def with_a_loose_line(a: int):
    """Does.

    Args:
        a: First,
        and more.
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        # a description that no model would read, as in llama_index #22687
        (in_sphinx_style, "describes arguments under :param; write lines `name: text` under Args:"),
        (in_numpy_style, "describes arguments under Parameters; write lines"),
        (with_a_loose_line, r"Args have the line 'and more\.'; write `name: text`, or indent it"),
        (untyped, "argument 'a' has no type; annotate it"),
        (undescribed, "needs a docstring"),
        (starred, r"must not take \*a"),
        (strange, "argument 'a' has the type .*bytes.*; use str, int"),
        (renamed, "describe 'b', which is no argument"),
    ],
)
def test_a_function_that_does_not_say_enough_is_refused_by_name(function, message):
    with pytest.raises(UserError, match=rf"test_schema\.{function.__name__}: .*{message}"):
        schema_of(function)


CALL = '{"value": number, "unit": string, "digits": integer (optional), '


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([1], "the arguments of convert must be a JSON object " + CALL),
        ({"value": 1}, 'convert needs the argument "unit"; it takes a JSON object ' + CALL),
        ({"value": 1, "unit": "km", "Digits": 1}, 'convert has no argument "Digits"; it takes a JSON object ' + CALL),
        ({"value": "1", "unit": "km"}, 'the argument "value" of convert must be a number, not "1".'),
        ({"value": True, "unit": "km"}, 'the argument "value" of convert must be a number, not true.'),
        ({"value": 1, "unit": "ell"}, 'the argument "unit" of convert must be one of "km", "mile", not "ell".'),
        ({"value": 1, "unit": "km", "digits": 1.5}, '"digits" of convert must be an integer, not 1.5.'),
        ({"value": 1, "unit": "km", "labels": "a"}, '"labels" of convert must be an array or null, not "a".'),
        ({"value": 1, "unit": "km", "labels": ["a", 2]}, '"labels"[1] of convert must be a string, not 2.'),
        ({"value": 1, "unit": "km", "options": {"x": 0}}, '"options"."x" of convert must be a boolean, not 0.'),
        ({"value": float("inf"), "unit": "km"}, 'the argument "value" of convert must be a number, not Infinity.'),
        ({"value": 1, "unit": "x" * 500}, '"km", "mile", not "xxx'),
    ],
)
def test_wrong_arguments_are_told_in_one_line_what_is_wrong(arguments, error):
    told = check_arguments(CONVERT, arguments)
    assert told.startswith("Error: ") and error in told and "\n" not in told and len(told) < 400
    told.encode()  # whatever the model wrote, the answer is text


def test_schemas_of_servers_nest_refer_and_leave_open():
    """The forms that pydantic writes for models, unions, enumerations and free-form objects."""
    root = {
        "type": "object",
        "$defs": {"Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, TEXT]}},
        "properties": {
            "at": {"type": "object", "properties": {"x": {"type": "integer"}}},
            "any": True,
            "loop": {"$ref": "#/$defs/Loop"},
            "mixed": {"type": ["string", "integer"]},
            "flag": {"enum": [True, "a"]},
            "one": {"oneOf": [{"type": "string"}, {"type": "boolean"}]},
        },
    }
    schema = ToolSchema("draw", "Draw.", root)
    for fine in ({"at": {"x": 1, "y": 2}}, {"any": [1]}, {"loop": 3}, {"mixed": 1}, {"one": True}, {}):
        assert check_arguments(schema, fine) == "", fine
    for wrong, told in [
        ({"at": {"x": "1"}}, '"at"."x" of draw must be an integer'),
        ({"mixed": []}, "must be a string or an integer"),
        ({"one": 1}, '"one" of draw must be a string or a boolean, not 1'),
        ({"flag": 1}, '"flag" of draw must be one of true, "a", not 1'),  # which Python takes for equal
        ({"else": 1}, 'draw has no argument "else"'),
    ]:
        assert told in check_arguments(schema, wrong)
    open_one = ToolSchema("log", "Log.", {"type": "object", "additionalProperties": {"type": "integer"}})
    assert check_arguments(open_one, {"a": 1}) == "" and "must be an integer" in check_arguments(open_one, {"a": "b"})
    assert check_arguments(ToolSchema("log", "Log.", {"additionalProperties": {}}), {"a": "b"}) == ""
    assert "it takes no arguments" in check_arguments(ToolSchema("now", "Now.", {"type": "object"}), {"a": 1})


@pytest.mark.parametrize(
    "key", ["type", "enum", "anyOf", "oneOf", "items", "required", "properties", "additionalProperties"]
)
def test_a_strangers_schema_that_is_none_allows_or_refuses_and_breaks_nothing(key):
    for odd, value in itertools.product([5, "", [{}], [5], [None], {"a": 5}, None], [1, "s", None, [1], {"a": 1}]):
        for parameters in {"properties": {"a": {key: odd}}}, {"properties": {"a": {}}, key: odd}:
            try:
                schema = ToolSchema("t", "", parameters)
                assert isinstance(check_arguments(schema, {"a": value}), str)
                assert isinstance(example_call(schema) + schema.text_argument, str)
            except Exception as error:
                error.add_note(f"{parameters}, which is asked with a={value!r}")
                raise


@pytest.mark.parametrize("text", [" a\n b ", '{"code": "x"}', "", "ü"])
def test_the_call_of_a_tool_that_takes_one_text_is_that_text(text):
    schema = text_schema("python", "Run code.", "code", "Any code.")
    assert argument_of(schema, {"code": text}) == text
    assert arguments_of(schema, text) == {"code": text}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"code": TEXT}},
        {"properties": {"code": {"type": "integer"}}, "required": ["code"]},
        {"properties": {"code": TEXT, "more": TEXT}, "required": ["code"]},
    ],
)
def test_every_other_call_is_canonical_json(parameters):
    schema = ToolSchema("t", "", parameters)
    arguments: dict[str, Any] = {"more": " ü\n", "code": 1} if "more" in parameters["properties"] else {"code": 1}
    assert argument_of(schema, arguments) == json.dumps(dict(sorted(arguments.items())), ensure_ascii=False)


NO_JSON = ["", "a", "{", '{"value": 1', '{"a\\ud800": 1}', "[" * 100_000, '{"value": ' + "1" * 5000 + "}",
           '{"value": NaN, "unit": "km"}']  # fmt: skip


@pytest.mark.parametrize("text", NO_JSON, ids=range(len(NO_JSON)))
def test_a_call_that_is_no_json_is_told_so(text):
    told = arguments_of(CONVERT, text)
    assert isinstance(told, str) and told.startswith("Error: ") and "\n" not in told and len(told) < 400


def test_the_default_system_prompt_lists_tools_that_only_have_a_schema_behind_those_that_speak_for_themselves():
    text = text_schema("fetch", "Fetch a page.", "url", "its address")
    prompt = default_system_prompt([], [CONVERT, text])
    call = '<convert> {"value": 1.5, "unit": "km"} </convert>'
    assert "with the help of the tools listed at the end.\n" in prompt
    assert f"To call a tool of the list, write its arguments between its tags, like {call}. After each" in prompt
    assert f"Example: <think> what is needed </think>{call} <result> 42 </result><think> done </think>" in prompt
    schema = json.dumps(CONVERT.parameters, ensure_ascii=False)
    assert f"\n\n{call}\nConvert a length to metres.\nArguments, as a JSON schema: {schema}" in prompt
    assert prompt.endswith("\n\n<fetch> url </fetch>\nFetch a page.\nurl: its address")
    about = About("a clock", "to know the time, write <clock>", "<clock> UTC </clock> <result> 42 </result>")
    prompt = default_system_prompt([about], [CONVERT])
    assert "with the help of a clock and the tools listed at the end.\n" in prompt
    assert "To know the time, write <clock>; to call a tool of the list" in prompt
    assert prompt.count("<result> 42 </result>") == 1 and prompt.count("<convert>") == 2


def test_a_text_with_choices_is_shown_by_one_of_them_which_its_own_check_accepts():
    """server-everything's get-structured-content: its argument's name was shown, and refused."""
    places = ["New York", "Chicago"]
    properties = {"location": {"type": "string", "enum": places, "description": "a city"}}
    schema = ToolSchema("weather", "", {"type": "object", "properties": properties, "required": ["location"]})
    assert example_call(schema) == "New York" and not check_arguments(schema, {"location": example_call(schema)})
    prompt = default_system_prompt([], [schema])
    assert "<weather> New York </weather>" in prompt and 'location: a city (one of ["New York", "Chicago"])' in prompt
