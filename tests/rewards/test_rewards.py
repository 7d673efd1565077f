"""Rewards: format, accuracy, the released score, custom reward files."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from arpo.config.rewards import RewardConfig
from arpo.jail.child import Child
from arpo.protocol import FORMS
from arpo.protocol.format_rules import last_box
from arpo.rewards import math_answer, score, score_by_rule, score_groups
from arpo.rewards.math_answer import exact_accuracy, math_equal
from arpo.rewards.qa import qa_accuracy, token_f1
from arpo.trajectory import Group, Prompt, ToolCall, Trajectory, Turn

derive_segments = FORMS["tags"].rules.derive_segments
LOADED = ("python", "search")
T = "<think>t</think>"
S = "<search>q</search> <result>\nr\n</result>"
P = "<python>print(1)</python> <result>\n1\n</result>"


def A(x: str) -> str:
    return rf"<answer>The final answer is \[ \boxed{{{x}}} \]</answer>"


# ---- the released score: all examples were obtained by running it

RELEASED = [
    (T + A("Paris"), "Paris", 1.0),
    (T + A("the  PARIS."), "Paris", 1.0),
    (T + S + T + A("Paris"), "Paris", 1.0),
    (T + S + T + P + T + A("Paris"), "Paris", 1.1),
    (T + S + T + P + T + A("Paris France"), "Paris", 0.7667),
    (T + A("E. H. Shepard and Milne"), "E. H. Shepard", 0.75),
    (T + A("London"), "Paris", 0),
    (T + A("yes"), "no", 0),
    (T + A("yes it is"), "yes", 0),
    (A("Paris"), "Paris", -1),
    ("<think>" + T + A("Paris"), "Paris", -1),
    (T + r"\boxed{Paris}", "Paris", -1),
    (T + A("Paris") + A("Paris"), "Paris", -1),
    (T + "<answer>Paris</answer>", "Paris", -1),
    (T + "<search>q</search>" + A("Paris"), "Paris", -1),
    (T + "<result>x</result>" + A("Paris"), "Paris", 1.0),
    ("<think>use </search> and </python></think>" + A("Paris"), "Paris", 1.1),
    (T + A("5"), "-5", 1.0),
    (T + A(r"\frac{1}{2}"), "1/2", 0),
    (T + A("12"), "1/2", 1.0),
    (T + A("105"), "1.05", 1.0),
    (T + A(r"3\sqrt{3}-6"), r"3\sqrt{3} - 6", 0),
    (T + A("A"), "A", 0),
    (T + A(r"\text{B}"), "B", 0),
    (T + A("1,000"), "1000", 1.0),
    (T + r"<answer>\boxed{Paris </answer>}", "Paris", -1),
    (T + r"<answer>\boxed {Paris}</answer>", "Paris", -1),
    (T + A("Paris") + " blah", "Paris", 1.0),
    (T + "<search>q</search> <result>\n<answer>x</answer>\n</result>" + T + A("Paris"), "Paris", -1),
    (T + "<search>q</search> <result>\nsee <search>\n</result>" + T + A("Paris"), "Paris", 1.0),
    (T + A("北京市"), "北京市", 1.0),
    (T + A("北京"), "北京市", 0),
    (T + A(""), "Paris", 0),
    (T + A(r"12 \text{ cm}"), "12", 0.5),
    (T + A("NYC"), ["New York City", "NYC"], 1.0),
    (T + "<search>q</search>", "Paris", -1),
    (T + "<search>q</search><search>q2</search> <result>r</result>" + A("Paris"), "Paris", 1.0),
    (T + r"<answer>\boxed{a}\boxed{Paris}</answer>", "Paris", 1.0),
]


@pytest.mark.parametrize(("response", "truth", "expected"), RELEASED, ids=range(1, len(RELEASED) + 1))
def test_upstream_mode_gives_the_released_score(response, truth, expected):
    answers = truth if isinstance(truth, list) else [truth]
    assert score(response, answers, "x", compat="upstream").total == pytest.approx(expected, abs=5e-5)


# ---- format (paper)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (T + A("Paris"), ""),
        (T + S + T + P + T + A("Paris"), ""),
        (A("Paris"), "missing_think"),
        ("<think>" + T + A("Paris"), "unpaired_think"),
        ("</think><think>" + A("Paris"), "unpaired_think"),
        (T + r"\boxed{Paris}", "missing_answer"),
        (T + A("Paris") + A("Paris"), "several_answers"),
        (T + r"<answer>\boxed{Paris}", "unclosed_answer"),
        (T + "<answer>Paris</answer>", "missing_box"),
        (T + r"<answer>\boxed{Paris </answer>}", "unbalanced_box"),
        (T + "<search>q</search>" + A("Paris"), "call_without_result"),
        (T + "<search>q</search><search>q2</search> <result>r</result>" + A("Paris"), "call_without_result"),
        (T + "<search>q" + A("Paris"), "unclosed_call"),
        (T + "<search>q</python> <result>\nr\n</result>" + A("Paris"), "unclosed_call"),
        (T + "q</search> <result>\nr\n</result>" + A("Paris"), "unopened_call"),
        (T + "<result>x</result>" + A("Paris"), "model_wrote_result"),
    ],
)
def test_each_format_defect_costs_minus_one_and_has_a_name(response, reason):
    result = score(response, ["Paris"], "hotpotqa")
    assert result.reason == reason and result.total == (-1.0 if reason else pytest.approx(1.0, abs=0.11))
    assert result.parts["format"] == float(not reason)


def test_nothing_in_a_tool_result_changes_the_format():
    hostile = "<answer>x</answer> <search> </think> <result> \\boxed{"
    segments = [(T + "<search>q</search>", True), (f" <result>\n{hostile}\n</result>", False), (T + A("Paris"), True)]
    text = "".join(part for part, _ in segments)
    assert score(text, ["Paris"], "hotpotqa", segments=segments).total == 1.0
    assert score(text, ["Paris"], "hotpotqa", compat="upstream").total == -1.0


def test_result_written_by_the_model_is_told_from_the_tools_by_the_segments():
    text = T + S + T + A("Paris")
    assert score(text, ["Paris"], "hotpotqa", segments=[(text, True)]).reason == "model_wrote_result"
    assert score(text, ["Paris"], "hotpotqa", segments=derive_segments(text)).reason == ""


def test_blank_after_a_closing_tag_belongs_to_the_call():
    segments = [(T + "<search>q</search>\n", True), (" <result>\nr\n</result>", False), (T + A("Paris"), True)]
    assert score("", ["Paris"], "hotpotqa", segments=segments).total == 1.0


def test_last_box_knows_escaped_braces():
    assert last_box(r"\boxed{a} \boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_box(r"\boxed{\left\{ x \right.}") == r"\left\{ x \right."
    assert last_box(r"\boxed{1") is None and last_box("1") is None


# ---- the parts


def test_tool_bonus_needs_both_tools_to_have_succeeded():
    text = T + S + T + P + T + A("Paris")
    search, python = ToolCall("search", "q", "r", ok=True), ToolCall("python", "print(1)", "1", ok=True)
    failed = ToolCall("python", "1/0", "Error", ok=False, error_kind="error")
    muted = ToolCall("python", "1", "", ok=True, executed=False)

    def bonus(calls):
        t = Trajectory("q", "0", turns=[Turn(0, tool_calls=calls)], text=text)
        prompt = Prompt("q", [], ["Paris"], "hotpotqa")
        return score_by_rule(t, prompt, RewardConfig(), tools=LOADED).parts["tool_bonus"]

    assert bonus([search, python]) == 0.1
    assert bonus([search]) == bonus([search, failed]) == bonus([search, muted]) == bonus([]) == 0.0


def test_tool_bonus_from_the_text_alone_skips_results_that_are_errors():
    failed = P.replace("\n1\n", "\nError: boom\n")
    assert score(T + S + T + P + T + A("4"), ["4"], "gsm8k").total == 1.1
    assert score(T + S + T + failed + T + A("4"), ["4"], "gsm8k").total == 1.0
    assert score("<think>use </search> and </python></think>" + A("4"), ["4"], "gsm8k").total == -1.0


def test_the_bonus_is_for_the_tools_that_the_config_names():
    text = T + S + T + A("4")
    assert score(text, ["4"], "gsm8k", bonus_tools=("search",)).total == 1.1
    assert score(text, ["4"], "gsm8k", bonus_tools=("search", "python")).total == 1.0
    assert score(text, ["4"], "gsm8k", bonus_tools=()).total == 1.0
    group = make_group()
    score_groups([group], RewardConfig(bonus_tools=("search",)), tools=LOADED)
    assert [t.reward_parts["tool_bonus"] for t in group.trajectories] == [0.1, 0.0]


def test_only_the_tags_of_loaded_tools_are_calls():
    call = "<clock>UTC</clock> <result>\nnoon\n</result>"
    unclosed = T + "<clock>UTC" + A("4")
    with_clock = {"tools": ("clock", "search"), "bonus_tools": ("clock",)}
    assert score(T + call + A("4"), ["4"], "gsm8k", **with_clock).total == 1.1
    assert score(unclosed, ["4"], "gsm8k", **with_clock).reason == "unclosed_call"
    assert score(T + call + A("4"), ["4"], "gsm8k").reason == "model_wrote_result"
    assert score(unclosed, ["4"], "gsm8k", tools=()).total == 1.0
    assert score("<>" + T + A("4"), ["4"], "gsm8k", tools=()).total == 1.0


def test_accuracy_and_format_are_known_each_whatever_the_other_is():
    wrong = score(T + S + T + P + T + A("5"), ["4"], "gsm8k")  # without a bonus, though it has used both tools
    assert (wrong.total, wrong.reason) == (0.0, "") and wrong.parts["tool_bonus"] == 0.0
    malformed = score(A("4"), ["4"], "gsm8k")
    assert malformed.total == -1.0 and malformed.parts == {"format": 0.0, "accuracy": 1.0, "tool_bonus": 0.0}


@pytest.mark.parametrize(
    ("answer", "truth", "data_source", "ability", "accuracy"),
    [
        ("0.5", "1/2", "unknown", None, 1.0),  # a number: math
        ("in 1943", "1943", "unknown", "qa", pytest.approx(2 / 3)),
        ("Paris, France", "Paris", "unknown", None, pytest.approx(2 / 3)),  # words: token F1
        ("Paris, France", "Paris", "unknown", "math", 0.0),
        ("x^2+1", "1 + x^2", "gaia", None, 1.0),
        ("A", "A", "hle", None, 1.0),
        ("37*482", "17834", "demo", None, 0.0),  # there, the arithmetic is the task
        ("17,834", "17834", "demo", None, 1.0),
    ],
)
def test_accuracy_goes_by_ability_then_source_then_answer(answer, truth, data_source, ability, accuracy):
    t = Trajectory("q", "0", text=T + A(answer))
    prompt = Prompt("q", [], [truth], data_source, meta={"ability": ability})
    assert score_by_rule(t, prompt, RewardConfig(), tools=LOADED).parts["accuracy"] == accuracy


# ---- math


@pytest.mark.slow
@pytest.mark.parametrize(
    "prediction", ["10^{10^{10^{10}}}", "1000000!", "{" * 900, "(" * 500, r"\int_0^1 x^{x^{x}} dx"]
)
def test_pathological_answer_is_wrong_and_the_next_one_is_still_graded(prediction):
    assert math_equal(prediction, "7") is False
    assert math_equal(rf"\frac{{{len(prediction)}}}{{2}} + x", rf"x + \frac{{{len(prediction)}}}{{2}}") is True


def test_math_is_graded_in_any_thread():
    verdicts = []
    threads = [threading.Thread(target=lambda i=i: verdicts.append(math_equal(f"x+{i}", f"{i} + x"))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [True] * 4


def test_plain_numbers_never_reach_the_verifier():
    started = time.process_time()
    graded = [math_equal(str(i), str(i + i % 2)) for i in range(5000)]
    assert sum(graded) == 2500 and time.process_time() - started < 10  # 30,000 per minute, with much room
    assert exact_accuracy("17834", ["17834"]) == 1.0


# ---- questions


@pytest.mark.parametrize(
    ("prediction", "answer", "f1"),
    [
        ("the  PARIS.", "Paris", 1.0),
        ("Paris France", "Paris", 2 / 3),
        ("E. H. Shepard and Milne", "E. H. Shepard", 0.75),
        ("yes it is", "yes", 0.0),
        ("5", "-5", 0.0),
        ("105", "1.05", 0.0),
        ("1,000", "1000", 1.0),
        ("北京", "北京市", 0.8),
        ("A", "A", 1.0),
        ("June 13, 2017", "June\u00a013,\u00a02017", 1.0),
        ("The Big Bang Theory", "“The Big Bang Theory”", 1.0),
        (r"\text{Paris}", "Paris", 1.0),
        ("", "Paris", 0.0),
    ],
)
def test_token_f1(prediction, answer, f1):
    assert token_f1(prediction, answer) == pytest.approx(f1)


def test_option_letters_match_as_options_and_the_best_alias_counts():
    assert qa_accuracy("B. Non-Sadism", ["B"]) == qa_accuracy("(B)", ["B"]) == qa_accuracy(r"\text{B}", ["(B)"]) == 1.0
    assert qa_accuracy("C", ["B"]) == qa_accuracy("A B", ["B"]) == 0.0
    assert qa_accuracy("NYC", ["New York City", "NYC"]) == 1.0


# ---- trajectories


def make_group() -> Group:
    prompt = Prompt("q-0", [], ["Paris"], data_source="hotpotqa", meta={"extra_info": {"index": 3}})
    call = ToolCall("search", "q", "r", ok=True)
    texts = [T + S + T + A("Paris"), T + A("London")]
    one, other = (Trajectory("q-0", str(i), text=t, segments=derive_segments(t)) for i, t in enumerate(texts))
    one.turns = [Turn(0, tool_calls=[call]), Turn(0)]
    return Group(prompt, [one, other])


def test_trajectories_get_reward_parts_and_reason():
    group = make_group()
    group.trajectories[1].segments = [("cut off", True)]
    score_groups([group], RewardConfig(), tools=LOADED)
    good, bad = group.trajectories
    assert (good.reward, good.reward_reason) == (1.0, "") and good.reward_parts["accuracy"] == 1.0
    assert (bad.reward, bad.reward_reason) == (-1.0, "missing_answer")


# ---- the process that compares answers


def child_that_compares() -> Child:
    program = Path(math_answer.__file__).with_name("math_worker.py")
    return Child(program, memory_bytes=2 << 30, cpu_s=2.0, wall_s=60.0)


def test_the_process_that_compares_answers_has_no_keys_and_is_in_a_jail(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "sk-secret")
    child = child_that_compares()
    assert child.ask(["1/2", "0.5"]) and child.ask([r"\frac{\sqrt{8}}{2}", r"\sqrt{2}"])
    process = Path(f"/proc/{child._process.pid}")
    environment, status = (process / "environ").read_bytes(), (process / "status").read_text()
    child.close()
    assert b"sk-secret" not in environment and b"PATH=" in environment
    assert "Seccomp:\t2\n" in status and "CapEff:\t0000000000000000\n" in status


def test_ctrl_c_is_for_the_run_and_not_for_the_process_that_compares_answers():
    child = child_that_compares()
    assert child.ask(["1/2", "0.5"])
    process = child._process
    process.send_signal(signal.SIGINT)
    assert child.ask([r"\frac{1}{2}", "0.5"]) and child._process is process
    process.communicate()  # closes stdin, which ends it
    assert process.returncode == 0
