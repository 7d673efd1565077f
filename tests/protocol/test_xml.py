"""Calls in XML: which texts are calls, and what the model reads of those that are wrong."""

import json

import pytest

from arpo.protocol import FORMS
from arpo.protocol.schema import ToolSchema, check_arguments
from arpo.protocol.xml import A_CALL, XmlCodec, read_function

NUMBER = {"type": "number"}
ADD = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOLS = {"python": ToolSchema("python", "Runs code.", CODE), "add": ToolSchema("add", "Adds.", ADD)}


def block(name: str, *, closed: bool = True, **texts: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n" + "</tool_call>" * closed


PYTHON, SUM = block("python", code="print('</tool>')\n"), block("add", b="2", a="1.5")


def calls_of(text: str) -> list[tuple[str, str, str | None]]:
    return [(call.tag, call.argument, call.error_kind) for call in XmlCodec.parse_calls(text, TOOLS)]


ADDED = ("add", '{"a": 1.5, "b": 2}', None)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # a tool of one text gets it bare, another gets canonical JSON of the types of its schema
        (f"I add.\n\n{SUM}\n{PYTHON}", [ADDED, ("python", "print('</tool>')", None)]),
        ("<tool_call><function=python><parameter=code>1</parameter></function></tool_call>", [("python", "1", None)]),
        (SUM.removesuffix("</tool_call>"), [ADDED]),  # whole functions whose block is not closed are calls
        *((text, []) for text in ("", "4", f"<think>or {SUM}?</think>4", f"<think>{SUM}", "<function> of x")),
    ],
)
def test_these_are_the_calls_of_a_turn(text, calls):
    assert calls_of(text) == calls


@pytest.mark.parametrize(
    ("text", "tag", "kind", "error"),
    [
        ('<tool_call>{"name": "python", "arguments": {}}</tool_call>', "unknown", "bad_xml", A_CALL),
        ("<tool_call></tool_call>", "unknown", "bad_xml", "not one whole function"),
        (SUM.replace("</function>", ""), "unknown", "bad_xml", "not one whole function"),
        (SUM.replace("</function>", "x</function>"), "unknown", "bad_xml", "not one whole function"),
        (SUM.replace("</parameter>\n<", "<", 1), "unknown", "bad_xml", "a value holds one of its tags"),
        (SUM.replace("</parameter>", "</ parameter>", 1), "unknown", "bad_xml", "a value holds one of its tags"),
        (block("python", code="print('</function>')"), "unknown", "bad_xml", "a value holds one of its tags"),
        (block("python", code="x = '< parameter =a>'"), "unknown", "bad_xml", "a value holds one of its tags"),
        ("<function=add>", "unknown", "unopened_call", "in no tool_call tag"),
        ("I add.\n" + SUM.replace("<tool_call>\n", ""), "unknown", "unopened_call", "in no tool_call tag"),
        (f"<think>{SUM}</think>{SUM.partition('<tool_call>')[2]}", "unknown", "unopened_call", "in no tool_call tag"),
        (SUM.replace("</tool_call>", "").replace("</function>", ""), "unknown", "unclosed_call", "cut off"),
        (block("Python", code="1"), "unknown", "unknown_tool", 'no tool "Python". There are: python, add.'),
        (block("python"), "python", "bad_arguments", 'needs the argument "code"'),
        (block("add", a="one", b="2"), "add", "bad_arguments", '"a" of add must be a number, not "one"'),
        (block("add", a="[" * 5000, b="2"), "add", "bad_arguments", '"a" of add must be a number'),
        (block("add", a="1e999", b="2"), "add", "bad_arguments", 'must be a number, not "1e999"'),
        (block("python", code=" \n"), "python", "empty_call", 'the argument "code" of python is empty'),
    ],
)
def test_the_model_reads_what_is_wrong_with_a_call(text, tag, kind, error):
    [call] = XmlCodec.parse_calls(text, TOOLS)
    assert (call.tag, call.error_kind) == (tag, kind)
    assert call.error.startswith("Error: ") and error in call.error and len(call.error) < 300


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (SUM, "call_without_result"),
        (SUM.replace("<tool_call>\n", ""), "unopened_call"),
        (SUM.replace("<tool_call>\n", "").replace("</tool_call>", ""), "unopened_call"),
        (SUM.replace("</parameter>\n", "", 1), "malformed_call"),
        (block("python", code="print('</function>')"), "malformed_call"),
        (f"<think>{SUM.replace('<tool_call>', '')}</think>4", ""),
        ("<think>perhaps <function=add></think>4", ""),
    ],
)
def test_what_is_no_whole_block_is_not_well_formed(said, error):
    assert FORMS["xml"].rules.turn_error(said, False, ("add", "python")) == error


def test_parameters_that_never_end_are_read_in_no_time():
    """Looked for from each begin on, they would take the square of their number."""
    assert read_function(f"<function=f>{'<parameter=a>' * 200_000}</function>") is None


LEVEL = {"$ref": "#/$defs/Level"}
"""As pydantic writes an enumeration: only the reference, and with None an alternative."""


@pytest.mark.parametrize(
    ("inner", "text", "value"),
    [
        (LEVEL, "1", "1"),
        (LEVEL, "none", "none"),
        (LEVEL, '{"x": 1}', {"x": 1}),
        ({"anyOf": [LEVEL, {"type": "null"}]}, "1", "1"),
        ({"anyOf": [LEVEL, {"type": "null"}]}, "null", None),
        ({"description": "The number of a house."}, "007", "007"),
        ({"description": "The number of a house."}, "12", "12"),
        ({"description": "Yes or no."}, "true", "true"),
        (True, "12", "12"),
        ({"oneOf": [{"type": "string"}, {"type": "boolean"}]}, "12", "12"),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, "12", 12),
        ({"type": "integer", "description": "A number."}, "12", 12),
    ],
)
def test_a_value_whose_type_the_schema_does_not_say_stays_a_text(inner, text, value):
    """mlx-lm PR #1910: without a type "123" became a number, which a server that wants a text refuses."""
    schema = ToolSchema("f", "", {"properties": {"a": inner, "b": {"type": "string"}}})
    [call] = XmlCodec.parse_calls(block("f", a=text), {"f": schema})
    assert json.loads(call.argument) == {"a": value}, call


