import pytest
from helpers.fakes import byte_tokenizer
from helpers.families import dialogue, pieces

from arpo.errors import UserError
from arpo.protocol import Codec, TagsCodec
from arpo.protocol.calls import TRUNCATION_MARK
from arpo.protocol.prompts import About, default_system_prompt, with_system_prompt
from arpo.protocol.tags import escape_result, merge_tool_messages, parse_call, render_result
from arpo.tools import system_prompt_for


@pytest.fixture(scope="module")
def codec() -> Codec:
    return TagsCodec(byte_tokenizer())


@pytest.mark.parametrize(
    "turn, tag, argument, error",
    [
        ("<think>x</think><python>\nprint(1)\n</python>", "python", "print(1)", ""),
        ("<think>I use <search> now</think><search>Paris</search>", "search", "Paris", ""),
        ("<think>x</think>2+2</python>", "python", "", "Error: </python> has no <python> before it"),
        ("<search>a</search> b</search>", "search", "", "Error: </search> has no <search> before it"),
        ("<search>  </search>", "search", "", "Error: the <search> call is empty"),
    ],
)
def test_a_call_is_what_stands_between_the_last_opening_tag_and_its_closing_one(turn, tag, argument, error):
    call = parse_call(turn, tag)
    assert (call.tag, call.argument) == (tag, argument)
    assert call.error.startswith(error) and bool(call.error) == bool(error)


@pytest.mark.parametrize("budget", [45, 57, 100, 199])
def test_a_long_result_is_cut_to_its_budget_with_a_visible_mark(codec, budget):
    text, ids = codec.encode_result("x€" * 300, budget)
    assert len(ids) <= budget
    assert text.endswith(TRUNCATION_MARK) and "�" not in text
    assert codec.decode(ids) == render_result(text)


def test_a_short_result_fits_where_a_cut_one_would_not(codec):
    """The mark that a result was cut takes more room than "42", which needs no mark."""
    text, ids = codec.encode_result("42", 22)
    assert text == "42" and len(ids) == 22 < len(codec.encode(render_result(TRUNCATION_MARK)))
    assert codec.encode_result("42", 21) is None and codec.encode_result("x" * 99, 42) is None
    codec.check_result_room(43)
    with pytest.raises(UserError, match=r"rollout\.max_result_tokens=42 is below the 43 tokens .*raise it"):
        codec.check_result_room(42)


def test_system_prompt_can_be_kept_dropped_or_replaced():
    messages = [{"role": "system", "content": "old"}, {"role": "user", "content": "q"}]
    assert with_system_prompt(messages, "keep") == messages
    assert with_system_prompt(messages, "none") == with_system_prompt(messages, "") == messages[1:]
    assert with_system_prompt(messages, "new")[0] == {"role": "system", "content": "new"}
    default = system_prompt_for("default", ("python", "search"))
    assert with_system_prompt(messages, default)[0]["content"].startswith("You are a helpful assistant")
    assert [system_prompt_for(setting, ()) for setting in ("keep", "none", "new")] == ["keep", "none", "new"]


@pytest.mark.parametrize("names", [("python", "search"), ("search", "python")])
def test_the_default_system_prompt_of_the_papers_tools_is_word_for_word_that_of_the_sft_data(names):
    assert system_prompt_for("default", names) == (
        "You are a helpful assistant that solves the given question step by step, with the help of a search tool and a "
        "Python interpreter.\n"
        "Think inside <think> </think>. To search, write <search> query </search>; to run code, write <python> code "
        "</python> and print what you need. After each call the result appears between <result> and </result>; then "
        "think again, and call again if you need to. When you are sure, give the final answer inside <answer> "
        "</answer>, the exact answer in \\boxed{}.\n"
        "Example: <think> what is needed </think><search> query </search> <result> found passages </result><think> "
        "what follows </think><python> print(6 * 7) </python> <result> 42 </result><think> done </think><answer> The "
        "final answer is \\[ \\boxed{42} \\] </answer>"
    )


def test_the_default_system_prompt_offers_exactly_the_tools_that_are_loaded():
    [one, none] = [system_prompt_for("default", names) for names in (("search",), ())]
    assert "with the help of a search tool.\n" in one and "python" not in one.lower()
    assert "<result>" not in none and "step by step.\n" in none
    three = default_system_prompt([About(f"a {x}", f"to {x}, write <{x}> </{x}>", f"<{x}>") for x in ("a", "b", "c")])
    assert "the help of a a, a b and a c." in three and three.count("<think> what follows </think>") == 2


def test_our_tags_and_those_of_every_loaded_tool_are_escaped_in_results_and_others_are_not():
    assert escape_result("<b>x</b> <answer>4</answer> <think>") == (
        "<b>x</b> &lt;answer&gt;4&lt;/answer&gt; &lt;think&gt;"
    )
    codec = TagsCodec(byte_tokenizer(), tools=("search", "calculator", "a.b"))
    text, _ = codec.encode_result("<calculator>1</calculator> <a.b> <axb> <python> <search>", 1000)
    assert text == "&lt;calculator&gt;1&lt;/calculator&gt; &lt;a.b&gt; <axb> <python> &lt;search&gt;"
    row = codec.render_conversation(dialogue("u:q", "a:<search>x</search>", "t:<calculator>", "a:<search>x</search>"))
    assert "<result>\n&lt;calculator&gt;\n</result>" in codec.decode(row.token_ids)


def test_tool_messages_become_result_spans_of_one_assistant_turn_which_are_trained_where_that_is_asked_for(codec):
    turns = dialogue("u:q", "a:<search>x</search>", "t:found <answer>", "a:<answer>y</answer>")
    merged = merge_tool_messages(turns)
    assert merged[1]["content"] == "<search>x</search> <result>\nfound &lt;answer&gt;\n</result><answer>y</answer>"
    for mask_results, trained in ((True, "<search>x</search><answer>y</answer>"), (False, merged[1]["content"])):
        row = codec.render_conversation(turns, mask_results=mask_results)
        assert "".join(text for text, mask in pieces(codec, row) if mask) == f"{trained}<|im_end|>"
