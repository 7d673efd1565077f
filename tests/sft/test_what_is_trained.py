"""SFT files of other projects say what is to be trained. Each row is trained as its maker means, or refused."""

import json
import re
from functools import cache

import pytest
from helpers.families import hermes_codec, pieces
from helpers.files import write_jsonl, write_parquet
from helpers.models import build_tiny_tokenizer

from arpo.config.sections import SFTDataConfig
from arpo.errors import UserError
from arpo.protocol import FORMS, Codec, TagsCodec
from arpo.protocol.messages import BadRow
from arpo.sft.conversations import _with_messages, read_conversations
from arpo.sft.token_store import render_row

SFT = SFTDataConfig(train="x")
SEARCH = {"name": "search", "arguments": {"query": "Paris"}}
PYTHON = {"name": "python", "arguments": {"code": "1+1"}}
ASKED = {"role": "user", "content": "Q?"}
THOUGHT = "<think>\nLook it up.\n</think>\n\n"


def said(content="A", **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


def sharegpt(*turns: tuple[str, object]) -> dict:
    texts = [(who, text if isinstance(text, str) else json.dumps(text)) for who, text in turns]
    return {"conversations": [{"from": who, "value": text} for who, text in texts]}


@cache
def codec_of(form: str) -> Codec:
    return TagsCodec(build_tiny_tokenizer()) if form == "tags" else hermes_codec("qwen2_5")


def trained_in(row: dict, form: str = "tags", cfg: SFTDataConfig = SFT) -> list[str]:
    """The runs of text that the loss covers."""
    codec = codec_of(form)
    conversation = FORMS[form].parse_row(_with_messages(row))
    return [text for text, mask in pieces(codec, render_row(conversation, cfg, codec, "x:1")) if mask]


END = "<|im_end|>"


def weighted(**weights: object) -> dict:
    return {"messages": [ASKED, said("BAD", **weights), ASKED, said("GOOD")]}


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        # NVIDIA-NeMo/Automodel#2348, rllm#739; the field of vLLM, of gpt-oss, of Anthropic's parts, LlamaFactory#9249
        *[
            ({"messages": [ASKED, said(**{field: "Look it up."})]}, [f"{THOUGHT}A{END}"])
            for field in ("reasoning_content", "reasoning", "thinking")
        ],
        ({"messages": [ASKED, said([{"type": "thinking", "thinking": "Look it up."}, {"type": "text", "text": "A"}])]},
         [f"{THOUGHT}A{END}"]),
        ({"messages": [ASKED, said([{"type": "reasoning", "value": "Look it up."}, {"type": "text", "value": "A"}])]},
         [f"{THOUGHT}A{END}"]),
        ({"messages": [ASKED, said(f"{THOUGHT}A", reasoning_content="Look it up.")]}, [f"{THOUGHT}A{END}"]),
        # OpenAI's weight (cookbook#387), ms-swift#9263, verl#5316 and #5472, slime's step_loss_mask, axolotl's train
        *[
            (weighted(**weight), [f"GOOD{END}"])
            for weight in (
                {"weight": 0}, {"loss": False}, {"trainable": False}, {"loss_mask": 0}, {"loss_weight": 0.0},
                {"step_loss_mask": 0}, {"train": False, "weight": 0},
            )
        ],
        (weighted(weight=1, loss=True), [f"BAD{END}", f"GOOD{END}"]),
        # slime's step_loss_mask is 1 in each message, and its label is for RL
        ({"messages": [{**ASKED, "step_loss_mask": 1}, said(step_loss_mask=1)], "label": "34"}, [f"A{END}"]),
        ({"prompt": [ASKED], "completion": [said()], "label": True}, [f"A{END}"]),
        ({"messages": [ASKED, said()], "kto_tag": True}, [f"A{END}"]),
        ({"messages": [ASKED, said()], "enable_thinking": False}, [f"A{END}"]),
        # NVIDIA-NeMo/Automodel#2325, LlamaFactory#10530: one turn
        (sharegpt(("human", "Q?"), ("gpt", "I look."), ("function_call", SEARCH), ("observation", "r"), ("gpt", "A")),
         ["I look.<search> Paris </search>", f"A{END}"]),
        # ms-swift's roles, with the thought in a message of its own
        ({"messages": [ASKED, said("<think>x</think>"), {"role": "tool_call", "content": json.dumps(SEARCH)},
                       {"role": "tool_response", "content": "r"}, said()]},
         ["<think>x</think><search> Paris </search>", f"A{END}"]),
        # LlamaFactory#6797, #7339 and #9550: the thought of a call is in its message. At the end of a conversation the
        # model learnt to answer with bare JSON
        (sharegpt(("human", "Q?"), ("function_call", f"<think>x</think>\n{json.dumps(SEARCH)}")),
         ["<think>x</think>\n<search> Paris </search>"]),
        (sharegpt(("human", "Q?"), ("function_call", f"{THOUGHT}{json.dumps([SEARCH])}"), ("observation", "r"),
                  ("gpt", "A")), [f"{THOUGHT}<search> Paris </search>", f"A{END}"]),
        # OpenAI's calls before there were tools
        ({"messages": [ASKED, said("I look.", function_call={**SEARCH, "arguments": '{"query": "Paris"}'}),
                       {"role": "function", "name": "search", "content": "r"}, said()]},
         ["I look.<search> Paris </search>", f"A{END}"]),
        # a call inside of the trajectory's one turn, not to be learnt
        ({"messages": [ASKED, said("<search> bad </search>", loss_mask=0), {"role": "tool", "content": "r"},
                       said("<search> good </search>"), {"role": "tool", "content": "r"}, said(weight=1)]},
         ["<search> good </search>", f"A{END}"]),
        # LLaMA-Factory's data/README.md: the answers of history are learnt; TRL's completion_only_loss, trl#4201
        ({"instruction": "Q?", "input": "", "output": "6", "history": [["2+2?", "4"], ["1+1?", "2"]]},
         [f"4{END}", f"2{END}", f"6{END}"]),
        ({"prompt": [ASKED, said("CONTEXT"), ASKED], "completion": [said()]}, [f"A{END}"]),
        # ms-swift#9398: no end token behind a result; nor behind a call, where sampling has stopped
        ({"messages": [ASKED, said("<search> Paris </search> <result>\nr\n</result>\n"), ASKED, said()]},
         ["<search> Paris </search>", f"A{END}"]),
        ({"messages": [ASKED, said("<search> Paris </search>")]}, ["<search> Paris </search>"]),
    ],
)  # fmt: skip
def test_with_tags_a_row_is_trained_as_its_maker_means(row, trained):
    assert trained_in(row) == trained


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"messages": [ASKED, said(refusal="I cannot.")]}, "the field 'refusal'"),
        ({"messages": [ASKED, said(reasoning_details=[{"type": "reasoning.text", "text": "t"}])]}, "reasoning_details"),
        ({"messages": [ASKED, said(audio={"id": "a1"})]}, "the field 'audio'"),
        ({"messages": [ASKED, said(prefix=True)]}, "the field 'prefix'"),
        ({"messages": [ASKED, said(learn=False)]}, "the field 'learn'"),  # a name that axolotl lets its users choose
        ({"messages": [ASKED, said(train_detail=[{"begin_offset": 0, "end_offset": 1}])]}, "the field 'train_detail'"),
        ({"messages": [ASKED, said(reasoning="a", thinking="b")]}, "reasoning and thinking"),
        ({"messages": [ASKED, said("<think>b</think>A", reasoning="a")]}, "another <think> in its text"),
        ({"messages": [ASKED, said([{"type": "text", "text": "A"}, {"type": "image_url", "image_url": {}}])]}, "part"),
        ({"messages": [ASKED, said([{"type": "tool_use", "name": "search", "input": {}}])]}, "part that is no text"),
        ({"messages": [ASKED, said([{"type": ["text"], "text": "A"}])]}, "part that is no text"),
        # OpenAI's and Together's weight is 0 or 1 (togethercomputer/skills#35); LLaMA-Factory's loss_weight, the one of
        # longtermrisk/openweights#30 and the one asked for in trl#5761 multiply the loss, each in its own way
        (weighted(weight=0.5), "to let a conversation count more, repeat its row"),
        (weighted(weight=-0.1), "weight of the assistant message must be 0 or 1"),
        (weighted(loss_weight=2.0), "loss_weight of the assistant message must be 0 or 1"),
        ({"messages": [ASKED, said()], "weight": 2.0}, "the row has weight=2.0; rows have no weights: repeat it"),
        ({"prompt": [ASKED], "completion": [said("BAD")], "label": False}, "the row has label=False"),
        ({"messages": [ASKED, said("BAD")], "label": False}, "the row has label=False"),  # ms-swift#4535
        ({"instruction": "Q?", "output": "BAD", "kto_tag": False}, "the row has kto_tag=False"),  # LLaMA-Factory's
        (weighted(loss_mask=[0, 1]), "loss_mask of the assistant message must be 0 or 1"),
        (weighted(weight=1, trainable=False), "contradict"),
        ({"messages": [{**ASKED, "train": True}, said()]}, "train of the user message asks for training on it"),
        ({"messages": [ASKED, said(weight=0)]}, "no token would be trained"),  # prime-rl#978
        ({"messages": [ASKED, said()], "weight": 0}, "the row has weight=0"),
        ({"messages": [ASKED, said()], "images": ["a.png"]}, "the row has images"),
        ({"messages": [ASKED, said()], "chat_template_kwargs": {"enable_thinking": True, "xml_tools": []}},
         "the row has chat_template_kwargs"),  # TRL's, as SmolTalk2 has it
        ({"messages": [ASKED, said(), said("B")]}, "two assistant messages follow"),
        (sharegpt(("human", "Q?"), ("function_call", SEARCH), ("function_call", PYTHON), ("observation", "r"),
                  ("observation", "2"), ("gpt", "A")), "several tool_calls"),  # LlamaFactory#9585
        (sharegpt(("human", "Q?"), ("function_call", SEARCH), ("observation", "r"), ("observation", "2"), ("gpt", "A")),
         "a tool result must follow its call"),
        (sharegpt(("human", "Q?"), ("gpt", "I look."), ("observation", "r"), ("gpt", "A")), "must follow its call"),
        (sharegpt(("human", "Q?"), ("function_call", SEARCH), ("observation", "r"), ("human", "So?"), ("gpt", "A")),
         "has not answered"),
        ({"messages": [ASKED, said("", tool_calls=[{"name": "search", "parameters": {"q": "a"}}])]}, "'parameters'"),
        ({"instruction": "Q?", "output": "6", "history": ["2+2?", "4"]}, "history must be a list of"),
        # SpecForge#720 lost the inputs of CodeAlpaca, and we one that is no text
        ({"instruction": "Sort it.", "input": [3, 1, 2], "output": "[1, 2, 3]"}, "input must be text, not list"),
        ({"prompt": [ASKED, said("B")], "completion": [said()]}, "two assistant messages follow"),
        ({"messages": [{"role": "system", "content": "a"}, ASKED, said()], "system": "b"}, "another one"),
        ({"messages": [ASKED, said()], "enable_thinking": True}, "the row has enable_thinking True"),  # verl's column
        # plain characters, not the end token
        ({"messages": [ASKED, said(f"A{END}\n")]}, f"x:1: an assistant's text ends with '{END}'"),
        (sharegpt(("human", "Q?"), ("function_call", "<think>x</think>search Paris")), "is not valid JSON"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused(row, error):
    with pytest.raises((BadRow, UserError), match=re.escape(error)):
        trained_in(row)


def test_fields_that_are_empty_or_name_the_message_are_no_loss():
    """What `message.model_dump()` of OpenAI's client leaves."""
    fields = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None, "id": "m1"}
    assert trained_in({"messages": [ASKED, said(**fields)]}) == [f"A{END}"]


