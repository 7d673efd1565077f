"""Compares evaluated runs with the first run: paired differences on the questions answered by both.

    python -m extras.compare RUN_A RUN_B        # also written to RUN_B/compare.{md,json}

Pairing removes the difficulty of the questions. So it can show a difference hidden by the two separate intervals.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from arpo.errors import UserError
from arpo.evals import bootstrap_means, interval_of, mean
from arpo.evals.grading import REWARD_ONLY
from arpo.evals.records import grades_path, read_grades
from arpo.evals.report import JUDGE_REASONS
from arpo.evals.scores import MUTED, Scores, correct_by_question, ks_of, pass_values
from arpo.evals.tables import Table, markdown_report, replace_file, with_interval
from arpo.start.load import run_or_exit
from arpo.trajectory import StopReason

ByQuestion = dict[str, list[float]]
"""Question -> `correct` of the samples."""
Differences = dict[str, list[float]]
"""Score (accuracy, pass@2, ...) -> run minus reference, a number per common question."""


@dataclass(frozen=True)
class EvaluatedRun:
    """The parts of a run for a comparison."""

    name: str
    benchmarks: dict[str, ByQuestion]
    graders: dict[str, str]
    """Benchmark -> grader, like "f1" or "judge (Qwen2.5-72B)". Numbers of different graders are not compared."""
    doubts: dict[str, list[str]]
    """Benchmark -> lines about trajectories that count as not correct, whatever they answered."""


def compare_runs(folders: Sequence[str | Path], *, seed: int = 0) -> str:
    """Return the comparison as Markdown, after writing it to the last folder as compare.{md,json}.

    Raises UserError for a folder without an evaluation, and if nothing can be compared.
    """
    if len(folders) < 2:
        raise UserError("name at least two run folders; the first is what the others are compared with")
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    reference, *others = [read_evaluated(Path(folder), name) for folder, name in zip(folders, names, strict=True)]
    results = {f"{run.name} - {reference.name}": compare_pair(run, reference, seed=seed) for run in others}
    if not any(result["benchmarks"] for result in results.values()):
        reasons = "; ".join(line for result in results.values() for line in result["left_out"])
        raise UserError(f"nothing to compare ({reasons or 'no benchmark'}); grade the runs alike")
    head = "Mean over the questions that both answered, with 95 % bootstrap intervals; * = the interval is without 0."
    notes = [head, *(f"{title}: {line}" for title, result in results.items() for line in result["left_out"])]
    text = markdown_report("Comparison", notes, [_table(title, result) for title, result in results.items()])
    folder = Path(folders[-1])
    replace_file(folder / "compare.json", [json.dumps(results, indent=1), "\n"])
    replace_file(folder / "compare.md", [text])
    return text


def read_evaluated(folder: Path, name: str) -> EvaluatedRun:
    """Read a run's grades. Raises UserError if the folder has no finished evaluation."""
    with scores_of(folder) as scores:
        graders = {b: grader_of(s) for b, s in scores.items()}
        doubts = {b: [f"{b}: {name} has {line}" for line in doubts_about(s)] for b, s in scores.items()}
    benchmarks = {}
    for benchmark in scores:
        grades = read_grades(grades_path(folder, benchmark))
        # the same number in two versions of a test set means two different questions
        grades = [replace(g, question_id=f"{g.question_id} {g.question_digest}") for g in grades]
        benchmarks[benchmark] = correct_by_question(grades)
    return EvaluatedRun(name, benchmarks, graders, doubts)


def grader_of(s: Scores) -> str:
    """Return the name of a benchmark's grader: the metric, with the judge's model or the reward's function."""
    behind = s.get("judge") if s["metric"] == "judge" else s.get("rewarded_by")
    return s["metric"] if behind is None else f"{s['metric']} ({behind})"


def doubts_about(s: Scores) -> Iterator[str]:
    """Yield a text about each kind of trajectories whose answers were not graded."""
    kinds = {words: s["grade_reasons"].get(reason, 0) for reason, words in JUDGE_REASONS.items()}
    kinds["that an infrastructure error cut off"] = s["stop_reasons"].get(StopReason.ERROR, 0)
    for words, count in kinds.items():
        if count:
            yield f"{count} trajectories {words}; without a grade they count as not correct"


@contextmanager
def scores_of(folder: Path) -> Iterator[dict]:
    """Yield the contents of a run's scores.json. Raises UserError for a missing file, or for an unexpected form."""
    try:
        yield json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{folder}: no evaluation there (scores.json: {error.strerror}); pass runs/NAME") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{folder}/scores.json: not the scores of an evaluation ({error!r}); regrade the run") from None


