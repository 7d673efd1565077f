"""Grading: which answer counts, by whose measure, and that grading again gives the same."""

import json
from dataclasses import replace

import pytest
from helpers.eval_records import CALL, boxed, record, reply, saved
from helpers.sample_groups import sample_groups
from helpers.web_service import WebService, says

from arpo.config.evals import JudgeConfig
from arpo.config.rewards import RewardConfig
from arpo.errors import UserError
from arpo.evals.grading import exact_match, extract_prediction, grade_records
from arpo.evals.judge import Judge
from arpo.evals.records import Grade, read_grades, write_grades
from arpo.evals.report import notes_on
from arpo.evals.scores import benchmark_scores, summarize
from arpo.rewards import load_custom, score, score_groups

# -- which answer counts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, prediction",
    [
        (r"<think>\boxed{1}</think><answer>\boxed{2}</answer>", "2"),
        (r"<answer>\boxed{1} or \boxed{2}</answer>", "2"),
        (r"<answer>\boxed{1}</answer> no, <answer>\boxed{2}</answer>", "2"),
        ("<think>t</think><answer> Paris\n</answer>", "Paris"),
        (r"<think>t</think>So it is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"It is \boxed{7}.", "7"),
        (r"<think>\boxed{3}</think>", ""),  # a thought is not an answer
        (r"<think>It may be \boxed{3}", ""),  # cut off: rllm's tests/rewards/test_math_reward.py
        (r"<think>t</think>It is \boxed{4}. <think>Or \boxed{3}", "4"),
        (r"<think>t</think><answer>\boxed{3}", "3"),  # ran out of tokens after the box
        ("<think>t</think><answer>3", ""),
        ("<answer></answer>", ""),
        ("", ""),
    ],
)
def test_the_last_answer_outside_the_thoughts_counts(text, prediction):
    assert extract_prediction([(text, True)], "tags") == prediction


def test_a_tool_result_is_no_answer():
    found = r" <result><answer>\boxed{4}</answer></result>"
    [grade] = grade_records([record("", segments=[["<search>q</search>", True], [found, False]])], metric="math")
    assert (grade.correct, grade.reason, grade.prediction) == (0.0, "no_answer", "")


# -- by whose measure ------------------------------------------------------------------------------------------------


def test_math_is_graded_by_equality():
    grades = grade_records([boxed("4.0"), boxed("5"), boxed(r"\frac{8}{2}"), record("?")], metric="math")
    assert [grade.correct for grade in grades] == [1.0, 0.0, 1.0, 0.0]
    assert {grade.metric for grade in grades} == {"math_equal"} and grades[1].scores == {"math_equal": 0.0}


def test_without_a_judge_questions_are_graded_by_f1_over_all_aliases():
    answers = ("City of Light", "Paris France")
    said = [boxed(text, answers=answers) for text in ("Paris", "paris, France.")]
    [close, exact] = grade_records(said, metric="qa")
    assert close.scores == {"em": 0.0, "f1": pytest.approx(2 / 3)} and close.correct == close.scores["f1"]
    assert exact.scores == {"em": 1.0, "f1": 1.0} and exact.metric == "f1"


@pytest.mark.parametrize(
    "prediction, answer, equal",
    [("The  Paris.", "paris", 1), ("B. Rome", "B", 1), ("A", "B", 0), ("-5", "5", 0), ("1,000", "1000", 1)],
)
def test_exact_match_ignores_case_punctuation_and_articles(prediction, answer, equal):
    assert exact_match(prediction, [answer]) == equal


def test_with_a_judge_its_verdict_counts_and_what_it_could_not_say_is_told(tmp_path):
    plan = ["Correct", "Correct", "Incorrect", "who knows"]  # the first is the probe's
    with WebService([*(says(reply(text)) for text in plan), says("broken", 500)]) as service:
        cfg = JudgeConfig(url=service.url, model="m", max_concurrent=1)
        judge = Judge(cfg, tmp_path / "judge.sqlite", max_tries=1)
        records = [boxed(f"answer {i}", sample=i) for i in range(4)] + [record("no answer", sample=4)]
        grades = grade_records(records, metric="qa", judge=judge)
        asked = len(service.requests)
        judge.close()
    assert [grade.correct for grade in grades] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [grade.reason for grade in grades] == ["", "", "judge_unparsable", "judge_failed", "no_answer"]
    assert ["judge" in grade.scores for grade in grades] == [True, True, False, False, True]
    assert {grade.metric for grade in grades} == {"judge"} and "HTTP 500" in grades[3].judge_reply
    assert asked == 5  # nothing is asked about a missing answer