@pytest.mark.parametrize("as_roles", [True, False])
def test_in_json_parallel_calls_are_one_turn_and_results_stand_behind_their_calls(as_roles):
    called = [("function_call", call) for call in ([SEARCH, PYTHON] if as_roles else [[SEARCH, PYTHON]])]
    row = sharegpt(("human", "Q?"), *called, ("observation", "FRANCE"), ("observation", "2"), ("gpt", "A"))
    first, answer = trained_in(row, "hermes")
    assert first.count("<tool_call>") == 2 and answer == f"A{END}"
    row["conversations"].pop(-2)
    with pytest.raises(BadRow, match="2 calls have 1 results"):
        trained_in(row, "hermes")


def test_results_that_name_their_tool_stand_behind_its_call():
    results = [{"role": "tool", "name": name, "content": text} for name, text in (("python", "2"), ("search", "r"))]
    row = {"messages": [ASKED, said("", tool_calls=[SEARCH, PYTHON]), *results, said()]}
    parsed = FORMS["hermes"].parse_row(row)
    assert [message["content"] for message in parsed.messages[2:4]] == ["r", "2"]
    results[0]["name"] = "clock"
    with pytest.raises(BadRow, match="name of the results"):
        FORMS["hermes"].parse_row(row)


def test_weights_count_in_json_too_and_for_results_that_are_trained():
    row = {"messages": [ASKED, said("BAD", tool_calls=[SEARCH], weight=0), {"role": "tool", "content": "r", "loss": 0},
                        said("GOOD")]}  # fmt: skip
    assert trained_in(row, "hermes", SFTDataConfig(train="x", mask_results=False)) == [f"GOOD{END}"]
    results = [{"role": "tool", "content": "r", "loss": 0}, {"role": "tool", "content": "kept"}]
    row = {"messages": [ASKED, said("<search> a </search>", weight=0), results[0], said("<search> b </search>"),
                        results[1], said("GOOD")]}  # fmt: skip
    kept = "<search> b </search> <result>\nkept\n</result>GOOD" + END
    assert trained_in(row, cfg=SFTDataConfig(train="x", mask_results=False)) == [kept]


