"""Rewards: format, accuracy, the released score, custom reward files."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.families import TEMPLATES, codec_of, hermes_codec

from arpo.config.rewards import RewardConfig
from arpo.errors import UserError
from arpo.jail.child import Child
from arpo.protocol import FORMS
from arpo.protocol.format_rules import last_box
from arpo.rewards import load_custom, math_answer, score, score_by_rule, score_groups
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


def test_wrong_answer_in_good_form_is_zero_even_with_both_tools():
    result = score(T + S + T + P + T + A("5"), ["4"], "gsm8k")
    assert (result.total, result.reason) == (0.0, "") and result.parts["tool_bonus"] == 0.0


def test_accuracy_is_known_even_where_the_format_is_wrong():
    result = score(A("4"), ["4"], "gsm8k")
    assert result.total == -1.0 and result.parts == {"format": 0.0, "accuracy": 1.0, "tool_bonus": 0.0}


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
    t, prompt = (
        Trajectory("q", "0", text=T + A(answer)),
        Prompt("q", [], [truth], data_source, meta={"ability": ability}),
    )
    assert score_by_rule(t, prompt, RewardConfig(), tools=LOADED).parts["accuracy"] == accuracy


# ---- math


@pytest.mark.parametrize(
    ("prediction", "answer", "equal"),
    [
        ("5", "-5", False),
        ("\u22125", "-5", True),
        ("105", "1.05", False),
        ("12", "1/2", False),
        ("0.5", r"\frac{1}{2}", True),
        (r"\frac12", "1/2", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        ("2.0", "2", True),
        ("1,000", "1000", True),
        ("23", "023", True),
        ("1 2", "12", False),
        (r"3\sqrt{3}-6", r"3\sqrt{3} - 6", True),
        ("-q+p", "p - q", True),
        ("6, 126", "126, 6", True),
        ("6", "126, 6", False),
        ("120", r"120^\circ", True),
        (r"12 \text{ cm}", "12", True),
        (r"\text{B}", "B", True),
        ("B", r"\text{(B)}", True),
        ("C", r"\text{(B)}", False),
        ("Evelyn", r"\text{Evelyn}", True),
        ("silent", "listen", False),
        ("4343_7", "4343_6", False),
        ("", "0", False),
        ("x" * 5000, "1", False),
    ],
)
def test_math_equality(prediction, answer, equal):
    assert math_equal(prediction, answer) is equal


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


def test_option_letters_match_as_options():
    assert qa_accuracy("B. Non-Sadism", ["B"]) == qa_accuracy("(B)", ["B"]) == qa_accuracy(r"\text{B}", ["(B)"]) == 1.0
    assert qa_accuracy("C", ["B"]) == qa_accuracy("A B", ["B"]) == 0.0


def test_best_alias_counts():
    assert qa_accuracy("NYC", ["New York City", "NYC"]) == 1.0


# ---- trajectories and custom rewards


def make_group() -> Group:
    prompt = Prompt("q-0", [], ["Paris"], data_source="hotpotqa", meta={"extra_info": {"index": 3}})
    call = ToolCall("search", "q", "r", ok=True)
    texts = [T + S + T + A("Paris"), T + A("London")]
    trajectories = [
        Trajectory("q-0", str(i), text=text, segments=derive_segments(text)) for i, text in enumerate(texts)
    ]
    trajectories[0].turns = [Turn(0, tool_calls=[call]), Turn(0)]
    return Group(prompt, trajectories)


def test_trajectories_get_reward_parts_and_reason():
    group = make_group()
    group.trajectories[1].segments = [("cut off", True)]
    score_groups([group], RewardConfig(), tools=LOADED)
    good, bad = group.trajectories
    assert (good.reward, good.reward_reason) == (1.0, "") and good.reward_parts["accuracy"] == 1.0
    assert (bad.reward, bad.reward_reason) == (-1.0, "missing_answer")


def test_custom_reward_of_one_response(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': extra_info['index'] + (ground_truth in solution_str), 'hit': 1, 'reason': 'mine'}\n"
    )
    group = make_group()
    score_groups([group], RewardConfig(), load_custom("reward.file", f"{file}:compute_score"), tools=LOADED)
    assert [t.reward for t in group.trajectories] == [4.0, 3.0]
    assert group.trajectories[0].reward_parts == {"hit": 1.0} and group.trajectories[0].reward_reason == "mine"


def test_custom_reward_of_a_batch(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def batch(trajectories, prompts):\n"
        "    return [float(p.answers[0] in t.text) + len(prompts) for t, p in zip(trajectories, prompts)]\n"
    )
    group = make_group()
    custom = load_custom("reward.file", f"{file}:batch")
    score_groups([group], RewardConfig(), custom, tools=LOADED)
    assert [t.reward for t in group.trajectories] == [3.0, 2.0]


def test_only_new_trajectories_are_scored_where_that_is_asked_for(tmp_path):
    (tmp_path / "mine.py").write_text("def f(d, text, truth, e): return 7.0 + (truth in text)")
    group = make_group()
    group.trajectories[0].reward = 5.0
    custom = load_custom("reward.file", f"{tmp_path}/mine.py:f")
    score_groups([group], RewardConfig(), custom, tools=LOADED, only_new=True)
    assert [t.reward for t in group.trajectories] == [5.0, 7.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(d, s, g, e): return 1 / 0", r"mine\.py: f failed on prompt q-0, trajectory 0 \(ZeroDivisionError"),
        ("def f(d, s, g, e): raise SystemExit(3)", r"mine\.py: f failed on prompt q-0, trajectory 0 \(SystemExit: 3"),
        ("async def f(d, s, g, e): exit(3)", r"mine\.py: f failed on prompt q-0, trajectory . \(SystemExit: 3"),
        ("exit(3)", r"cannot be imported \(SystemExit: 3"),
        ("def f(trajectories, prompts): raise KeyError('x')", r"mine\.py: f failed on 2 samples from prompt q-0"),
        ("def f(trajectories, prompts): return [1.0]", r"returned 1 scores for 2 samples"),
        (
            "def f(d, s, g, e): return None",
            r"prompt q-0, trajectory 0: the returned score is None; it must be a number",
        ),
        ("def f(d, s, g, e): return float('nan')", "must be finite"),
        ("def f(d, s, g, e): return {'reward': 1}", "has no 'score'"),
        ("def g(d, s, g, e): return 1.0", "does not define"),
        ("import no_such_module", "cannot be imported"),
    ],
)
def test_failing_custom_reward_names_the_file_and_the_sample(tmp_path, source, message):
    (tmp_path / "mine.py").write_text(source)
    group = make_group()
    with pytest.raises(UserError, match=message):
        score_groups([group], RewardConfig(), load_custom("reward.file", f"{tmp_path}/mine.py:f"), tools=LOADED)


STUCK = """
import sys, threading, time
from arpo.config import exits
from arpo.rewards.custom import load_custom, _call
exits.SAY_AFTER_S, exits.GIVE_UP_S = 0.2, float(sys.argv[2])
if "stop" in sys.argv:
    exits.asked_to_stop.set()