# -- own files: the reward -------------------------------------------------------------------------------------------


def test_the_reward_is_that_of_training():
    texts = [
        r"<think>t</think><search>q</search> <result>r</result><think>t</think><answer>\boxed{4}</answer>",
        r"<think>t</think><answer>\boxed{5}</answer>",
        r"<answer>\boxed{4}</answer>",
    ]
    records = [record(text, data_source="math", tool_calls=[CALL] * (i == 0), sample=i) for i, text in enumerate(texts)]
    for grade, text in zip(grade_records(records, metric="reward"), texts, strict=True):
        expected = score(text, ["4"], "math")
        assert (grade.scores["reward"], grade.correct) == (expected.total, expected.parts["accuracy"])
        assert grade.reason == expected.reason and grade.scores["well_formed"] == float(expected.total >= 0)


def test_the_released_score_and_an_ability_are_passed_on():
    for compat, correct in (("upstream", 1.0), ("paper", 0.0)):
        cfg = RewardConfig(compat=compat)
        [grade] = grade_records([boxed("105", answers=["1.05"])], metric="reward", reward=cfg)
        assert grade.correct == correct
    as_qa, as_math = (boxed("10", answers=["10.0"], question_id=a, meta={"ability": a}) for a in ("qa", "math"))
    assert [grade.correct for grade in grade_records([as_qa, as_math], metric="reward")] == [0.0, 1.0]


def test_a_reward_of_ones_own_sees_what_it_sees_in_training(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def whole(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert (data_source, ground_truth, extra_info) == ('src', ['a', 'b'], {'k': 1}), extra_info\n"
        "    return {'score': len(solution_str) / 10, 'accuracy': 0.25, 'reason': 'short'}\n"
        "def number(*_): return 0.2\n"
        "def silent(*_): return {'score': None, 'reason': 'busy'}\n"
    )
    made = record("12345", answers=["a", "b"], data_source="src", meta={"extra_info": {"k": 1}})

    def graded(name: str) -> Grade:
        custom = load_custom("reward.file", f"{tmp_path}/mine.py:{name}")
        return grade_records([made], metric="reward", custom=custom)[0]

    grade = graded("whole")
    assert (grade.scores["reward"], grade.correct, grade.reason) == (0.5, 0.25, "short")
    grade = graded("number")
    assert (grade.correct, grade.metric) == (0.2, "reward, no accuracy")
    [note] = notes_on({"own": benchmark_scores([made], [grade])}, judge="")
    assert note.startswith("No accuracy of own: ")
    assert "well_formed" in grade.scores and grade.scores["well_formed"] == 0.0  # no reward decides that
    with pytest.raises(UserError, match=r"^reward\.file=.*: no reward for question .* \(busy\), and an evaluation"):
        graded("silent")
    made = record("12345", stop_reason="error", answers=["a", "b"], data_source="src")
    assert (graded("silent").correct, graded("silent").metric) == (0.0, "reward")  # an outage ends no evaluation
    [note] = notes_on({"own": benchmark_scores([made], [graded("silent")])}, judge="")
    assert note.startswith("1 trajectories were cut off by an infrastructure error (the same command asks again)")


def test_the_scores_of_own_files_are_those_of_training_to_the_digit(tmp_path):
    groups = sample_groups()
    score_groups(groups, RewardConfig(), tools=("python", "search"))
    records = saved(tmp_path, groups, "own", "reward")
    scores = benchmark_scores(records, grade_records(records, metric="reward"), seed=3)
    expected = {name: score for name, score in summarize(groups, seed=3).items() if name != "reward/tool_bonus"}
    assert 0 < expected["accuracy"] < 1 and {name: scores[name] for name in expected} == expected


# -- on disk ---------------------------------------------------------------------------------------------------------


def test_grades_come_back_from_disk_as_they_were(tmp_path):
    [grade] = grade_records([boxed("4\u2028\U0001f600")], metric="qa")
    odd = replace(grade, judge_reply="half a \ud83d pair\r\n", sample=1)
    write_grades(tmp_path / "grades" / "b.jsonl", [grade, odd])
    assert read_grades(tmp_path / "grades" / "b.jsonl") == [grade, odd]


@pytest.mark.parametrize("damage", ["half a li\n", "half a li", "[1]\n", json.dumps({"question_id": "q"}) + "\n", "\n"])
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "b.jsonl"
    write_grades(path, [Grade("q", 0, {}, 1.0, "f1", "")])
    path.write_text(path.read_text() + damage)
    with pytest.raises(UserError, match=r"b\.jsonl:2: cannot read the grades \(.*\); regrade the run"):
        read_grades(path)