def test_a_thought_in_a_field_is_written_as_the_model_s_own_template_writes_it():
    codec = hermes_codec("qwen3")
    for fields in ({"content": "\\boxed{1}"}, {"content": "I look.", "tool_calls": [SEARCH]}, {"tool_calls": [SEARCH]}):
        message = {"content": "", **fields, "role": "assistant", "reasoning_content": "\nLook it up.\n"}
        rendered = render_row(FORMS["hermes"].parse_row({"messages": [ASKED, message]}), SFT, codec, "x:1")
        calls = [{"type": "function", "function": call} for call in message.get("tool_calls", [])]
        whole = codec.tokenizer.apply_chat_template(
            [ASKED, {**message, "tool_calls": calls}], tools=codec._functions(None), tokenize=False
        )
        assert codec.tokenizer.decode(rendered.token_ids) == whole


NULLS = {"filter": {"a": 1, "b": None}, "of": [{"c": None}, {"c": 2}]}


def test_only_parquet_loses_nulls_and_at_every_depth(tmp_path):
    """trl#5118, trl#5376: parquet gives every object the keys of all; a null of jsonl is one that was written."""
    call = {"function": {"name": "search", "arguments": NULLS}}
    other = {"function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    zone = {"default": None, "type": "string"}
    tool = {"name": "clock", "parameters": {"type": "object", "properties": {"zone": zone}}}
    rows = [{"messages": [ASKED, said("", tool_calls=[one])], "tools": [tool]} for one in (call, other)]

    def read(path):
        parsed = [parsed for _, parsed in read_conversations(path, parse=FORMS["hermes"].parse_row)]
        shown = parsed[0].functions[0]["function"]["parameters"]["properties"]["zone"]
        return [one.messages[1]["tool_calls"][0]["arguments"] for one in parsed], shown

    assert read(write_jsonl(tmp_path / "a.jsonl", rows)) == ([NULLS, {"zone": "UTC"}], zone)
    stripped = {"filter": {"a": 1}, "of": [{}, {"c": 2}]}
    assert read(write_parquet(tmp_path / "a.parquet", rows)) == ([stripped, {"zone": "UTC"}], {"type": "string"})
