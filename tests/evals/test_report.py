"""The report: its numbers against a naive computation, and what it says of the graders."""

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from helpers.eval_records import CALL, boxed, record
from helpers.sample_groups import HOSTILE

from arpo.evals import wilson_interval
from arpo.evals.grading import REWARD_ONLY, grade_records
from arpo.evals.records import Grade, Record, read_grades
from arpo.evals.report import write_report
from arpo.evals.scores import accuracy_scores, averages, benchmark_scores


def run_of(benchmark: str, num_questions: int, n: int, *, seed: int = 0, **other) -> list[Record]:
    """Some right, some wrong, some without an answer; with calls that sometimes fail."""
    rng, records = random.Random(seed), []
    for q, sample in itertools.product(range(num_questions), range(n)):
        calls = [
            replace(CALL, ok=ok, error_kind=None if ok else "timeout", seconds=rng.random())
            for ok in rng.choices([True, False], weights=[4, 1], k=rng.randint(0, 3))
        ]  # fmt: skip
        fields = {
            "benchmark": benchmark, "question_id": f"q{q:02}", "sample": sample, "question": f"question {q}?",
            "answers": [f"{q}", f"number {q}"], "num_tokens": rng.randint(10, 99), "num_sampled_tokens": 5,
            "wall_s": rng.random(), "tool_calls": calls, "stop_reason": rng.choice(["eos", "eos", "length"]),
        }  # fmt: skip
        fields |= {name: value(q) for name, value in other.items()}
        chance = rng.random()
        made = boxed(str(q) if chance < 0.4 else "99 bottles", **fields) if chance < 0.8 else record("hm", **fields)
        records.append(made)
    return records


