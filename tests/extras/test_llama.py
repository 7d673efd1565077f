"""Calls in Llama's JSON: which turns are calls, and what the model reads of those that are wrong."""

import json

import pytest

from arpo.protocol.schema import ToolSchema
from extras.llama import A_CALL, LlamaCodec, call_body

ADD = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOLS = {"python": ToolSchema("python", "Runs code.", CODE), "add": ToolSchema("add", "Adds.", ADD)}


def call(name: object, parameters: object, key: str = "parameters") -> str:
    return json.dumps({"name": name, key: parameters})


PYTHON, SUM = call("python", {"code": "print(1)\n"}), call("add", {"b": 2, "a": 1.5})


def calls_of(text: str) -> list[tuple[str, str, str | None]]:
    return [(call.tag, call.argument, call.error_kind) for call in LlamaCodec.parse_calls(text, TOOLS)]


@pytest.mark.parametrize("text", [SUM, f" \n{SUM}\n", f"<think>I add {PYTHON}</think>\n{SUM}", SUM.replace(": ", ":")])
def test_a_turn_that_is_an_object_is_a_call(text):
    assert calls_of(text) == [("add", '{"a": 1.5, "b": 2}', None)]


def test_arguments_may_contain_thoughts():
    code = "print('<think>1</think>')"
    assert calls_of(f"<think>a</think> <think>b</think>{call('python', {'code': code})}") == [("python", code, None)]


def test_a_call_may_say_that_it_is_one():
    assert calls_of('{"type": "function", "name": "python", "parameters": {"code": "1"}}') == [("python", "1", None)]


def test_many_thoughts_are_read_in_no_time():
    """A pattern that repeats per thought would try 2 ** 400 ways to part them."""
    assert LlamaCodec.parse_calls("<think>a</think> " * 400 + "so", TOOLS) == []
    assert calls_of("<think>a</think> " * 400 + PYTHON) == calls_of(PYTHON)


@pytest.mark.parametrize(
    "text", ["", "\\boxed{4}", f"I call {PYTHON}", "{1, 2}", "{", "[]", f"<think>{PYTHON}", f"<think>{PYTHON}</think>4"]
)
def test_any_other_turn_is_an_answer(text):
    assert LlamaCodec.parse_calls(text, TOOLS) == []


@pytest.mark.parametrize(
    ("text", "tag", "kind", "error"),
    [
        ("{'name': 'python'}", "unknown", "bad_json", "not valid JSON (Expecting property name"),
        (f"{PYTHON}; {SUM}", "unknown", "bad_json", "not valid JSON (Extra data). Write " + A_CALL),
        (f"{PYTHON} Now wait.", "unknown", "bad_json", "and nothing else"),
        (PYTHON[:-1], "unknown", "bad_json", "not valid JSON"),
        ('{"a": ' * 200 + "1" + "}" * 200, "unknown", "bad_json", "nested too deep"),
        ('{"answer": 4}', "unknown", "bad_json", "no JSON object with a name and parameters"),
        (call(3, {}), "unknown", "bad_json", "no JSON object with a name and parameters"),
        (call("Python", {}), "unknown", "unknown_tool", 'no tool "Python". There are: python, add.'),
        (call("python", {}), "python", "bad_arguments", 'needs the argument "code"'),
        (call("python", "print(1)"), "python", "bad_arguments", "must be a JSON object"),
        (call("python", {"code": " \n"}), "python", "empty_call", 'the argument "code" of python is empty'),
    ],
)
def test_the_model_reads_what_is_wrong_with_a_call(text, tag, kind, error):
    [found] = LlamaCodec.parse_calls(text, TOOLS)
    assert (found.tag, found.error_kind) == (tag, kind)
    assert found.error.startswith("Error: ") and error in found.error and len(found.error) < 300


OBJECTS = [
    PYTHON, SUM, call("f", {"c": [None, True, "</think>", {"d": "}{"}]}), call("é", {}),
    '{"parameters": {"a": 1}, "name": "f"}', '{"name": "f", "parameters": {"n": 12345678901234567890}}',
    '{"name": "a", "name": "b", "parameters": {}}',
    "{}", '{"name": "f"}', '{"name": "f", "parameters": }', "{'name': 'f', 'parameters': {}}", '{"parameters": {}}',
    '{"name": "f", "parameters": {"code": "a\nb"}}', "[1]", "{1, 2}",
]  # fmt: skip


def turns() -> list[tuple[str, bool]]:
    """(text, whether it is one object alone): each object alone, amid text, and behind another; and each one cut."""
    alone = [(around.replace("|", one), True) for one in OBJECTS for around in ("|", " |\n", "\n\n|")]
    amid = [(around.replace("|", one), False) for one in OBJECTS for around in ("I call |", "| Then I go on.")]
    pairs = [(f"{a}{between}{b}", False) for a in OBJECTS for b in OBJECTS for between in ("; ", "\n")]
    cut = [(SUM[:end], False) for end in range(len(SUM))]
    return [("", False), ("no call", False), ("\\boxed{4}", False), *alone, *amid, *pairs, *cut]


@pytest.mark.slow
def test_vllms_own_parser_finds_the_same_calls():
    """It also finds calls amid text, and several; here a turn is one call alone."""
    pytest.importorskip("vllm")
    from helpers.families import family_tokenizer
    from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser

    parser = Llama3JsonToolParser(family_tokenizer("llama3_1"))
    num_calls = num_stricter = num_none = 0
    for text, is_alone in turns():
        found = parser.extract_tool_calls(text, None)
        theirs = [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]
        schemas = {name: ToolSchema(name, "", {"additionalProperties": True}) for name, _ in theirs}
        ours = LlamaCodec.parse_calls(text, schemas)
        if right := [call for call in ours if not call.error_kind]:
            assert [(call.tag, json.loads(call.argument)) for call in right] == theirs, text
            num_calls += 1
        elif theirs:
            assert not is_alone, text
            assert call_body(text) is None or [call.error_kind for call in ours] == ["bad_json"], text
            num_stricter += 1
        else:
            num_none += 1
    assert num_calls == 3 * 7 and num_stricter > 50 and num_none > 50