# ---- vLLM's own parser as an oracle

PROPERTIES = {
    "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
    "a": {"type": "array"}, "o": {"type": "object"}, "any": {}, "e": {"enum": ["1", "x"]},
    "d": {"description": "without a type"},
    "m": {"type": ["string", "null"]}, "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
}  # fmt: skip
TEXTS = [
    "", "a", "1", "-2", "1.5", "2.0", "1e3", "true", "False", "null", "None", "[1]", '{"k": [null]}', '"q"', " 1 ",
    "\n", "a\nb", "\n\na\n\n", "<b>&amp;</b>", "</think>", "</tool>", "é", "1e999", "[1", "print('x')  ", "<parameter>",
]  # fmt: skip
WHOLE = [PYTHON, SUM, block("f"), block("é", z="<x>")]
DALLAS = block("w", city="Dallas", state="TX", unit="fahrenheit")
"""Below it is broken as in the tests of vLLM's parser (tests/tool_parsers/test_qwen3coder_tool_parser.py)."""
BROKEN = [
    DALLAS.replace("</parameter>\n", "", 1),
    DALLAS.replace("</parameter>\n", ""),
    DALLAS.replace("<tool_call>\n", ""),
    DALLAS.replace("<tool_call>\n", "").replace("</tool_call>", ""),
    DALLAS.replace("<function=w>", "<function=w"),
    DALLAS.replace("<parameter=city>", "<parameter=city"),
    DALLAS.replace("<parameter=city>", "<parameter>"),
    DALLAS.replace("</function>\n", ""),
    DALLAS.replace("Dallas", "<parameter=x>"),
    DALLAS.replace("Dallas", "a</function>b"),
    DALLAS.replace("TX", "T</tool_call>X"),
    block("python", code="s = '<parameter=a>'\nprint(s)"),
    "<tool_call></tool_call>", "<tool_call>x</tool_call>", '<tool_call>{"name": "f"}</tool_call>',
    "<tool_call><function=f></tool_call>", "<tool_call><function=f><parameter=z>1</function></tool_call>",
    "<tool_call><function=f>x</function></tool_call>", "<function=f><parameter=z>1</parameter></function>",
]  # fmt: skip


@pytest.fixture(scope="module")
def their_calls():
    pytest.importorskip("vllm")
    from helpers.families import blocks_tokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.parser.engine.adapters import make_adapters
    from vllm.parser.qwen3 import Qwen3Parser  # of qwen3_coder; by that name it wants a parser of Mistral's

    tokenizer = blocks_tokenizer("qwen3_5")
    function = {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}
    tools = [ChatCompletionToolsParam(type="function", function=function)]
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "q"}], model="m", tools=tools)

    def calls(text: str) -> list[tuple[str, dict]]:
        parser = make_adapters(Qwen3Parser)[1](tokenizer, tools)
        found = parser.extract_tool_calls(text, request).tool_calls
        return [(call.function.name, json.loads(call.function.arguments)) for call in found]

    return calls


@pytest.mark.slow
def test_vllms_own_parser_gives_values_the_same_types(their_calls):
    """But None is what the templates write for null, and what is of none of an argument's types is an error here."""
    schema = ToolSchema("f", "", {"type": "object", "properties": PROPERTIES})
    others = {("m", "None"): None, ("u", "2.0"): 2.0, ("u", "1e3"): 1000.0}
    num_same = num_errors = 0
    for name in PROPERTIES:
        for text in TEXTS:
            [(_, theirs)] = their_calls(block("f", **{name: text}))
            [call] = XmlCodec.parse_calls(block("f", **{name: text}), {"f": schema})
            if call.error_kind:
                assert check_arguments(schema, theirs) or (name, text.strip()) == ("b", "1"), (name, text, theirs)
                num_errors += 1
            else:
                assert json.loads(call.argument)[name] == others.get((name, text), theirs[name]), (name, text, theirs)
                num_same += 1
    assert num_same > 100 and num_errors > 60


@pytest.mark.slow
def test_vllms_own_parser_finds_the_same_calls(their_calls):
    """It also takes functions outside of blocks, and what is left of broken ones; here the model reads an error."""
    around = ("{}", "I call.\n\n{}", "{}\n", "\n\n{}", "{} Then I go on.")
    whole = [one.replace("{}", text) for text in WHOLE for one in around] + [f"{a}\n{b}" for a in WHOLE for b in WHOLE]
    whole.append(f"{SUM}\n{block('f', z='1', closed=False)}")
    broken = [one.replace("{}", text) for text in BROKEN for one in around]
    broken += [f"{a}\n{b}" for one in BROKEN for text in WHOLE for a, b in ((one, text), (text, one))]
    num_calls = 0
    for text in [*whole, *broken]:
        theirs = their_calls(text)
        schemas = {name: ToolSchema(name, "", {"additionalProperties": True}) for name, _ in theirs}
        calls = XmlCodec.parse_calls(text, schemas)
        ours = [(call.tag, json.loads(call.argument)) for call in calls if not call.error_kind]
        assert ours == theirs or (text in broken and all(call in theirs for call in ours)), (text, theirs)
        num_calls += len(ours)
    assert num_calls > 50
