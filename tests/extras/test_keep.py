"""Keeping the questions that a model solves now and then."""

import subprocess
import sys

import pytest
from helpers.eval_records import record, saved
from helpers.files import read_jsonl, write_jsonl
from helpers.ranks import ROOT

from arpo.data import load_prompts
from arpo.errors import UserError
from arpo.evals.grading import question_digest
from arpo.evals.records import Grade, write_grades
from arpo.trajectory import Group, Prompt
from extras.keep import keep

NUM_RIGHT = {0: 0, 1: 1, 2: 2, 3: 4}
"""Row of the file -> how many of its four samples are right; row 4 was not evaluated."""


@pytest.fixture
def rated(tmp_path):
    """A file of five questions, and the grades of four samples of four of them."""
    rows = [{"question": f"{i} + 1?", "answer": i + 1, "level": i} for i in range(5)]
    data = write_jsonl(tmp_path / "own.jsonl", rows)
    grades = [
        Grade(f"own-{row:06d}", sample, {}, float(sample < right), "reward", "",
              question_digest=question_digest(f"{row} + 1?", [str(row + 1)]))
        for row, right in NUM_RIGHT.items()
        for sample in range(4)
    ]  # fmt: skip
    write_grades(tmp_path / "run" / "grades" / "own.jsonl", grades)
    return tmp_path / "run", data, tmp_path / "kept.jsonl"


def test_what_is_solved_now_and_then_is_kept_with_its_rate_and_the_bounds_belong_to_it(rated):
    told = keep(*rated)
    assert "2 kept, 1 solved less often, 1 solved more often, 1 not evaluated" in told
    assert read_jsonl(rated[2]) == [
        {"question": "1 + 1?", "answer": 2, "level": 1, "pass_rate": 0.25},
        {"question": "2 + 1?", "answer": 3, "level": 2, "pass_rate": 0.5},
    ]
    assert [p.meta["pass_rate"] for p in load_prompts(rated[2])] == [0.25, 0.5]
    keep(*rated, low=0.5, high=1.0)
    assert [row["level"] for row in read_jsonl(rated[2])] == [2, 3]


@pytest.mark.parametrize("reward", [-1.0, 1.5])
def test_rewards_are_no_pass_rates(rated, reward):
    """The grade of a reward without an accuracy is the reward."""
    run, data, out = rated
    digest = question_digest("0 + 1?", ["1"])
    grade = Grade("own-000000", 0, {}, reward, "reward, no accuracy", "", question_digest=digest)
    write_grades(run / "grades" / "own.jsonl", [grade])
    with pytest.raises(
        UserError, match=rf"a grade is {reward:g}, and no share of what is right; let reward\.file return"
    ):
        keep(run, data, out)


def test_a_sample_that_an_infrastructure_error_cut_off_says_nothing_about_the_question(rated):
    """strands-env 98: samples without a verdict were counted as failures of the policy."""
    run = rated[0]
    stops = {"own-000000": ["error"] * 4, "own-000002": ["eos", "eos", "error", "error"]}  # question 2: both right
    groups = [
        Group(Prompt(question, [{"role": "user", "content": "?"}], ["1"], "own"), [
            record("<think>t</think>", question_id=question, sample=sample, stop_reason=stop).trajectory
            for sample, stop in enumerate(stops_of_question)
        ])
        for question, stops_of_question in stops.items()
    ]  # fmt: skip
    saved(run, groups, "own", "reward")
    told = keep(*rated)
    assert "1 kept, 0 solved less often, 2 solved more often, 2 not evaluated" in told
    assert [row["level"] for row in read_jsonl(rated[2])] == [1]


def test_other_questions_and_nothing_to_keep_are_refused(rated):
    run, data, out = rated
    with pytest.raises(UserError, match=r"0 kept.*--low"):
        keep(*rated, low=0.6, high=0.7)
    with pytest.raises(UserError, match="not the data itself"):
        keep(run, data, data)
    with pytest.raises(UserError, match="low <= high"):
        keep(*rated, low=0.9, high=0.1)
    data.write_text(data.read_text().replace("2 + 1?", "2 + 5?"))
    with pytest.raises(UserError, match="own-000002 is another question"):
        keep(*rated)
    assert not out.exists()


def test_the_command_answers_in_one_line(rated):
    run, data, out = rated
    command = [sys.executable, "-m", "extras.keep", str(run), str(data), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(f"{out}: 2 kept")
    (run / "grades" / "own.jsonl").unlink()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "own.jsonl" in done.stderr