def compare_pair(run: EvaluatedRun, reference: EvaluatedRun, *, seed: int = 0) -> dict:
    """Return {benchmarks: name -> numbers, overall: numbers, left_out: lines about the parts left out or not graded}.

    As in a report, control sets (MUTED) and rewards without an accuracy do not count in `overall`.
    """
    differences: dict[str, Differences] = {}
    table: dict[str, dict] = {}
    left_out = []
    for name in sorted(set(run.benchmarks) | set(reference.benchmarks)):
        if name not in run.benchmarks or name not in reference.benchmarks:
            left_out.append(f"{name} is only in {run.name if name in run.benchmarks else reference.name}")
            continue
        if run.graders[name] != reference.graders[name]:
            left_out.append(f"{name} has different graders: {run.graders[name]}, {reference.graders[name]}")
            continue
        own = run.benchmarks[name]
        other = reference.benchmarks[name]
        common = sorted(set(own) & set(other))
        if missing := len(set(own) ^ set(other)):
            left_out.append(f"{name}: {missing} questions are only in one of the two")
        if common:
            left_out += [*reference.doubts[name], *run.doubts[name]]
            own, other = {q: own[q] for q in common}, {q: other[q] for q in common}
            differences[name] = question_differences(own, other)
            if REWARD_ONLY in run.graders[name]:  # pass@k is of right and wrong samples
                differences[name] = {"accuracy": differences[name]["accuracy"]}
            table[name] = {
                "questions": len(common),
                "reference": mean(mean(samples) for samples in other.values()),
                "run": mean(mean(samples) for samples in own.values()),
                **estimates([differences[name]], seed=seed),
            }
    counted = [
        found
        for name, found in differences.items()
        if not name.endswith(MUTED) and REWARD_ONLY not in run.graders[name]
    ]
    return {
        "benchmarks": table,
        "overall": {"benchmarks": len(counted), **estimates(counted, seed=seed)} if counted else {},
        "left_out": left_out,
    }


def question_differences(own: ByQuestion, other: ByQuestion) -> Differences:
    """Return the differences of two runs over the same questions in the same order.

    Pass@k is included only if both runs have k samples of every question.
    """
    fewest = min(len(samples) for samples in [*own.values(), *other.values()])
    found = {"accuracy": [float(np.mean(own[q]) - np.mean(other[q])) for q in own]}
    for k in ks_of(fewest):
        if k > 1:
            pairs = zip(pass_values(own.values(), k), pass_values(other.values(), k), strict=True)
            found[f"pass@{k}"] = [a - b for a, b in pairs]
    return found


def estimates(parts: Sequence[Differences], *, seed: int) -> dict[str, dict[str, float]]:
    """Score -> {difference, low, high}, each a mean over the parts (benchmarks) with equal weights."""
    found = {}
    for score in [score for score in parts[0] if all(score in part for part in parts)]:
        resampled = [bootstrap_means(part[score], seed=(seed, number)) for number, part in enumerate(parts)]
        low, high = interval_of(np.mean(resampled, axis=0))
        found[score] = {"difference": mean(mean(part[score]) for part in parts), "low": low, "high": high}
    return found


def _table(title: str, result: dict) -> Table:
    rows_of = {**result["benchmarks"]}
    num_counted = result["overall"].get("benchmarks", 0)
    if num_counted > 1:
        rows_of[f"mean of {num_counted}"] = result["overall"]
    columns = {k for numbers in rows_of.values() for k in numbers if k.startswith("pass@")}
    columns = sorted(columns, key=lambda k: int(k[len("pass@") :]))
    head = ["benchmark", "questions", "reference", "run", "difference [95 %]", *(f"{k} difference" for k in columns)]
    rows = [
        [
            name,
            str(numbers.get("questions", "")),
            *(f"{numbers[k]:.3f}" if k in numbers else "" for k in ("reference", "run")),
            *(_difference(numbers[k]) if k in numbers else "" for k in ("accuracy", *columns)),
        ]
        for name, numbers in rows_of.items()
    ]
    return Table(title, head, rows)


def _difference(d: dict[str, float]) -> str:
    star = " *" if d["low"] > 0 or d["high"] < 0 else ""
    return with_interval(d["difference"], d["low"], d["high"], sign="+") + star


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.compare", description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of evaluations; the first is the reference")
    print(run_or_exit(compare_runs, parser.parse_args().runs))


if __name__ == "__main__":
    main()
