"""Calls in JSON: which texts are calls, and what the model reads of those that are wrong."""

import json

import pytest

from arpo.protocol.hermes import A_CALL, HermesCodec, HermesRules, call_bodies
from arpo.protocol.schema import ToolSchema, arguments_of

parse_calls = HermesCodec.parse_calls

ADD = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOLS = {"python": ToolSchema("python", "Runs code.", CODE), "add": ToolSchema("add", "Adds.", ADD)}


def block(name: object, arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PYTHON, SUM = block("python", {"code": "print(1)\n"}), block("add", {"b": 2, "a": 1.5})


TRICKY = block("python", {"code": "print('<think>')"})


def calls_of(text: str) -> list[tuple[str, str, str | None]]:
    return [(call.tag, call.argument, call.error_kind) for call in parse_calls(text, TOOLS)]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # a tool of one text gets it bare, another gets canonical JSON
        (f"I add. {SUM}{PYTHON}", [("add", '{"a": 1.5, "b": 2}', None), ("python", "print(1)", None)]),
        # whole JSON whose tag is not closed is a call
        (PYTHON.removesuffix("</tool_call>"), [("python", "print(1)", None)]),
        # thoughts contain no calls, but arguments may contain thoughts
        (f"<think>or {SUM}?</think>{TRICKY}{PYTHON}",
         [("python", "print('<think>')", None), ("python", "print(1)", None)]),
        (f"<think>a</think>{SUM}<think>{PYTHON}</think>", [("add", '{"a": 1.5, "b": 2}', None)]),
        (f"<think>never closed {SUM}", []),
        # arguments that are JSON in a text are not encoded twice: Granite 4 writes them
        # (vLLM's test_hermes_parser_non_streaming_serialized_arguments)
        (block("add", '{"a": 1, "b": 2}'), [("add", '{"a": 1, "b": 2}', None)]),
        *((text, []) for text in ("", "It is \\boxed{4}.", "</tool_call>", "<tool_calls>", "<think>x</think>")),
    ],
)  # fmt: skip
def test_these_are_the_calls_of_a_turn(text, calls):
    assert calls_of(text) == calls


@pytest.mark.parametrize(
    ("text", "tag", "kind", "error"),
    [
        ("<tool_call>{'name': 'python'}</tool_call>", "unknown", "bad_json", "not valid JSON (Expecting property name"),
        ("<tool_call></tool_call>", "unknown", "bad_json", "not valid JSON"),
        ("<tool_call>[1]</tool_call>", "unknown", "bad_json", "no JSON object with a name and arguments"),
        (block(3, {}), "unknown", "bad_json", "no JSON object with a name and arguments"),
        ('<tool_call>{"name": "python"}</tool_call>', "unknown", "bad_json", A_CALL),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "unknown", "bad_json", "not valid JSON"),
        (block("add", {}).replace("{}", '{"a": ' + "1" * 5000 + "}"), "unknown", "bad_json", "Exceeds the limit"),
        ('<tool_call>{"name": "python", "arg', "unknown", "unclosed_call", "cut off"),
        (block("Python", {"code": "1"}), "unknown", "unknown_tool", 'no tool "Python". There are: python, add.'),
        (block("\ud800" + "x" * 99, {}), "unknown", "bad_json", "half of a character"),
        (block("python", {}), "python", "bad_arguments", 'needs the argument "code"'),
        (block("python", "print(1)"), "python", "bad_arguments", "must be a JSON object"),
        (block("add", {"a": float("nan"), "b": 1}), "add", "bad_arguments", "must be a number, not NaN"),
        (block("python", {"code": " \n"}), "python", "empty_call", 'the argument "code" of python is empty'),
    ],
)
def test_the_model_reads_what_is_wrong_with_a_call(text, tag, kind, error):
    [call] = parse_calls(text, TOOLS)
    assert (call.tag, call.error_kind) == (tag, kind)
    assert call.error.startswith("Error: ") and error in call.error and len(call.error) < 300
    call.error.encode()  # no half characters


