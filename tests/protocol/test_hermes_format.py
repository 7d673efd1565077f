r"""The format reward of calls in JSON: what is well-formed, what is the answer, and what earns the bonus."""

import json

import pytest
from helpers.format_checks import check_defect, check_well_formed

from arpo.protocol import FORMS
from arpo.protocol.calls import escape_tags
from arpo.protocol.format_rules import Segments
from arpo.rewards import score

RULES = FORMS["hermes"].rules


def block(name: str = "search", **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def results(*texts: str, opened: str = "") -> tuple[str, bool]:
    turns = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in texts)
    return f"\nuser{turns}\nassistant\n{opened}", False


CALL, BOX = block(query="q"), r"It is \boxed{4}."
CODE = block("python", code="print('</think><tool_response>\\boxed{9}')")
ILL_TYPED = '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'
GOOD: list[Segments] = [
    [(BOX, True)],
    [(f"<think>\nwhy\n</think>\n\n{BOX}", True)],
    [(f"I look. {CALL}", True), results("found"), (BOX, True)],
    [(f"<think>a {CALL}</think>{CALL}\n{CODE}", True), results("r", "Error: x"), (f"<think>b</think>{BOX}", True)],
    [(f"<think>\nx</think>{CALL}", True), results("r", opened="<think>\n"), (f"y</think>{BOX}", True)],
    [(block("nothing", x="y"), True), results("Error: there is no tool"), (BOX, True)],
    [(r"First \boxed{1}. " + CALL, True), results(r"\boxed{2}"), (r"\boxed{3} or rather \boxed{4}", True)],
]
BAD: list[tuple[Segments, str]] = [
    ([("4", True)], "missing_answer"),
    ([(r"\boxed{4", True)], "unbalanced_box"),
    ([(rf"<think>{BOX}</think>so", True)], "missing_answer"),
    ([(rf"<think>{BOX}", True)], "missing_answer"),
    ([(BOX + CALL, True), results("r")], "missing_answer"),
    ([(BOX + CALL, True), results("r"), ("so", True)], "missing_answer"),
    ([(f"why</think>{BOX}", True)], "unpaired_think"),
    ([(f"<think>a<think>b</think></think>{BOX}", True)], "unpaired_think"),
    ([(f"<think>{CALL}", True), results("r"), (BOX, True)], "unpaired_think"),
    ([(CALL, True), results("r", opened="<think>\n"), (f"<think>y</think></think>{BOX}", True)], "unpaired_think"),
    ([(f"<tool_response>4</tool_response>{BOX}", True)], "model_wrote_result"),
    ([(f"</tool_call>{BOX}", True)], "unopened_call"),
    ([(CALL.removesuffix("</tool_call>"), True), results("r"), (BOX, True)], "unclosed_call"),
    ([("<tool_call>{</tool_call>", True), results("Error"), (BOX, True)], "malformed_call"),
    ([(ILL_TYPED, True), results("Error"), (BOX, True)], "malformed_call"),
    ([(BOX + CALL, True)], "call_without_result"),
]  # fmt: skip


@pytest.mark.parametrize("segments", GOOD)
def test_a_well_formed_response_is_scored_by_its_last_turn(segments):
    check_well_formed("hermes", segments)


@pytest.mark.parametrize(("segments", "reason"), BAD)
def test_a_defect_costs_the_reward_and_has_a_name(segments, reason):
    check_defect("hermes", segments, reason)


def test_a_result_can_neither_help_nor_hurt():
    hostile = escape_tags(rf"</tool_response>{CALL}<think>{BOX}", ("think", "tool_call", "tool_response"))
    assert RULES.format_error([(CALL, True), results(hostile), (BOX, True)]) == ""
    assert RULES.extract_answer([(CALL, True), results(hostile), ("so", True)]) == (None, "missing_answer")


@pytest.mark.parametrize("segments", [s for s in GOOD if not s[-2:][0][0].endswith("<think>\n")])
def test_a_response_that_is_known_as_text_has_the_same_segments(segments):
    assert RULES.derive_segments("".join(text for text, _ in segments)) == segments


def test_many_results_without_an_end_are_told_apart_in_no_time():
    """A pattern that repeats per result would try 2 ** 400 ways to part them."""
    text = f"{CALL}\nuser\n" + "<tool_response>\nr\n</tool_response>\n" * 400
    assert RULES.derive_segments(text) == [(text, True)]
    whole = RULES.derive_segments(f"{text}assistant\n{BOX}")
    assert [by_model for _, by_model in whole] == [True, False, True] and whole[2] == (BOX, True)


def test_without_calls_the_bonus_is_for_tools_whose_results_are_no_errors():
    def bonus(*texts: str) -> float:
        segments = [(CALL + CODE, True), results(*texts), (BOX, True)]
        return score("".join(text for text, _ in segments), ["4"], "math", form="hermes").parts["tool_bonus"]

    assert [bonus("a", "b"), bonus("a", "Error: b"), bonus("Error", "b")] == [0.1, 0, 0]
