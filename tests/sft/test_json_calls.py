"""SFT conversations with calls in JSON, of every style that publishes them, down to tokens on disk."""

import json
import re

import pytest
from helpers.families import dialogue, hermes_codec, llama_codec, pieces
from helpers.files import write_jsonl, write_parquet
from helpers.ranks import run_ranks

from arpo.config.sections import SFTDataConfig
from arpo.data import BadRow
from arpo.errors import UserError
from arpo.protocol import FORMS
from arpo.protocol.messages import Conversation
from arpo.sft.conversations import read_conversations
from arpo.sft.token_store import ConversationRows, render_row, tokenise
from extras.llama import LLAMA

parse_conversation, parse_for_llama = FORMS["hermes"].parse_row, LLAMA.parse_row
SFT = SFTDataConfig(train="x")
CODE = {"name": "python", "arguments": {"code": "1+1"}}
QUERY = {"name": "search", "arguments": {"query": "who"}}
CLOCK = {"name": "clock", "description": "Tells the time.", "parameters": {"type": "object", "properties": {}}}
MESSAGES = [
    *dialogue("u:q"),
    {"role": "assistant", "content": "I look.", "tool_calls": [CODE, QUERY]},
    {"role": "tool", "name": "python", "content": "2"},
    {"role": "tool", "name": "search", "content": "found"},
    *dialogue("a:\\boxed{2}"),
]


def text_of(*calls: dict) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def openai_row(numbers: str, *, as_text: bool = True) -> dict:
    """Both calls as OpenAI's client writes them, and their results by the numbers of the calls."""
    calls, texts = [], {"0": "2", "1": "found"}
    for number, call in enumerate((CODE, QUERY)):
        arguments = json.dumps(call["arguments"]) if as_text else call["arguments"]
        calls.append({"id": str(number), "type": "function", "function": call | {"arguments": arguments}})
    results = [{"role": "tool", "tool_call_id": number, "content": texts[number]} for number in numbers]
    called = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    return {"messages": [*dialogue("u:q"), called, *results, *dialogue("a:\\boxed{2}")]}


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("numbers", ["01", "10"])
def test_openais_messages_keep_their_calls_and_results_come_in_the_order_of_the_calls(numbers, as_text):
    row = openai_row(numbers, as_text=as_text)
    assert parse_conversation(row) == Conversation(MESSAGES, None)
    row["messages"][1]["content"] = None
    assert parse_conversation(row).messages[1]["content"] == ""


@pytest.mark.parametrize("arrived", ["BA", "AB", "CAB", "BCA"])
def test_results_come_in_the_order_of_their_calls_also_if_all_have_one_name(arrived):
    """The case of modelscope/ms-swift#10174 (A is 10, B is 20), and a third call; also JustVugg/colibri#118."""
    values = {"A": "10", "B": "20", "C": "30"}
    calls = [
        {"id": letter, "function": {"name": "lookup_value", "arguments": f'{{"key": "{letter}"}}'}}
        for letter in sorted(arrived)
    ]
    results = [{"role": "tool", "tool_call_id": letter, "content": values[letter]} for letter in arrived]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    parsed = parse_conversation({"messages": [*dialogue("u:q"), called, *results, *dialogue("a:x")]})
    assert [m["content"] for m in parsed.messages if m["role"] == "tool"] == ["10", "20", "30"][: len(arrived)]


def test_two_results_of_one_call_are_refused():
    with pytest.raises(BadRow, match="each call has one result"):
        parse_conversation(openai_row("00"))


def test_calls_in_the_text_stay_and_wrapped_results_come_apart():
    wrapped = "<tool_response>\n2\n</tool_response>\n<tool_response>\nfound\n</tool_response>\n"
    said = "I look.\n" + text_of(CODE, QUERY)
    turns = [("human", "q"), ("gpt", said), ("tool", wrapped), ("gpt", "\\boxed{2}")]
    parsed = parse_conversation({"conversations": [{"from": who, "value": text} for who, text in turns]})
    assert parsed.messages == [MESSAGES[0], {"role": "assistant", "content": said}, *MESSAGES[2:]]


def test_llama_factorys_roles_have_one_or_several_calls():
    turns = [
        ("human", "q"),
        ("function_call", json.dumps([CODE, QUERY])),
        ("observation", "2"),
        ("observation", "found"),
    ]
    rows = [{"from": who, "value": text} for who, text in [*turns, ("gpt", "\\boxed{2}")]]
    parsed = parse_conversation({"conversations": rows, "tools": json.dumps([CLOCK])})
    assert parsed.messages == [MESSAGES[0], {**MESSAGES[1], "content": ""}, *MESSAGES[2:]]
    assert parsed.functions == [{"type": "function", "function": CLOCK}]


