"""Comparing evaluated runs: pairing, what is left out and why, and folders that hold no evaluation."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.eval_records import boxed

from arpo.config.rewards import RewardConfig
from arpo.errors import UserError
from arpo.evals.grading import REWARD_ONLY
from arpo.evals.records import Grade
from arpo.evals.report import name_of, write_report
from extras.compare import compare_runs


def grades_of(chances: dict[str, float], n: int, *, seed: int, metric: str = "f1") -> list[Grade]:
    """n samples of each question, right with the given chance."""
    rng = random.Random(seed)
    return [Grade(q, i, {}, float(rng.random() < p), metric, "") for q, p in chances.items() for i in range(n)]


def write_run(folder: Path, judge: str = "", reward: str = "", **grades: list[Grade]) -> Path:
    records = {b: [boxed("1", question_id=g.question_id, sample=g.sample) for g in of] for b, of in grades.items()}
    write_report(folder, records, grades, judge=judge, reward=reward)
    return folder


def compared(*folders: Path) -> tuple[str, dict]:
    """The text, and the numbers of the last run against the first."""
    text = compare_runs(folders)
    assert (folders[-1] / "compare.md").read_text() == text
    return text, list(json.loads((folders[-1] / "compare.json").read_text()).values())[-1]


HALF = {f"q{i:02}": float(i % 2) for i in range(40)}
"""Every second question is easy, the others are hopeless: questions differ far more than runs."""


def test_pairing_sees_a_difference_that_separate_intervals_hide(tmp_path):
    better = {q: p or 0.3 for q, p in HALF.items()}
    a = write_run(tmp_path / "a", gaia=grades_of(HALF, 4, seed=0))
    b = write_run(tmp_path / "b", gaia=grades_of(better, 4, seed=1))
    own = [json.loads((run / "scores.json").read_text())["gaia"] for run in (a, b)]
    assert own[0]["accuracy_high"] > own[1]["accuracy_low"]  # they overlap
    text, result = compared(a, b)
    found = result["benchmarks"]["gaia"]
    assert found["accuracy"]["difference"] == pytest.approx(own[1]["accuracy"] - own[0]["accuracy"])
    assert 0 < found["accuracy"]["low"] < found["accuracy"]["difference"] < found["accuracy"]["high"]
    assert found["pass@4"]["difference"] == pytest.approx(own[1]["pass@4"] - own[0]["pass@4"])
    shown = f"{own[0]['accuracy']:.3f} | {own[1]['accuracy']:.3f} | +{found['accuracy']['difference']:.3f}"
    assert f"| gaia | 40 | {shown}" in text and "] * |" in text


def test_overall_each_benchmark_counts_the_same(tmp_path):
    small, large = {f"q{i}": 0.5 for i in range(10)}, {f"q{i}": 0.5 for i in range(200)}
    a = write_run(tmp_path / "a", gaia=grades_of(small, 2, seed=0), hle=grades_of(large, 2, seed=1))
    b = write_run(tmp_path / "b", gaia=grades_of(small, 2, seed=2), hle=grades_of(large, 2, seed=3))
    text, result = compared(a, b)
    parts = [numbers["accuracy"] for numbers in result["benchmarks"].values()]
    overall = result["overall"]["accuracy"]
    assert overall["difference"] == pytest.approx(np.mean([part["difference"] for part in parts]))
    widths = [part["high"] - part["low"] for part in parts]
    assert overall["high"] - overall["low"] == pytest.approx(np.hypot(*widths) / 2, rel=0.15)  # independent parts
    assert "| mean of 2 |" in text


def test_a_control_set_does_not_count_in_the_mean(tmp_path):
    """lm-evaluation-harness PR 2198: a group could only be the mean of a task and of its control."""
    wrong, right = [grades_of({f"q{i}": chance for i in range(10)}, 1, seed=0) for chance in (0.0, 1.0)]
    a = write_run(tmp_path / "a", gaia=wrong, gaia_muted=wrong, hle=wrong)
    b = write_run(tmp_path / "b", gaia=right, gaia_muted=wrong, hle=right)
    text, result = compared(a, b)
    assert result["benchmarks"]["gaia_muted"]["accuracy"]["difference"] == 0.0
    assert result["overall"]["accuracy"]["difference"] == 1.0 and "| mean of 2 |" in text
    c = write_run(tmp_path / "c", gaia=wrong, gaia_muted=wrong)
    assert "mean of" not in compared(c, b)[0]


def test_only_common_questions_of_one_version_of_a_test_set_count_and_the_others_are_told(tmp_path):
    own, common = grades_of(HALF, 1, seed=0), grades_of(dict(list(HALF.items())[:10]), 1, seed=0)
    other_version = [replace(grade, question_digest="other") for grade in own[10:15]]
    a = write_run(tmp_path / "a", gaia=own)
    b = write_run(tmp_path / "b", gaia=[*common, *other_version, *grades_of({"new": 1.0}, 1, seed=0)])
    text, result = compared(a, b)
    assert result["benchmarks"]["gaia"]["questions"] == 10
    assert set(result["benchmarks"]["gaia"]["accuracy"].values()) == {0.0}
    assert "gaia: 36 questions are only in one of the two" in text  # 30 of a, 5 of the other version, and the new one


def test_other_numbers_of_samples_are_compared_up_to_the_smaller(tmp_path):
    a = write_run(tmp_path / "a", gaia=grades_of(HALF, 8, seed=0))
    b = write_run(tmp_path / "b", gaia=grades_of(HALF, 2, seed=0))
    found = compared(a, b)[1]["benchmarks"]["gaia"]
    assert "pass@2" in found and "pass@4" not in found and "pass@8" not in found


def test_other_graders_and_missing_benchmarks_are_left_out_and_told(tmp_path):
    same, judged = grades_of(HALF, 1, seed=0), grades_of(HALF, 1, seed=0, metric="judge")
    a = write_run(tmp_path / "a", judge="J", bamboogle=same, gaia=same, hle=judged, aime24=same)
    b = write_run(tmp_path / "b", judge="K", bamboogle=same, gaia=judged, hle=judged, xbench=same)
    text, result = compared(a, b)
    assert list(result["benchmarks"]) == ["bamboogle"]
    assert "gaia has different graders: judge (K), f1" in text
    assert "hle has different graders: judge (K), judge (J)" in text
    assert "aime24 is only in a" in text and "xbench is only in b" in text


def test_rewards_of_different_functions_are_not_compared(tmp_path):
    """One name for the scores of two functions: elastic/kibana#285723."""
    (tmp_path / "mine.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 1.0\n")
    rewards = [name_of(RewardConfig(file=file)) for file in ("", f"{tmp_path}/mine.py:f")]
    same = grades_of(HALF, 1, seed=0, metric="reward")
    a, b, c = (write_run(tmp_path / f"{i}", reward=r, mine=same) for i, r in enumerate((*rewards, rewards[1])))
    assert compared(b, c)[1]["benchmarks"]["mine"]["accuracy"]["difference"] == 0.0
    with pytest.raises(
        UserError, match=r"mine has different graders: reward \(mine\.py:f sha256:\w+\), reward \(paper"
    ):
        compare_runs([a, b])


