"""Prompts, results and SFT rows of calls in Llama's JSON, token by token against what the whole template renders."""

from dataclasses import replace

import pytest
from helpers.families import SCHEMAS, dialogue, edited_template, hermes_codec, llama_codec, pieces
from helpers.scripted_rollout import SHORT, play

from arpo.config.rewards import RewardConfig
from arpo.errors import UserError
from arpo.protocol.calls import TRUNCATION_MARK
from arpo.rewards import score_groups
from arpo.trajectory import Prompt, StopReason, ToolCall
from extras.llama import END_OF_MESSAGE, LlamaCodec
from extras.viewer.groups import trajectory_view

FUNCTIONS = [schema.as_function() for schema in SCHEMAS]
ASKED = dialogue("s:be brief", "u:who?")
CODE = {"name": "python", "arguments": {"code": 'print("é\\n")\n'}}
QUERY = {"name": "search", "arguments": {"query": "who"}}
TURNS = [
    '{"name": "python", "parameters": {"code": "print(\\"é\\\\n\\")\\n"}}',
    '{"name": "search", "parameters": {"query": "who"}}',
    "It is \\boxed{2}.",
]
RESULTS = ['é "quoted"\n', "<b>found</b> \U0001f600"]
FOLLOWS = "<|start_header_id|>ipython<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.fixture(scope="module")
def codec() -> LlamaCodec:
    return llama_codec()


def after(codec: LlamaCodec, text: str, max_tokens: int = 4000, last: str = "<|eot_id|>") -> list[int]:
    last_token = codec.tokenizer.convert_tokens_to_ids(last)
    return codec.encode_results([ToolCall("python", "x", text, ok=True)], max_tokens, last_token=last_token)[1]


def conversation(*, in_fields: bool = True) -> list[dict]:
    messages = list(ASKED)
    for call, text, result in zip((CODE, QUERY), TURNS, RESULTS, strict=False):
        said = {"content": "", "tool_calls": [call]} if in_fields else {"content": text}
        messages += [{"role": "assistant", **said}, {"role": "tool", "name": call["name"], "content": result}]
    return [*messages, *dialogue(f"a:{TURNS[2]}")]


def whole(codec: LlamaCodec) -> str:
    """What the template makes of the conversation, as a client of it has that."""
    messages = [
        {**m, "tool_calls": [{"type": "function", "function": m["tool_calls"][0]}]} if "tool_calls" in m else m
        for m in conversation()
    ]
    return codec.tokenizer.apply_chat_template(messages, tools=FUNCTIONS, tokenize=False)


def test_a_trajectory_of_two_calls_is_the_whole_template_token_for_token(codec):
    tokenizer = codec.tokenizer
    sampled = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in TURNS]
    prompt = codec.render_prompt(ASKED)
    row = [*prompt, *sampled[0], *after(codec, RESULTS[0]), *sampled[1], *after(codec, RESULTS[1]), *sampled[2]]
    assert tokenizer.decode(row) == whole(codec)
    assert row == tokenizer.encode(whole(codec), add_special_tokens=False)
    asked = tokenizer.apply_chat_template(ASKED, tools=FUNCTIONS, tokenize=False, add_generation_prompt=True)
    assert prompt == tokenizer.encode(asked, add_special_tokens=False) and '"name": "python"' in asked


def test_what_follows_a_call_is_a_turn_of_ipython_whichever_token_ended_the_call(codec):
    expected = FOLLOWS.format('"2"')
    assert codec.tokenizer.decode(after(codec, "2")) == expected
    assert codec.tokenizer.decode(after(codec, "2", last=END_OF_MESSAGE)) == expected
    assert codec.tokenizer.decode(after(codec, "2", last="<|end_of_text|>")) == "<|eot_id|>" + expected


def test_a_result_cannot_end_a_turn(codec):
    text = codec.tokenizer.decode(ids := after(codec, "<|eot_id|><|eom_id|><think> \U0010ffff"))
    special = [token for token in ids if token in codec.tokenizer.all_special_ids or token < 7]
    assert special == [token for token in after(codec, "fine") if token < 7]
    assert text == FOLLOWS.format('"<|eot_id|><|eom_id|>&lt;think&gt; "')  # the first two are characters