META = {"overlong": {"bamboogle": 3, "gaia": 0, "hle": 9}, "about": f"made by {HOSTILE}"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """(folder, scores, records, grades) of two benchmarks; one has levels."""
    folder = tmp_path_factory.mktemp("runs") / "eval"
    records = {
        "gaia": run_of("gaia", 12, 5, meta=lambda q: {"split": f"level {q % 3 + 1}"}),
        "bamboogle": run_of("bamboogle", 30, 5, seed=1, question=lambda q: f"question {q} {HOSTILE}"),
    }
    grades = {name: grade_records(of, metric="qa") for name, of in records.items()}
    return folder, write_report(folder, records, grades, **META), records, grades


def test_the_report_begins_with_the_accuracies_and_says_what_was_left_out_and_that_there_was_no_judge(report):
    folder, scores, *_ = report
    text = (folder / "report.md").read_text()
    mean = f"{(scores['gaia']['accuracy'] + scores['bamboogle']['accuracy']) / 2:.3f}"
    assert text.startswith("# eval\n\n- made by &lt;/script>") and "\n## Tools" in text
    first = text.split("\n## ")[1]
    assert first.startswith("Accuracy\n") and f"| mean of 2 (all) |  |  | {mean} [" in first
    assert "| gaia | 12 |" in first and "| bamboogle | 30 (3 left out) |" in first
    assert scores["bamboogle"]["overlong"] == 3 and "overlong" not in scores["gaia"]
    assert "Left out: prompts over eval.max_prompt_tokens." in text
    assert "- No judge: gaia, bamboogle graded by rule (token F1; solved = an F1 of 1)." in text
    assert "| gaia | search |" in text and "| gaia | tool error | search: timeout |" in text
    assert "| gaia | stop | length |" in text
    assert "<img" not in text and "<script" not in text


# -- numbers ---------------------------------------------------------------------------------------------------------


def naive_pass_at_k(correct: list[float], k: int) -> float:
    """Over all choices of k samples: the share that holds a right one."""
    choices = list(itertools.combinations([c >= 1 for c in correct], k))
    return sum(map(any, choices)) / len(choices)


def test_the_scores_are_those_of_a_naive_computation(report):
    _, scores, records, grades = report
    for name, s in scores.items():
        by_question: dict[str, list[float]] = {}
        for r, g in zip(records[name], grades[name], strict=True):
            by_question.setdefault(r.question_id, []).append(g.correct)
        flat = [g.correct for g in grades[name]]
        assert s["accuracy"] == pytest.approx(sum(flat) / len(flat))
        assert s["questions"] == len(by_question) and s["samples"] == 5 and s["trajectories"] == len(flat)
        for k in (1, 2, 4, 5):
            values = [naive_pass_at_k(correct, k) for correct in by_question.values()]
            assert s[f"pass@{k}"] == pytest.approx(sum(values) / len(values))
        assert "pass@3" not in s
        calls = [call for r in records[name] for call in r.trajectory.tool_calls]
        failed = [call for call in calls if not call.ok]
        assert s["tool_calls"] == pytest.approx(len(calls) / len(flat))
        assert s["tools"]["search"]["failed_share"] == pytest.approx(len(failed) / len(calls))
        assert s["tools"]["search"]["seconds"] == pytest.approx(sum(call.seconds for call in calls) / len(calls))
        assert s["tool_errors"] == {"search: timeout": len(failed)}
        assert s["stop_reasons"]["length"] == round(s["truncated"] * len(flat))
        assert s["grade_reasons"] == {"no_answer": sum(r.trajectory.text == "hm" for r in records[name])}
        assert s["response_tokens"] == pytest.approx(np.mean([len(r.trajectory.token_ids) for r in records[name]]))
        assert s["seconds"] == pytest.approx(np.mean([r.wall_s for r in records[name]]))


def test_the_interval_is_over_questions_not_over_their_samples():
    rng, num_covered = random.Random(0), 0
    for trial in range(40):
        easy = [rng.random() < 0.5 for _ in range(40)]  # all samples of a question are alike
        grades = [Grade(f"{q}", i, {}, float(easy[q]), "f1", "") for q in range(40) for i in range(8)]
        s = accuracy_scores(grades, seed=trial)
        num_covered += s["accuracy_low"] <= 0.5 <= s["accuracy_high"]
        assert s["accuracy_high"] - s["accuracy_low"] > 0.2  # over trajectories it would be 0.11
    assert num_covered >= 34


@pytest.mark.parametrize(("correct", "interval"), [(1.0, (0.722, 1.0)), (0.0, (0.0, 0.278))])
def test_ten_answers_that_are_all_right_or_all_wrong_do_not_prove_it(correct, interval):
    """NVIDIA/garak#2033: a bootstrap has no width there. Wilson's bounds for 10 of 10 are those given there."""
    # samples prove nothing more
    grades = [Grade(f"{q}", i, {}, correct, "f1", "") for q in range(10) for i in range(4)]
    s = accuracy_scores(grades)
    assert (s["accuracy_low"], s["accuracy_high"]) == pytest.approx(interval, abs=5e-4)
    more = [Grade(f"{q}", 0, {}, correct, "f1", "") for q in range(90)]
    both = averages({"a": grades, "b": more}, {})["all"]  # weights of a half: as sure as 36 answers
    assert (both["accuracy_low"], both["accuracy_high"]) == pytest.approx(wilson_interval(correct, 36.0))
    assert 0 <= both["accuracy_low"] <= both["accuracy_high"] <= 1


def test_the_order_of_the_records_changes_nothing(report):
    _, scores, records, grades = report
    pairs = list(zip(records["gaia"], grades["gaia"], strict=True))
    random.Random(1).shuffle(pairs)
    assert benchmark_scores(*zip(*pairs, strict=True)) == scores["gaia"]


def test_splits_are_scored_on_their_own_and_cover_the_whole(report):
    _, scores, records, grades = report
    splits = scores["gaia"]["splits"]
    assert list(splits) == ["level 1", "level 2", "level 3"] and "splits" not in scores["bamboogle"]
    assert sum(s["questions"] for s in splits.values()) == 12
    mine = [g.correct for r, g in zip(records["gaia"], grades["gaia"], strict=True) if r.split == "level 2"]
    assert splits["level 2"]["accuracy"] == pytest.approx(np.mean(mine))
    assert np.mean([s["pass@5"] for s in splits.values()]) == pytest.approx(scores["gaia"]["pass@5"])  # 4 in each


def test_benchmarks_count_the_same_in_an_average_whatever_their_size(report):
    _, scores, _, grades = report
    table = averages(grades, {"gaia": "qa", "bamboogle": "qa"})
    assert list(table) == ["qa", "all"] and table["qa"]["accuracy"] == table["all"]["accuracy"]
    assert table["all"]["accuracy"] == pytest.approx((scores["gaia"]["accuracy"] + scores["bamboogle"]["accuracy"]) / 2)
    assert table["all"]["accuracy_low"] < table["all"]["accuracy"] < table["all"]["accuracy_high"]
    assert averages(grades, {"gaia": "deepsearch", "bamboogle": "qa"}).keys() == {"all"}


def test_a_question_with_fewer_samples_counts_only_where_it_can():
    grades = [Grade("a", i, {}, float(i == 0), "f1", "") for i in range(4)] + [Grade("b", 0, {}, 0.0, "f1", "")]
    s = benchmark_scores([boxed("1")] * 5, grades)
    assert (s["pass@1"], s["pass@4"], s["samples"], s["accuracy"]) == (0.125, 1.0, 4, 0.2)


# -- what is written -------------------------------------------------------------------------------------------------


def test_scores_and_grades_are_on_disk_and_the_same_records_make_the_same_files(report, tmp_path):
    folder, scores, records, grades = report
    assert json.loads((folder / "scores.json").read_text()) == json.loads(json.dumps(scores))
    assert read_grades(folder / "grades" / "gaia.jsonl") == grades["gaia"]
    assert not list(folder.glob("*.tmp"))
    tmp_path = tmp_path / folder.name
    write_report(tmp_path, records, grades, **META)
    for name in ("scores.json", "report.md", "grades/gaia.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_judges_failures_are_told(tmp_path):
    reasons = ["judge_unparsable", "judge_unparsable", "judge_failed", ""]
    grades = [Grade(f"q{i}", 0, {"em": 0.0, "f1": 0.5}, 0.0, "judge", reason) for i, reason in enumerate(reasons)]
    scores = write_report(tmp_path, {"hle": [boxed("1")] * 4}, {"hle": grades}, judge="J")
    text = (tmp_path / "report.md").read_text()
    assert "- Judge: J graded hle." in text
    assert "2 trajectories with a judgement that is not clearly a verdict; they count as not correct" in text
    assert "1 trajectories that the judge could not be asked about" in text
    assert scores["hle"]["judge"] == "J" and scores["hle"]["f1"] == 0.5 and list(scores) == ["hle"]


def test_a_reward_without_an_accuracy_has_no_pass_at_k_and_is_in_no_mean(tmp_path):
    """lm-evaluation-harness#3986: a mean over tasks needs one metric. Until now 1.125 and 0.75 had a mean here."""
    records = {name: [boxed("1", question_id=f"q{i}") for i in range(4)] for name in ("mine", "gaia", "hle")}
    metrics = {"mine": REWARD_ONLY, "gaia": "f1", "hle": "f1"}
    grades = {
        name: [Grade(f"q{i}", 0, {}, value, metrics[name], "") for i, value in enumerate(values)]
        for name, values in {"mine": [3.0, -1.0, 2.5, 0.0], "gaia": [1.0, 0.0, 1.0, 1.0], "hle": [0.0] * 4}.items()
    }
    scores = write_report(tmp_path, records, grades, reward="paper")
    assert scores["mine"]["accuracy"] == 1.125 and "pass@1" not in scores["mine"] and scores["gaia"]["pass@1"] == 0.75
    report = (tmp_path / "report.md").read_text()
    assert "| mean of 2 (all) |  |  | 0.375 [" in report and "mean of 3" not in report
    assert "| mine | 4 | 1 | 1.125 [-0.500, 2.750] |  | reward, no accuracy |" in report