_call(load_custom("reward.file", sys.argv[1]), [("prompt q", (1, 2, 3, 4))])
"""


@pytest.mark.parametrize("source", ["def f(a, b, c, d): time.sleep(600)", "async def f(a, b, c, d): time.sleep(600)"])
@pytest.mark.parametrize("args", [("0.5",), ("600", "stop")])
def test_a_reward_that_does_not_return_is_named_and_ends_the_run(tmp_path, source, args):
    """After a limit, or where the run was asked to stop."""
    (tmp_path / "mine.py").write_text(f"import time\n{source}")
    command = [sys.executable, "-c", STUCK, f"{tmp_path}/mine.py:f", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    named, last = done.stderr.splitlines()
    assert named.startswith(f"{tmp_path}/mine.py: f on prompt q has not returned for 0.2 s; the run ends where")
    assert last.startswith(f"error: {tmp_path}/mine.py: f on prompt q has not returned for ") and done.returncode == 2


@pytest.mark.parametrize(
    "source, words",
    [
        ("async def f(a, b): return 1.0", r"takes \(a, b\); .* or \(trajectory, prompt\) or \(trajectories, prompts\)"),
        ("def f(solution, truth): return 1.0", r"takes \(solution, truth\); it must take \(data_source, "),
        ("def f(): return 1.0", r"takes \(nothing\); it must take"),
        ("def f(completions, **options): return [1.0]", r"takes \(completions, options\); it must take"),
        ("def f(a, b, c, d, e): return 1.0", r"takes \(a, b, c, d, e\); it must take"),
    ],
)
def test_a_custom_reward_of_another_form_is_refused_when_it_is_loaded(tmp_path, source, words):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match=rf"mine\.py: f {words}"):
        load_custom("reward.file", f"{tmp_path}/mine.py:f")


@pytest.mark.parametrize(
    "source, words",
    [
        ("def f(a, b, c, d): return d['level']", r"failed on prompt q, trajectory invented.*KeyError: 'level'"),
        ("def f(a, b, c, d): return float('nan')", "the returned score is nan; it must be finite"),
        ("def f(trajectories, prompts): return []", "returned 0 scores for 2 samples"),
    ],
)
def test_a_custom_reward_is_tried_before_anything_is_sampled(tmp_path, source, words):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match=words):
        custom = load_custom("reward.file", f"{tmp_path}/mine.py:f")
        custom.try_on(Prompt("q", [], ["4"], meta={"extra_info": {}}), codec_of("qwen2_5"))


@pytest.mark.parametrize("opens_think", [False, True])
@pytest.mark.parametrize("make_codec", [codec_of, hermes_codec])
def test_a_trial_gets_the_rows_own_fields_and_a_well_formed_answer_in_the_protocols_form(
    tmp_path, make_codec, opens_think
):
    (tmp_path / "mine.py").write_text(
        "from arpo.rewards import score\n"
        "def f(trajectory, prompt):\n"
        "    if trajectory.stop_reason == 'length':\n"
        "        return 0.0\n"
        "    result = score(trajectory.text, ['4'], 'math', segments=trajectory.segments, form=prompt.meta['form'])\n"
        "    assert result.total == 1.0, (result, trajectory)\n"
        "    trajectory.check()\n"
        "    return result.total"
    )
    template = (TEMPLATES / "qwen2_5.jinja").read_text()
    before, generation_prompt, end = template.rpartition("<|im_start|>assistant\\n")
    codec = make_codec(
        "qwen2_5", chat_template=f"{before}{generation_prompt}<think>\\n{end}" if opens_think else template
    )
    assert bool(codec._opened) == opens_think
    prompt = Prompt("q", [], ["4"], meta={"form": codec.format})
    load_custom("reward.file", f"{tmp_path}/mine.py:f").try_on(prompt, codec)


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
