"""Prints the numbers of the papers (papers.csv) beside the numbers of an evaluation.

    python -m extras.papers RUN

AEPO's numbers (arXiv 2510.14545) come from the abstract. ARPO's numbers (arXiv 2507.19849, tables 1 and 2) were
collected from secondary sources: check with the paper before citing. Numbers from memory or from a single unsure source
are left out. The line "questions" has the number of questions in the released test files, also for splits
("gaia: level 1"). The released file of MATH is empty, so MATH has the number of MATH's test set. By default the
released script asks at most 500 questions of a set, so the papers may use fewer questions of GSM8K and MATH. The last
column has ARPO's headline numbers, means over TEN. A line with an issue of the released code has a user's measurement,
in words, beside the number compared in the issue.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from arpo.evals.scores import Scores
from arpo.evals.tables import Table, markdown_report
from arpo.start.load import run_or_exit
from extras.compare import scores_of

SOURCES = (
    "Claims of ARPO (arXiv 2507.19849; from secondary sources) and AEPO (arXiv 2510.14545; its abstract); users could "
    "not reproduce several of them: the last column has what they measured, with the issue of the released code where "
    "they say so (not checked by us). They compare with ours only where model, grader and questions are the same."
)
MARK = "\N{DAGGER}"
"""Mark after our number if it cannot be compared with the papers' numbers."""
F1 = "token F1"
JUDGE = "72B judge"
"""The papers' graders: F1 for knowledge questions; Qwen2.5-72B-Instruct for math and deep search."""
TEN = ("aime24", "aime25", "math500", "gsm8k", "math", "webwalker", "hotpotqa", "2wiki", "musique", "bamboogle")
"""Benchmarks of ARPO's table 1."""
MEAN_OF_TEN = "mean of ten"


@dataclass(frozen=True)
class Published:
    """One number of a paper."""

    benchmark: str
    """Name in our table of benchmarks; a split follows a colon ("gaia: level 1")."""
    score: str
    """"pass@1" (mean accuracy) or "pass@5"."""
    percent: float
    model: str
    method: str
    metric: str


def _read() -> tuple[dict[str, int], list[Published], list[tuple[str, str, float]], list[tuple[str, ...]]]:
    """Return four things: the number of questions by benchmark; the papers' numbers; (model, method, percent) of the
    papers' means of ten; and other people's measurements, as (benchmark, score, grader, text).
    """
    text = Path(__file__).with_name("papers.csv").read_text(encoding="utf-8")
    questions, *lines = csv.DictReader(text.splitlines())
    names = list(questions)[5:-1]
    rows = [line for line in lines if not line["issue"]]
    numbers = [
        Published(name, row["score"], float(row[name]), row["model"], row["method"], row["grader"])
        for row in rows
        for name in names
        if row[name]
    ]
    means = [(row["model"], row["method"], float(row[MEAN_OF_TEN])) for row in rows if row[MEAN_OF_TEN]]
    others = [
        (name, line["score"], line["grader"], f"{line['model']} {line['method']} {line[name]} (issue {line['issue']})")
        for line in lines
        for name in names
        if line["issue"] and line[name]
    ]
    return {name: int(questions[name]) for name in names}, numbers, means, others


NUM_QUESTIONS, PUBLISHED, TEN_AVERAGES, OTHERS = _read()


def papers_table(scores: Mapping[str, Scores]) -> Table:
    """A row per benchmark, split, score and grader: our number, the papers' numbers, the differences in the setup, and
    other people's measurements.

    `scores`: benchmark -> scores; the key "judge" has the name of the judge.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, whole in scores.items():
        for theirs in published_for(name):
            split = theirs.benchmark.partition(": ")[2]
            ours = whole.get("splits", {}).get(split, {}) if split else whole
            # the papers' F1 belongs beside our F1, even if a judge has graded our answers
            by_f1 = theirs.metric == F1 and "f1" in ours
            value = ours.get("f1" if by_f1 else "accuracy" if theirs.score == "pass@1" else theirs.score)
            grader = "f1" if by_f1 else whole["metric"]
            reasons = [] if value is None else differences(theirs, ours["questions"], grader, whole.get("judge", ""))
            named = f"judge ({whole['judge']})" if grader == "judge" and whole.get("judge") else grader
            why = "; ".join(reasons) if value is not None else f"ours has no {theirs.score}"
            cells = (theirs.benchmark, theirs.score, _percent(value, reasons), why, named, theirs.metric)
            rows.setdefault(cells, []).append(f"{theirs.model} {theirs.method} {theirs.percent:.1f}")
    if set(TEN) <= set(scores):
        unlike = [name for name in TEN if differences_in_ten(name, scores[name])]
        reasons = [f"in {', '.join(unlike)}"] if unlike else []
        ours = _percent(sum(scores[name]["accuracy"] for name in TEN) / len(TEN), reasons)
        cells = (MEAN_OF_TEN, "pass@1", ours, "".join(reasons), "as above", "as above")
        rows[cells] = [f"{model} {method} {percent:.1f}" for model, method, percent in TEN_AVERAGES]
    head = ["benchmark", "score", "ours", "not alike", "our grader", "their grader", "their models", "others measured"]
    models = [[*cells, "; ".join(found), _others(cells[0], cells[1], cells[-1])] for cells, found in rows.items()]
    note = f"In percent. {MARK} = cannot be compared with theirs, for the reason beside it. {SOURCES}"
    return Table("The papers' numbers", head, models, note)


def _others(benchmark: str, score: str, grader: str) -> str:
    return "; ".join(text for *beside, text in OTHERS if beside == [benchmark, score, grader])


def _percent(value: float | None, reasons: list[str]) -> str:
    return "" if value is None else f"{100 * value:.1f}{f' {MARK}' if reasons else ''}"


def differences(theirs: Published, num_questions: int, grader: str, judge: str) -> list[str]:
    """Return the differences in setup, besides the model, between our number over `num_questions` and the paper's."""
    reasons = []
    published = NUM_QUESTIONS[theirs.benchmark]
    if num_questions < published:
        reasons.append(f"{num_questions} of {published} questions")
    elif num_questions > published:
        reasons.append(f"{num_questions} questions, theirs {published}")
    if grader == "judge" and theirs.metric == JUDGE:
        if "72b" not in judge.lower():
            reasons.append("another judge")
    elif (grader, theirs.metric) != ("f1", F1):
        reasons.append("another grader")
    return reasons


def differences_in_ten(name: str, s: Scores) -> list[str]:
    """Return the differences in setup between our accuracy and ARPO's 7B number, a part of the mean of ten."""
    theirs = next(row for row in PUBLISHED if (row.benchmark, row.model, row.method) == (name, "Qwen2.5-7B", "ARPO"))
    return differences(theirs, s["questions"], s["metric"], s.get("judge", ""))


def published_for(benchmark: str) -> list[Published]:
    """Return the papers' numbers of a benchmark and its splits."""
    return [row for row in PUBLISHED if row.benchmark.split(":")[0] == benchmark]


def report(folder: Path) -> str:
    """Return the papers' numbers beside the run's scores.json, as Markdown. Raises UserError without scores."""
    with scores_of(folder) as scores:
        return markdown_report(folder.resolve().name, [], [papers_table(scores)])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.papers", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the evaluation (runs/NAME)")
    print(run_or_exit(report, parser.parse_args().run))


if __name__ == "__main__":
    main()
