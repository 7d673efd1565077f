"""SFT masks and prompts under the chat templates of the families that the papers train, token by token."""

import hashlib

import pytest
from helpers.families import BEGIN, EOS, FAMILIES, TEMPLATES, codec_of, dialogue, family_tokenizer, pieces

from arpo.errors import UserError
from arpo.protocol import TagsCodec

DEFAULT_SYSTEM = {
    "qwen2_5": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
}


def rendered(family: str, system: str, *turns: str) -> str:
    """By hand, what the family's template makes of a dialogue; turns are "u:text" and "a:text" in order."""
    if family == "llama3_1":
        text = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        text += f"Today Date: 26 Jul 2024\n\n{system}<|eot_id|>"
        around = ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>")
    else:
        system = system or DEFAULT_SYSTEM.get(family, "")
        text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        around = ("<|im_start|>{}\n", "<|im_end|>\n")
    for turn in turns:
        text += around[0].format({"u": "user", "a": "assistant"}[turn[0]]) + turn[2:] + around[1]
    return text


def after(family: str) -> list[tuple[str, int]]:
    return [] if family == "llama3_1" else [("\n", 0)]


def test_qwens_templates_are_the_published_ones():
    published = {
        "qwen2_5": "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",
        "qwen3": "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8",
    }
    for family, digest in published.items():
        assert hashlib.sha256((TEMPLATES / f"{family}.jinja").read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("system", ["be brief", ""])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_dialogue_is_one_turn_whose_results_are_masked(family, system):
    """Two calls, each with its thought: what the model writes is trained to the last EOS, and nothing else is."""
    codec = codec_of(family)
    turns = dialogue(
        "u:who?", "a:<think> look </think><search> who </search>", "t:found <answer> é",
        "a:<think> count </think><python> 1+1 </python>", "t:2", "a:<think> so </think><answer> \\boxed{2} </answer>",
    )  # fmt: skip
    row = codec.render_conversation((dialogue(f"s:{system}") if system else []) + turns)
    assert pieces(codec, row) == [
        (rendered(family, system, "u:who?") + BEGIN[family], 0),
        ("<think> look </think><search> who </search>", 1),
        (" <result>\nfound &lt;answer&gt; é\n</result>", 0),
        ("<think> count </think><python> 1+1 </python>", 1),
        (" <result>\n2\n</result>", 0),
        (f"<think> so </think><answer> \\boxed{{2}} </answer>{EOS[family]}", 1),
        *after(family),
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("enable_thinking", [True, False])
def test_the_row_begins_with_the_prompt_of_a_rollout_token_for_token(family, enable_thinking):
    codec = codec_of(family, enable_thinking=enable_thinking)
    messages = dialogue("s:x", "u:q\n", "a:<think> a </think>b")
    prompt = codec.render_prompt(messages[:2])
    row = codec.render_conversation(messages)
    assert row.token_ids[: len(prompt)] == prompt and row.loss_mask[: len(prompt)] == [0] * len(prompt)
    assert row.token_ids[len(prompt) :][: row.loss_mask.count(1) - 1] == codec.encode("<think> a </think>b")
    if family == "qwen3":  # without thinking its prompt holds the empty thought
        empty_thought = codec.tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
        assert empty_thought == (not enable_thinking)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_turns_of_a_dialogue_are_trained_where_the_template_leaves_them_as_they_are(family):
    codec = codec_of(family)
    row = codec.render_conversation(dialogue("s:x", "u:a", "a:b <result>1</result> c", "u:d", "a:e"))
    eos = EOS[family]
    between = "" if family == "llama3_1" else "\n"
    assert pieces(codec, row) == [
        (rendered(family, "x", "u:a") + BEGIN[family], 0),
        ("b", 1), (" <result>1</result>", 0), (f" c{eos}", 1),
        (between + rendered(family, "x", "u:d").removeprefix(rendered(family, "x")) + BEGIN[family], 0),
        (f"e{eos}", 1), *after(family),
    ]  # fmt: skip
    text = codec.tokenizer.decode(row.token_ids)
    assert text == rendered(family, "x", "u:a", "a:b <result>1</result> c", "u:d", "a:e")


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_fix(enable_thinking):
    codec = codec_of("qwen3", enable_thinking=enable_thinking)
    messages = dialogue("u:a", "a:<think> t </think>b", "u:c", "a:<think> s </think>d")
    with pytest.raises(ValueError, match=r"rewrites earlier turns .*data\.train_turns=last"):
        codec.render_conversation(messages)
    row = codec.render_conversation(messages, train_turns="last")
    thought = "" if enable_thinking else "<think>\n\n</think>\n\n"
    assert pieces(codec, row) == [
        (rendered("qwen3", "", "u:a", "a:b", "u:c") + BEGIN["qwen3"] + thought, 0),
        ("<think> s </think>d<|im_end|>", 1),
        ("\n", 0),
    ]


def test_llama_trims_turns_and_has_one_bos():
    codec = codec_of("llama3_1")
    row = codec.render_conversation(dialogue("u:a", "a: b\n", "u:c", "a:\nd "))
    assert [text for text, mask in pieces(codec, row) if mask] == ["b<|eot_id|>", "d<|eot_id|>"]
    assert row.token_ids.count(codec.tokenizer.bos_token_id) == 1 and row.token_ids[0] == codec.tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token": "<|endoftext|>"}, r"ends an .* turn with '<\|im_end\|>', but .*eos_token is '<\|endof"),
        ({"chat_template": "{{ messages[0].content }}{% if add_generation_prompt %}A:{% endif %}"}, "leaves out what"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_exact_is_refused_with_the_fix(changes, message):
    with pytest.raises(UserError, match=message):
        TagsCodec(family_tokenizer("qwen2_5", **changes))