def test_rewards_without_an_accuracy_are_compared_as_they_are_and_count_in_no_mean(tmp_path):
    a, b = (
        write_run(
            tmp_path / f"{value}",
            mine=[Grade(q, 0, {}, value, REWARD_ONLY, "") for q in HALF],
            gaia=grades_of(HALF, 1, seed=0),
        )
        for value in (2.0, 5.0)
    )
    text, result = compared(a, b)
    assert (
        result["benchmarks"]["mine"]["accuracy"]["difference"] == 3.0 and "pass@1" not in result["benchmarks"]["mine"]
    )
    assert result["overall"]["accuracy"]["difference"] == 0.0 and "mean of" not in text


def test_answers_that_nobody_graded_are_told(tmp_path):
    """Two runs with other numbers of errors: UKGovernmentBEIS/inspect_ai#2914, PR 3781."""
    a = write_run(tmp_path / "a", judge="J", gaia=grades_of(HALF, 1, seed=0, metric="judge"))
    grades = [replace(g, reason="judge_failed") for g in grades_of(HALF, 1, seed=0, metric="judge")]
    records = [
        boxed("1", question_id=g.question_id, stop_reason="error" if i < 3 else "eos") for i, g in enumerate(grades)
    ]
    write_report(tmp_path / "b", {"gaia": records}, {"gaia": grades}, judge="J")
    text, _ = compared(a, tmp_path / "b")
    assert "gaia: b has 40 trajectories that the judge could not be asked about" in text
    assert "gaia: b has 3 trajectories that an infrastructure error cut off; without a grade they count as" in text
    assert "gaia: a has" not in text


def test_several_runs_are_each_compared_with_the_first_under_names_that_tell_them_apart(tmp_path):
    runs = [write_run(tmp_path / name, gaia=grades_of(HALF, 1, seed=0)) for name in ("a", "b", "c", "d/c")]
    text = compare_runs(runs[:3])
    assert "## b - a" in text and "## c - a" in text and "c - b" not in text
    assert (runs[2] / "compare.json").exists() and not (runs[0] / "compare.json").exists()
    assert f"## {runs[3]} - {runs[2]}" in compare_runs(runs[2:])


def test_what_cannot_be_compared_is_one_line(tmp_path):
    good, broken, odd = (
        write_run(tmp_path / name, gaia=grades_of(HALF, 1, seed=0)) for name in ("good", "broken", "odd")
    )
    other = write_run(tmp_path / "other", hle=grades_of(HALF, 1, seed=0))
    (broken / "grades" / "gaia.jsonl").unlink()
    (odd / "scores.json").write_text('{"gaia": 1}')
    for folders, message in [
        ([good], "at least two run folders"),
        ([good, tmp_path / "nowhere"], "nowhere: no evaluation there (scores.json: No such file"),
        ([good, broken], "gaia.jsonl:1: cannot read the grades"),
        ([good, odd], "odd/scores.json: not the scores of an evaluation"),
        ([good, other], "nothing to compare (gaia is only in good; hle is only in other)"),
    ]:
        with pytest.raises(UserError) as error:
            compare_runs(folders)
        assert message in str(error.value) and "\n" not in str(error.value)