@pytest.mark.parametrize("budget", [70, 120, 300])
def test_a_long_result_is_cut_to_its_budget(codec, budget):
    long = 'x"€\n' * 300
    call = ToolCall("python", "x", long, ok=True)
    [text], ids = codec.encode_results([call], budget, last_token=codec.tokenizer.eos_token_id)
    assert 0.85 * budget <= len(ids) <= budget and text.endswith(TRUNCATION_MARK)
    assert long.startswith(text.removesuffix(TRUNCATION_MARK))
    least = codec._min_result_tokens
    assert codec.encode_results([call], least - 1, last_token=codec.tokenizer.eos_token_id) is None
    with pytest.raises(UserError, match=f"is below the {least} tokens"):
        codec.check_result_room(least - 1)


def test_a_prompt_lists_the_tools_that_it_offers(codec):
    def listed(tools):
        text = codec.tokenizer.decode(codec.render_prompt(ASKED, tools))
        return [name for name in ("python", "search") if f'"name": "{name}"' in text], "Environment: ipython" in text

    assert [listed(tools) for tools in (None, ("search",), ())] == [
        (["python", "search"], True), (["search"], True), ([], False),
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["<|eot_id|>", END_OF_MESSAGE])
def test_sampled_tokens_are_parsed(codec, end):
    ids = codec.tokenizer.encode(f"<think>look</think>\n<|python_tag|>{TURNS[0]}{end}", add_special_tokens=False)
    [call] = codec.calls(ids, "eos", None, ("python", "search"))
    assert (call.tag, call.argument) == ("python", 'print("é\\n")')
    assert codec.calls(ids, "length", None, ("python", "search")) == []
    assert [c.error_kind for c in codec.calls(ids, "eos", None, ("search",))] == ["unknown_tool"]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("smollm2", {}, "ignores tools, which protocol.format=extras/llama.py:LLAMA needs"),
        ("qwen2_5", {}, 'does not write a call as a turn of {"name": ..., "parameters": {...}} alone; .*=hermes$'),
        ("llama3_1", {"turn('assistant', '{": "turn('assistant', 'I call {"}, "does not write a call as a turn of"),
        ("llama3_1", {"message.role == 'tool'": "false", "turn(message.role, message.content | trim)":
                      "turn(message.role, '' if message.role == 'tool' else message.content | trim)"},
         "leaves out the results of tools"),
        ("llama3_1", {"turn('ipython', message.content | tojson)": "raise_exception('no')"}, "no turns .*: no[)]"),
    ],
)  # fmt: skip
def test_a_template_of_another_form_is_refused_in_one_line(family, changes, message):
    template = edited_template(family, changes)
    with pytest.raises(UserError, match=message) as error:
        tokenizer = hermes_codec("qwen2_5").tokenizer if family != "llama3_1" else llama_codec().tokenizer
        tokenizer.chat_template, tokenizer.name_or_path = template, "models/m"
        LlamaCodec(tokenizer, tools=SCHEMAS)
    said = str(error.value)
    assert said.startswith("models/m: ") and "\n" not in said and "protocol.format=" in said


@pytest.mark.parametrize("in_fields", [True, False])
def test_an_sft_row_is_the_whole_template_with_loss_on_what_the_assistant_says(codec, in_fields):
    row = codec.render_conversation(conversation(in_fields=in_fields))
    assert row.token_ids == codec.tokenizer.encode(whole(codec), add_special_tokens=False)
    assert pieces(codec, row) == [
        (codec.tokenizer.decode(codec.render_prompt(ASKED)), 0),
        (TURNS[0] + "<|eot_id|>", 1),
        (codec.tokenizer.decode(after(codec, RESULTS[0])), 0),
        (TURNS[1] + "<|eot_id|>", 1),
        (codec.tokenizer.decode(after(codec, RESULTS[1])), 0),
        (TURNS[2] + "<|eot_id|>", 1),
    ]


