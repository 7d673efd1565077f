r"""The format reward of calls in Llama's JSON: what is well-formed, what is the answer, and what earns the bonus."""

import json
import time

import pytest
from helpers.format_checks import check_defect, check_well_formed

from arpo.protocol import FORMS
from arpo.protocol.format_rules import Segments
from arpo.rewards import score
from extras.llama import LLAMA, LlamaCodec

RULES = LLAMA.rules


def call(name: str = "search", **parameters: str) -> str:
    return json.dumps({"name": name, "parameters": parameters})


def result(text: str, opened: str = "") -> tuple[str, bool]:
    return f"ipython\n\n{json.dumps(text)}assistant\n\n{opened}", False


CALL, CODE, BOX = call(query="q"), call("python", code="print('</think> \\boxed{9}')"), r"It is \boxed{4}."
GOOD: list[Segments] = [
    [(BOX, True)],
    [(f"<think>\nwhy\n</think>\n\n{BOX}", True)],
    [(CALL, True), result("found"), (BOX, True)],
    [(f"<think>a {CALL}</think>{CODE}", True), result("r"), (CALL, True), result("Error: x"), (BOX, True)],
    [(f"<think>\nx</think>{CALL}", True), result("r", opened="<think>\n"), (f"y</think>{BOX}", True)],
    [(call("nothing", x="y"), True), result("Error: there is no tool"), (BOX, True)],
    [(CALL, True), result(r"\boxed{2}"), (r"\boxed{3} or rather \boxed{4}", True)],
]
BAD: list[tuple[Segments, str]] = [
    ([("4", True)], "missing_answer"),
    ([(r"\boxed{4", True)], "unbalanced_box"),
    ([(rf"<think>{BOX}</think>so", True)], "missing_answer"),
    ([(CODE, True), result("r")], "missing_answer"),
    ([(CODE, True)], "missing_answer"),
    ([(CALL, True), result(r"\boxed{4}"), ("so", True)], "missing_answer"),
    ([(f"I look: {CALL}", True)], "missing_answer"),
    ([(f"why</think>{BOX}", True)], "unpaired_think"),
    ([(f"<think>a</think>{CALL}", True), result("r"), (f"</think>{BOX}", True)], "unpaired_think"),
    ([(CALL[:-1], True), result("Error"), (BOX, True)], "malformed_call"),
    ([(f"{CALL}; {CALL}", True), result("Error"), (BOX, True)], "malformed_call"),
    ([('{"name": "f", "parameters": "x"}', True), result("Error"), (BOX, True)], "malformed_call"),
    ([('{"name": "f"}', True), result("Error"), (BOX, True)], "malformed_call"),
]


@pytest.mark.parametrize("segments", GOOD)
def test_a_well_formed_response_is_scored_by_its_last_turn(segments):
    check_well_formed(LlamaCodec.format, segments)


@pytest.mark.parametrize(("segments", "reason"), BAD)
def test_a_defect_costs_the_reward_and_has_a_name(segments, reason):
    check_defect(LlamaCodec.format, segments, reason)


@pytest.mark.parametrize("segments", [s for s in GOOD if not s[-2:][0][0].endswith("<think>\n")])
def test_a_response_that_is_known_as_text_has_the_same_segments(segments):
    assert RULES.derive_segments("".join(text for text, _ in segments)) == segments


def test_much_space_takes_no_time():
    """Of a length whose square would take a minute."""
    started = time.process_time()
    assert RULES.format_error([(" " * 300_000, True)]) == "missing_answer"
    behind_a_call = "</tool_call>" + " " * 300_000 + "x"
    assert FORMS["hermes"].rules.derive_segments(behind_a_call) == [(behind_a_call, True)]
    assert time.process_time() - started < 5


def test_without_calls_the_bonus_is_for_tools_whose_results_are_no_errors():
    def bonus(*texts: str) -> float:
        segments = [(CALL, True), result(texts[0]), (CODE, True), result(texts[1]), (BOX, True)]
        return score("".join(text for text, _ in segments), ["4"], "math", form=LlamaCodec.format).parts["tool_bonus"]

    assert [bonus("a", "b"), bonus("a", "Error: b"), bonus("Error", "b")] == [0.1, 0, 0]
