"""The numbers that the papers report, in percent, to stand beside ours. Users could not reproduce several of them.

AEPO's (arXiv 2510.14545) are those of its abstract. ARPO's (arXiv 2507.19849, tables 1 and 2) were collected from
secondary sources: check with the paper before citing. Numbers known from memory or one unsure source are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arpo.evals.scores import Scores
from arpo.evals.tables import Table

SOURCES = (
    "Claims of ARPO (arXiv 2507.19849; from secondary sources) and AEPO (arXiv 2510.14545; its abstract); users could "
    "not reproduce several of them. They compare with ours only where model, grader and questions are the same."
)
PAPERS = "The papers' numbers"
"""Title of their table."""
MARK = "\N{DAGGER}"
"""Stands behind a number of ours that the papers' cannot be compared with."""
F1, JUDGE = "token F1", "72B judge"
"""The papers' graders: F1 for knowledge questions; Qwen2.5-72B-Instruct for math and deep search."""
NUM_QUESTIONS = {
    "aime24": 30, "aime25": 30, "math500": 500, "gsm8k": 1319, "math": 5000,
    "hotpotqa": 200, "2wiki": 200, "musique": 200, "bamboogle": 125, "webwalker": 200,
    "gaia": 103, "gaia: level 1": 39, "gaia: level 2": 52, "gaia: level 3": 12, "hle": 500, "xbench": 100,
}  # fmt: skip
"""Questions in the released test files, splits included (of MATH, whose file is empty there: in MATH's test set).

The released script asks at most 500 of a set unless told otherwise, so the papers' may be over fewer of GSM8K and MATH.
"""


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


def _rows(model: str, method: str, metric: str, *, score: str = "pass@1", **percents: float) -> list[Published]:
    return [Published(name, score, percent, model, method, metric) for name, percent in percents.items()]


_3B, _7B, _LLAMA = "Qwen2.5-3B", "Qwen2.5-7B", "Llama3.1-8B"
_8B, _14B = "Qwen3-8B", "Qwen3-14B"
PUBLISHED: tuple[Published, ...] = (
    *_rows(_3B, "ARPO", JUDGE, aime24=23.3, aime25=20.0),
    *_rows(_3B, "ARPO", F1, webwalker=24.5, hotpotqa=58.5, **{"2wiki": 67.4}, musique=28.7, bamboogle=66.8),
    *_rows(_LLAMA, "ARPO", JUDGE, aime25=16.7),
    *_rows(_LLAMA, "ARPO", F1, hotpotqa=65.4, **{"2wiki": 75.5}, musique=34.8, bamboogle=73.8),
    *_rows(_7B, "ARPO", JUDGE, aime24=30.0, aime25=30.0, math500=78.8, gsm8k=92.2, math=88.8),
    *_rows(_7B, "ARPO", F1, webwalker=26.0, hotpotqa=58.8, **{"2wiki": 76.1}, musique=31.1, bamboogle=71.5),
    *_rows(_8B, "GRPO", JUDGE, gaia=32.0, webwalker=29.0, hle=7.8, xbench=20.0),
    *_rows(_8B, "GRPO", JUDGE, **{"gaia: level 1": 48.7, "gaia: level 2": 25.0, "gaia: level 3": 8.3}),
    *_rows(_8B, "ARPO", JUDGE, gaia=38.8, webwalker=30.5, hle=8.8, xbench=25.0),
    *_rows(_8B, "ARPO", JUDGE, **{"gaia: level 1": 53.9, "gaia: level 2": 32.7, "gaia: level 3": 16.7}),
    *_rows(_14B, "GRPO", JUDGE, gaia=36.9, webwalker=30.0, hle=8.6, xbench=27.0),
    *_rows(_14B, "GRPO", JUDGE, **{"gaia: level 1": 51.3, "gaia: level 2": 34.6, "gaia: level 3": 0.0}),
    *_rows(_14B, "ARPO", JUDGE, gaia=43.7, webwalker=36.0, hle=10.0, xbench=32.0),
    *_rows(_14B, "ARPO", JUDGE, **{"gaia: level 1": 56.4, "gaia: level 2": 40.4, "gaia: level 3": 16.7}),
    *_rows(_14B, "ARPO", JUDGE, score="pass@5", gaia=61.2, hle=24.0, xbench=59.0),
    *_rows(_14B, "AEPO", JUDGE, gaia=47.6, hle=11.2, webwalker=43.0),
    *_rows(_14B, "AEPO", JUDGE, score="pass@5", gaia=65.0, hle=26.0, webwalker=70.0),
)

TEN = ("aime24", "aime25", "math500", "gsm8k", "math", "webwalker", "hotpotqa", "2wiki", "musique", "bamboogle")
"""Benchmarks of ARPO's table 1, whose mean is its headline number."""
TEN_AVERAGES: tuple[tuple[str, str, float], ...] = (
    (_3B, "ARPO", 52.8),
    (_3B, "GRPO", 50.4),
    (_LLAMA, "ARPO", 55.3),
    (_LLAMA, "GRPO", 51.1),
    (_7B, "ARPO", 58.3),
    (_7B, "GRPO", 56.5),
)
"""(model, method, percent): means over TEN."""


def papers_table(scores: Mapping[str, Scores]) -> Table:
    """A row per benchmark, split, score and grader: our number, those of the papers' models, and in what they differ.

    `scores` are by benchmark; the name of a judge stands in them as "judge".
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, whole in scores.items():
        for theirs in published_for(name):
            split = theirs.benchmark.partition(": ")[2]
            ours = whole.get("splits", {}).get(split, {}) if split else whole
            # their F1 stands beside our F1 even where a judge has graded ours
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
        cells = ("mean of ten", "pass@1", ours, "".join(reasons), "as above", "as above")
        rows[cells] = [f"{model} {method} {percent:.1f}" for model, method, percent in TEN_AVERAGES]
    head = ["benchmark", "score", "ours", "not alike", "our grader", "their grader", "their models"]
    models = [[*cells, "; ".join(found)] for cells, found in rows.items()]
    note = f"In percent. {MARK} = cannot be compared with theirs, for the reason beside it. {SOURCES}"
    return Table(PAPERS, head, models, note)


def _percent(value: float | None, reasons: list[str]) -> str:
    return "" if value is None else f"{100 * value:.1f}{f' {MARK}' if reasons else ''}"


def differences(theirs: Published, num_questions: int, grader: str, judge: str) -> list[str]:
    """Return in what a number of ours, over so many questions, differs from the paper's, besides the model."""
    reasons, published = [], NUM_QUESTIONS[theirs.benchmark]
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
    """Return in what our accuracy differs from the number that the mean of ten was made of, ARPO's of the 7B model."""
    theirs = next(row for row in PUBLISHED if (row.benchmark, row.model, row.method) == (name, _7B, "ARPO"))
    return differences(theirs, s["questions"], s["metric"], s.get("judge", ""))


def published_for(benchmark: str) -> list[Published]:
    """Return the papers' numbers of a benchmark and its splits."""
    return [row for row in PUBLISHED if row.benchmark.split(":")[0] == benchmark]