@pytest.mark.parametrize("around", ["[{}]", '{{"a": {}}}'])
@pytest.mark.parametrize("depth", [200, 700, 900, 990, 3000, 20_000])
def test_deep_nesting_is_refused_before_python_gives_up_on_it(around, depth):
    """Each version of Python reads another depth, and forbids what follows at yet another."""
    opening, closing = around.format("|").replace("{{", "{").split("|")
    deep = opening * depth + "1" + closing * depth
    for name, argument in (("python", "code"), ("add", "a")):
        text = f'<tool_call>{{"name": "{name}", "arguments": {{"{argument}": {deep}}}}}</tool_call>'
        [call] = parse_calls(text, TOOLS)
        assert call.error_kind == "bad_json" and "nested too deep" in call.error
    assert "is no JSON (nested too deep)" in arguments_of(TOOLS["add"], f'{{"a": {deep}}}')
    shallow = opening * 40 + "1" + closing * 40
    [call] = parse_calls(f'<tool_call>{{"name": "add", "arguments": {{"a": {shallow}}}}}</tool_call>', TOOLS)
    assert call.error_kind == "bad_arguments"


def test_a_call_has_a_name_where_its_arguments_are_json_in_a_text_and_none_where_they_are_not():
    assert HermesRules.name_of('{"name": "add", "arguments": "{\\"a\\": 1}"}') == "add"
    assert HermesRules.name_of('{"name": "add", "arguments": "hello"}') is None


def test_a_wrong_call_leaves_the_others_as_they_are_and_a_tool_that_is_not_offered_is_unknown():
    kinds = [call.error_kind for call in parse_calls(SUM + "<tool_call>{</tool_call>" + PYTHON, TOOLS)]
    assert kinds == [None, "bad_json", None]
    [call] = parse_calls(SUM, {})
    assert (call.tag, call.error_kind) == ("unknown", "unknown_tool") and "There are: none." in call.error


# ---- vLLM's own parser as an oracle

BODIES = [
    '{"name": "python", "arguments": {"code": "print(1)"}}', '\n{"arguments": {"a": 1, "b": 2}, "name": "add"}\n',
    '{"name": "add", "arguments": {"a": 1, "b": {"c": [null, true, "</think>"]}}}', '{"name": "é", "arguments": {}}',
    "", "{", "{}", "[]", '{"name": "x"}', '{"name": "x", "arguments": }', "{'name': 'x', 'arguments': {}}",
    '{"name": "x", "arguments": {"code": "a\nb"}}', '{"name": "x", "arguments": {"code": "a\\nb"}} {}', "null", "1",
    '{"name": "x", "arguments": {"n": 1e999, "m": 12345678901234567890}}',
    '{"name": "a", "name": "b", "arguments": {}}',
]  # fmt: skip
AROUND = ["{}", "I call. {}", "{} Then I go on.", "{}\n", "\n\n{}"]


def texts() -> list[str]:
    """One block of each kind in each place; each pair of blocks; and each that is cut off behind each character."""
    blocks = [f"<tool_call>{body}</tool_call>" for body in BODIES]
    singles = [around.replace("{}", one) for one in blocks for around in AROUND]
    pairs = [a + "\n" + b for a in blocks for b in blocks]
    cut = [blocks[0] + blocks[1][:end] for end in range(len(blocks[1]))]
    return ["", "no call", "a <tool_call", "</tool_call>", *singles, *pairs, *cut]


def ours(text: str) -> list[tuple[str, object]] | None:
    """(name, arguments) of the blocks; None where one of them is no call."""
    calls = []
    for body, _ in call_bodies(text):
        try:
            call = json.loads(body)
            calls.append((call["name"], call["arguments"]))
        except (ValueError, KeyError, TypeError):
            return None
    return calls


@pytest.mark.slow
def test_vllms_own_parser_finds_the_same_calls():
    pytest.importorskip("vllm")
    from helpers.families import family_tokenizer
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    parser = Hermes2ProToolParser(family_tokenizer("qwen2_5"))
    num_calls = num_wrong = 0
    for text in texts():
        found = parser.extract_tool_calls(text, None)
        theirs = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
        calls = parse_calls(text, {name: ToolSchema(name, "", {"additionalProperties": True}) for name, _ in theirs})
        if found.tools_called:
            assert [json.dumps(call) for call in ours(text)] == [json.dumps(call) for call in theirs], text
            assert [call.tag for call in calls] == [name for name, _ in theirs], text
            wrong = [call.error_kind for call in calls if call.error_kind]
            assert wrong == ["bad_arguments"] * sum("1e999" in body for body, _ in call_bodies(text)), text
        else:
            assert not calls or any(call.error_kind for call in calls), text
        num_calls, num_wrong = num_calls + len(theirs), num_wrong + (not found.tools_called)
    assert num_calls > 100 and num_wrong > 100