@pytest.mark.parametrize(
    ("tools", "functions"),
    [
        (None, None), (["python"], ["python"]), ('["python"]', ["python"]), ([], []), ("[]", []), ("", []),
        ("python, search", ["python", "search"]),  # as in files of questions
        ([json.dumps(CLOCK)], [{"type": "function", "function": CLOCK}]),
        ([{"type": "function", "function": CLOCK}], [{"type": "function", "function": CLOCK}]),
        ([CLOCK | {"strict": None}], [{"type": "function", "function": CLOCK | {"strict": None}}]),
    ],
)  # fmt: skip
def test_a_row_may_bring_its_functions_in_every_form(tools, functions):
    """Under each name: OpenAI's two, and that of prime-rl PR 2494."""
    for name in ("tools", "functions", "tool_defs"):
        assert parse_conversation({"messages": dialogue("u:q", "a:1"), name: tools}).functions == functions


@pytest.mark.parametrize(
    ("messages", "tools", "error"),
    [
        ([{"role": "assistant", "tool_calls": {"name": "f"}}], None, "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"arguments": {}}]}], None, "must be an object with 'name'"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], None, "of 'f' are not valid JSON"),
        ([{"role": "function_call", "content": "{"}], None, "function_call is not valid JSON"),
        (dialogue("a: "), None, "an assistant message is empty"),
        (dialogue("a:1"), [{"description": ""}], "an entry of tools has no name"),
        (dialogue("a:1"), [{"function": "search"}], "an entry of tools has no name"),
        (dialogue("a:1"), [{"function": None, "name": "search"}], "an entry of tools has no name"),
        # NVIDIA-NeMo/Automodel PR 2324: the loaded tools stood in the place of functions that could not be read
        (dialogue("a:1"), str([CLOCK]), "tools are not valid JSON"),
        (dialogue("a:1"), '[{"name": "f"', "tools are not valid JSON"),
        (dialogue("a:1"), ['{"name": "f"'], "an entry of tools is not valid JSON"),
        (dialogue("a:1"), CLOCK, "tools must be a list of functions, or of names of loaded tools, not dict"),
        (dialogue("a:1"), json.dumps(CLOCK), "tools must be a list of functions"),
        (dialogue("a:1"), ["python", CLOCK], "an entry of tools is not valid JSON"),
        (dialogue("a:1"), [{"name": "f", "input_schema": {}}], "the tool 'f' has 'input_schema'; call it 'parameters'"),
        (dialogue("a:1"), [{"name": "f", "inputSchema": {}}], "the tool 'f' has 'inputSchema'"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(messages, tools, error):
    with pytest.raises(BadRow, match=re.escape(error)):
        parse_conversation({"messages": [*dialogue("u:q"), *messages], "tools": tools})


def test_for_llama_blocks_become_fields_and_json_that_is_a_turn_stays():
    said = "<think>I look. <tool_call>no</tool_call></think>"
    turns = [*dialogue("u:q", f"a:{said}\n{text_of(QUERY)}", "t:found"), *dialogue("a:\\boxed{2}")]
    messages, functions = parse_for_llama({"messages": turns, "tools": [CLOCK]})
    assert messages[1] == {"role": "assistant", "content": said, "tool_calls": [QUERY]}
    assert functions == [{"type": "function", "function": CLOCK}]
    whole = '{"name": "search", "parameters": {"query": "who"}}'
    [_, called, *_] = parse_for_llama({"messages": [turns[0], *dialogue(f"a:{whole}"), *turns[2:]]}).messages
    assert called == {"role": "assistant", "content": whole}
    codec = llama_codec()
    rows = [
        render_row(
            parse_for_llama({"messages": [turns[0], {"role": "assistant", **said}, *turns[2:]]}), SFT, codec, "x:1"
        )
        for said in ({"content": text_of(QUERY)}, {"content": whole}, {"content": "", "tool_calls": [QUERY]})
    ]
    assert rows[0] == rows[1] == rows[2] and whole in codec.tokenizer.decode(rows[0].token_ids)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("<tool_call>{</tool_call>", "the text of a <tool_call> is not valid JSON"),
        ("<tool_call>[]</tool_call>", "a function call must be an object"),
        (text_of(CODE, QUERY), "x:1: only one call in a turn"),
        (f"I look. {text_of(CODE)}", "x:1: a message has a call and a text"),
    ],
)
def test_what_llamas_form_has_not_is_refused_in_one_line(said, error):
    results = ["t:x"] * said.count("</tool_call>")
    row = {"messages": dialogue("u:q", f"a:{said}", *results, "a:\\boxed{2}")}
    with pytest.raises((BadRow, UserError), match=re.escape(error)):
        render_row(parse_for_llama(row), SFT, llama_codec(), "x:1")


def test_parquet_gives_calls_the_arguments_of_others_as_nothing(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "q", "tool_calls": None},
                          {"role": "assistant", "content": "", "tool_calls": [CODE, QUERY]}]}]  # fmt: skip
    [(_, parsed)] = read_conversations(write_parquet(tmp_path / "x.parquet", rows), parse=parse_conversation)
    assert parsed.messages[1]["tool_calls"] == [CODE, QUERY]


