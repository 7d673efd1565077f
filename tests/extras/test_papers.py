"""The papers' numbers beside those of an evaluation: what stands beside what, and what cannot be compared."""

import re
from pathlib import Path

import pytest
from helpers.eval_records import boxed

from arpo.errors import UserError
from arpo.evals.benchmarks import BENCHMARKS
from arpo.evals.records import Grade
from arpo.evals.report import write_report
from extras.papers import NUM_QUESTIONS, OTHERS, PUBLISHED, TEN, report


def beside(folder: Path, grades: dict[str, list[Grade]], judge: str = "", metas: dict[str, dict] | None = None) -> str:
    """The papers' numbers beside those of an evaluation with these grades; `metas` of the questions, by their ids."""
    metas = metas or {}
    records = {
        name: [boxed("1", question_id=g.question_id, sample=g.sample, meta=metas.get(g.question_id)) for g in of]
        for name, of in grades.items()
    }
    write_report(folder, records, grades, judge=judge)
    return report(folder)


def test_a_split_and_other_questions_and_another_grader_are_told(tmp_path):
    levels = {f"q{i}": {"split": f"level {i % 3 + 1}"} for i in range(12)}
    text = beside(tmp_path, {"gaia": [Grade(q, 0, {}, 0.5, "f1", "") for q in levels]}, metas=levels)
    models = r".*Qwen3-14B ARPO 43\.7; Qwen3-14B AEPO 47\.6"
    assert re.search(
        rf"\| gaia \| pass@1 \| 50.0 † \| 12 of 103 questions; another grader \| f1 \| 72B judge \| {models}", text
    )
    assert "| gaia: level 1 | pass@1 | 50.0 † | 4 of 39 questions; another grader |" in text
    assert "mean of ten" not in text


def test_the_mean_of_ten_stands_beside_the_papers_when_all_ten_are_there(tmp_path):
    grades = {name: [Grade("q", 0, {}, float(i < 4), "f1", "")] for i, name in enumerate(TEN)}
    assert f"| mean of ten | pass@1 | 40.0 † | in {', '.join(TEN)} |" in beside(tmp_path, grades)
    for name in ("hotpotqa", "webwalker"):  # all of their questions, by the papers' grader of the ten: token F1
        grades[name] = [Grade(f"q{i}", 0, {}, 0.0, "f1", "") for i in range(NUM_QUESTIONS[name])]
    others = [name for name in TEN if name not in ("hotpotqa", "webwalker")]
    assert f"† | in {', '.join(others)} | as above |" in beside(tmp_path, grades)
    del grades["math"]
    assert "mean of ten" not in beside(tmp_path, grades)


def test_their_f1_stands_beside_our_f1_even_where_a_judge_graded_ours(tmp_path):
    grades = [Grade("q", 0, {"em": 0.0, "f1": 0.25}, 1.0, "judge", "")]
    text = beside(tmp_path, {"webwalker": grades}, judge="J")
    one = "1 of 200 questions"
    assert f"| webwalker | pass@1 | 25.0 † | {one} | f1 | token F1 | Qwen2.5-3B ARPO 24.5;" in text
    judges = "judge (J) | 72B judge"
    assert f"| webwalker | pass@1 | 100.0 † | {one}; another judge | {judges} | Qwen3-8B GRPO 29.0;" in text
    assert f"| webwalker | pass@5 |  | ours has no pass@5 | {judges} | Qwen3-14B AEPO 70.0 |" in text


def test_what_others_measured_stands_beside_the_number_it_was_compared_with(tmp_path):
    grades = [Grade("q", 0, {"f1": 0.5}, 1.0, "f1", "")]
    text = beside(tmp_path, {name: grades for name in ("aime24", "aime25", "webwalker", "gaia")})
    assert "Qwen2.5-7B ARPO 30.0 | Qwen2.5-7B ARPO about 18 (issue 60) |" in text
    assert "Qwen2.5-7B ARPO 26.0 | Qwen2.5-7B ARPO 19.2 by a judge (issue 60) |" in text
    assert "; released ARPO 34.6 (issue 26); a user's SFT 38.2 (issue 26); " in text
    assert text.count("(issue 60)") == 2
    # each is somewhere to be seen
    assert {row[:3] for row in OTHERS} <= {(row.benchmark, row.score, row.metric) for row in PUBLISHED}


def test_only_the_papers_own_questions_and_grader_stand_without_a_mark(tmp_path):
    def papers_row(num_questions: int, judge: str) -> tuple[str, str]:
        grades = [Grade(f"q{i}", 0, {"f1": 0.5}, 1.0, "judge", "") for i in range(num_questions)]
        text = beside(tmp_path, {"xbench": grades}, judge)
        return re.search(r"\| xbench \| pass@1 \| (.*?) \| (.*?) \|", text).groups()

    assert papers_row(100, "Qwen2.5-72B-Instruct-AWQ") == ("100.0", "")
    assert papers_row(100, "Qwen3-8B") == ("100.0 †", "another judge")
    assert papers_row(99, "Qwen2.5-72B-Instruct") == ("100.0 †", "99 of 100 questions")
    assert papers_row(101, "Qwen2.5-72B-Instruct") == ("100.0 †", "101 questions, theirs 100")


def test_the_papers_numbers_are_percentages_of_known_benchmarks():
    assert {row.benchmark.split(":")[0] for row in PUBLISHED} <= set(BENCHMARKS)
    assert all(0 <= row.percent <= 100 and row.score in ("pass@1", "pass@5") for row in PUBLISHED)
    assert {row.benchmark for row in PUBLISHED} == set(NUM_QUESTIONS)
    levels = [NUM_QUESTIONS[f"gaia: level {level}"] for level in (1, 2, 3)]
    assert sum(levels) == NUM_QUESTIONS["gaia"]


def test_a_folder_without_an_evaluation_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"no evaluation there \(scores\.json: No such file"):
        report(tmp_path)
    (tmp_path / "scores.json").write_text('{"gaia": 1}')
    with pytest.raises(UserError, match=r"not the scores of an evaluation"):
        report(tmp_path)