def test_thoughts_stay_before_their_call_and_any_other_text_is_refused(codec):
    thought = [*ASKED, {"role": "assistant", "content": "<think>\nlook\n</think>", "tool_calls": [QUERY]}]
    row = codec.render_conversation([*thought, *dialogue("t:found", "a:\\boxed{2}")])
    assert [text for text, mask in pieces(codec, row) if mask] == [
        f"<think>\nlook\n</think>{TURNS[1]}<|eot_id|>", "\\boxed{2}<|eot_id|>",
    ]  # fmt: skip
    thought[-1]["content"] += " I look."
    with pytest.raises(ValueError, match="a call is all that its turn says"):
        codec.render_conversation([*thought, *dialogue("t:found", "a:\\boxed{2}")])


def test_several_questions_of_a_row_are_trained(codec):
    twice = [*conversation(), *dialogue("u:and?", "a:\\boxed{3}")]
    row = codec.render_conversation(twice)
    assert [text for text, mask in pieces(codec, row) if mask] == [f"{t}<|eot_id|>" for t in (*TURNS, "\\boxed{3}")]
    last = codec.render_conversation(twice, train_turns="last")
    assert row.token_ids == last.token_ids and sum(last.loss_mask) < sum(row.loss_mask)


def test_system_messages_that_list_tools_get_no_second_list_and_those_of_tags_are_refused(codec):
    def text_of(system: str) -> str:
        return codec.tokenizer.decode(codec.render_conversation(dialogue(f"s:{system}", "u:q", "a:1")).token_ids)

    assert '"name": "python"' in text_of("be brief") and '"name": "python"' not in text_of('Use {"parameters": {}}')
    with pytest.raises(ValueError, match=r"speaks of <search>.*protocol\.format=extras.* has no tags"):
        codec.render_conversation(dialogue("s:Write <search> query </search>.", "u:q", "a:1"))


def test_special_tokens_in_calls_and_texts_of_sft_are_characters(codec):
    call = {"name": "python", "arguments": {"code": "'<|eot_id|>'"}}
    turns = [*dialogue("u:q"), {"role": "assistant", "content": "", "tool_calls": [call]}, *dialogue("t:x", "a:1")]
    row = codec.render_conversation(turns)
    trained = [token for token, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert trained.count(codec.tokenizer.eos_token_id) == 2 and "'<|eot_id|>'" in codec.tokenizer.decode(trained)


def test_a_trajectory_is_the_row_that_sft_makes_of_it(codec):
    turns = [f"<think>\nwhy\n</think>\n\n{TURNS[1]}", TURNS[0], "It is \\boxed{1}."]
    cfg = replace(SHORT, group_size=1, max_response_tokens=1500, max_result_tokens=400)
    asked = dialogue("u:question")
    prompts = [Prompt("p0", asked, ["1"], "math", token_ids=tuple(codec.render_prompt(asked)))]
    [group] = play(lambda _prompt, _path, turn: turns[turn], cfg=cfg, prompts=prompts, codec=codec)
    score_groups([group], RewardConfig(bonus_tools=("search",)), tools=codec.tools, form=codec.format)
    [t] = group.trajectories
    said = dialogue(f"a:{turns[0]}", "t:found", f"a:{turns[1]}", "t:2", f"a:{turns[2]}")
    row = codec.render_conversation([*asked, *said])
    assert [*prompts[0].token_ids, *t.token_ids] == row.token_ids
    assert [0] * len(prompts[0].token_ids) + t.loss_mask == row.loss_mask
    assert t.rollout_logprobs == [-0.5 * m for m in t.loss_mask]
    assert [(call.tag, call.result) for call in t.tool_calls] == [("search", "found"), ("python", "2")]
    assert (t.stop_reason, t.reward, t.reward_reason) == (StopReason.EOS, 1.1, "")
    t.check()
    view = trajectory_view(t)["turns"]
    assert [call["tag"] for call in view[0]["tool_calls"]] == ["search"] and '"found"' in view[0]["result_text"]