def test_system_messages_that_list_tools_get_no_second_list_and_those_of_tags_are_refused():
    codec = hermes_codec("qwen2_5")

    def listed(system: str, functions=None) -> int:
        row = codec.render_conversation([*dialogue(f"s:{system}", "u:q", "a:1")], functions=functions)
        return codec.tokenizer.decode(row.token_ids).count("<tools>")

    assert (listed("be brief"), listed("Use <tools>[]</tools>.")) == (2, 1)  # Qwen's own text has the word twice
    # the rows of NousResearch/hermes-function-calling-v1 have their functions in both places
    own = [{"type": "function", "function": CLOCK}]
    assert (listed(f"Use <tools>{json.dumps(own)}</tools>.", own), listed("Use <tools>[]</tools>.", own)) == (1, 3)
    with pytest.raises(ValueError, match=r"speaks of <search>.*data\.system_prompt=default"):
        listed("Write <search> query </search>.")
    with pytest.raises(UserError, match=r"speaks of <python>.*eval\.system_prompt"):
        codec.render_prompt(dialogue("s:Write <python> code </python>.", "u:q"))


def test_a_row_is_rendered_with_its_own_functions_and_the_systems_prompt_of_the_options():
    codec, cfg = hermes_codec("qwen2_5"), SFTDataConfig(train="x", system_prompt="Be brief.")
    row = render_row(Conversation(MESSAGES, [{"type": "function", "function": CLOCK}]), cfg, codec, "x:1")
    text = codec.tokenizer.decode(row.token_ids)
    assert "system\nBe brief.\n\n# Tools" in text and '"clock"' in text and '"description": "The python' not in text
    text = codec.tokenizer.decode(render_row(Conversation(MESSAGES, ["search"]), cfg, codec, "x:1").token_ids)
    assert '"name": "search"' in text and '"description": "The python' not in text
    with pytest.raises(UserError, match=r"x:1: the row offers the tool 'clock', and data\.tools has python,"):
        render_row(Conversation(MESSAGES, ["clock"]), cfg, codec, "x:1")
    with pytest.raises(UserError, match=r"x:1: .*speaks of <python>"):
        render_row(Conversation(MESSAGES, None), SFTDataConfig(train="x", system_prompt="<python>"), codec, "x:1")


@pytest.mark.slow
def test_the_rows_on_disk_are_the_rendered_ones_and_are_made_again_for_another_protocol(tmp_path):
    path = write_jsonl(tmp_path / "sft.jsonl", [{"messages": MESSAGES}, {"messages": MESSAGES, "tools": [CLOCK]}])
    run_ranks(1, _tokenise, path, tmp_path / "rows")
    rows, codec = ConversationRows(tmp_path / "rows"), hermes_codec("qwen2_5")
    own = [{"type": "function", "function": CLOCK}]
    for row, functions in zip(rows, (None, own), strict=True):
        rendered = codec.render_conversation(MESSAGES, functions=functions)
        assert [*row.prompt_ids, *row.response_ids] == rendered.token_ids
        assert [0] * len(row.prompt_ids) + row.loss_mask.tolist() == rendered.loss_mask
    assert rows.origin["protocol"] == "hermes" and len(rows.origin["functions"]) == 2
    assert "<tool_call>" in "".join(text for text, mask in pieces(codec, rendered) if mask)


def _tokenise(ranks, path, folder) -> None:
    tokenise(path, SFTDataConfig(train=str(path)), hermes_codec("qwen2_5"), folder=folder, ranks=ranks)
