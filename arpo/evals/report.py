"""The report of an evaluation: RUN/{scores.json, report.md, grades/<benchmark>.jsonl}.

All of it is made of records and grades, so that it can be made again at any time, and comes out the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from arpo.config.rewards import RewardConfig
from arpo.errors import UserError
from arpo.evals.benchmarks import BENCHMARKS
from arpo.evals.grading import REWARD_ONLY, grade_records
from arpo.evals.judge import Judge
from arpo.evals.records import Grade, Record, grades_path, read_records, write_grades
from arpo.evals.resume import about_run
from arpo.evals.scores import MEANS, MUTED, Scores, averages, benchmark_scores
from arpo.evals.tables import Table, markdown_report, replace_file, with_interval
from arpo.log.settings import begun_settings, settings_of
from arpo.rewards import load_custom

JUDGE_REASONS = {
    "judge_unparsable": "with a judgement that is not clearly a verdict",
    "judge_failed": "that the judge could not be asked about (grading again asks again)",
}


def grade_and_report(run: Path, reward: RewardConfig, judge: Judge | None) -> None:
    """Grade all records of a run, write its report, and say where that is. Raises UserError where there are none."""
    if begun_settings(run).get("script") != "evaluate":
        raise UserError(f"{run / 'config.yaml'}: no settings of evaluate.py; is {run} the folder of an evaluation?")
    found: dict[str, list[Record]] = {}
    for record in read_records(run):
        found.setdefault(record.benchmark, []).append(record)
    if not found:
        raise UserError(f"{run}: there is no finished trajectory; evaluate first")
    by_name = {name: found[name] for name in [*BENCHMARKS, *found] if name in found}  # benchmarks in their own order
    custom = load_custom("reward.file", reward.function) if reward.file else None
    grades = {
        name: grade_records(records, metric=records[0].metric, judge=judge, reward=reward, custom=custom)
        for name, records in by_name.items()
    }
    about, overlong = about_run(run)
    name, seed = judge.cfg.model if judge else "", settings_of(run).get("run.seed", 0)
    write_report(run, by_name, grades, judge=name, seed=seed, overlong=overlong, about=about)
    if judge is not None:
        judge.close()
    print("\n## ".join((run / "report.md").read_text().split("\n## ")[:2]))  # its head and the first table
    print(f"all tables: {run / 'report.md'}\nevery trajectory: arpo-view {run}")


def write_report(
    folder: Path,
    records_by_benchmark: Mapping[str, Sequence[Record]],
    grades_by_benchmark: Mapping[str, Sequence[Grade]],
    *,
    judge: str = "",
    seed: int = 0,
    overlong: Mapping[str, int] | None = None,
    about: str = "",
) -> dict[str, Scores]:
    """Write all files of the report; returns the scores by benchmark, as in scores.json.

    A benchmark's grades stand in the order of its records. `judge`: name of its model; `seed`: of the bootstrap;
    `overlong`: set -> number of its questions that were left out; `about`: a line about the run.
    """
    scores: dict[str, Scores] = {}
    for name, records in records_by_benchmark.items():
        scores[name] = s = benchmark_scores(records, grades_by_benchmark[name], seed=seed)
        if s["metric"] == "judge":
            s["judge"] = judge
        if num_overlong := (overlong or {}).get(name):
            s["overlong"] = num_overlong
    families = {name: benchmark.family for name, benchmark in BENCHMARKS.items()}
    tables = report_tables(scores, averages(grades_by_benchmark, families, seed=seed))
    notes = [*([about] if about else []), *notes_on(scores, judge)]

    folder.mkdir(parents=True, exist_ok=True)
    for name, grades in grades_by_benchmark.items():
        write_grades(grades_path(folder, name), grades)
    replace_file(folder / "report.md", [markdown_report(folder.resolve().name, notes, tables)])
    replace_file(folder / "scores.json", [json.dumps(scores, indent=1), "\n"])  # last: what is there is whole
    return scores


def notes_on(scores: Mapping[str, Scores], judge: str) -> list[str]:
    """Return lines that say which sets are a control, who graded, and how often that went wrong."""
    notes = [f"SET{MUTED}: all tool calls were refused."] if any(name.endswith(MUTED) for name in scores) else []
    if judged := [name for name, s in scores.items() if "judge" in s["metric"]]:
        notes.append(f"Judge: {judge or 'unnamed'} graded {', '.join(judged)}.")
    if ruled := [name for name, s in scores.items() if s["metric"] == "f1"]:
        notes.append(f"No judge: {', '.join(ruled)} graded by rule (token F1; solved = an F1 of 1).")
    if unknown := [name for name, s in scores.items() if REWARD_ONLY in s["metric"]]:
        notes.append(f"No accuracy of {', '.join(unknown)}: --reward.file returns none; its column has the reward.")
    for reason, words in JUDGE_REASONS.items():
        if number := sum(s["grade_reasons"].get(reason, 0) for s in scores.values()):
            notes.append(f"{number} trajectories {words}; they count as not correct.")
    return notes


# ---- tables


def report_tables(scores: Mapping[str, Scores], averages: Mapping[str, Scores]) -> list[Table]:
    """Return all tables that are not empty."""
    means = {f"mean of {s['benchmarks']} ({family})": s for family, s in averages.items()}
    tables = [_main_table(scores, means), _pass_table({**scores, **means})]
    tables += [make(scores) for make in (_splits_table, _metrics_table, _tools_table, _failures_table)]
    return [table for table in tables if table.rows]


def _accuracy(s: Scores) -> str:
    return with_interval(s["accuracy"], s["accuracy_low"], s["accuracy_high"])


def _pass_n(s: Scores) -> str:
    return f"{s['pass@' + str(s['samples'])]:.3f}"


def _numbers(s: Scores, names: Sequence[str]) -> list[str]:
    return [f"{s[name]:.3f}" if name in s else "" for name in names]


def _main_table(scores: Mapping[str, Scores], means: Mapping[str, Scores]) -> Table:
    head = ["benchmark", "questions", "n", "accuracy [95 %]", "pass@n", "grader", "well-formed", "calls", "tokens"]
    rows = [
        [
            name, f"{s['questions']} ({s['overlong']} left out)" if "overlong" in s else str(s["questions"]),
            str(s["samples"]), _accuracy(s), _pass_n(s), s["metric"],
            f"{s['well_formed']:.3f}", f"{s['tool_calls']:.2f}", f"{s['response_tokens']:.0f}",
            f"{s['seconds']:.1f}", f"{s['truncated']:.3f}",
        ]
        for name, s in scores.items()
    ]  # fmt: skip
    rows += [[name, "", "", _accuracy(s), *[""] * 7] for name, s in means.items()]
    note = "accuracy: mean over questions and n samples, intervals over questions; calls, tokens, seconds: means over "
    note += "trajectories; truncated: share that ran out of tokens. Left out: prompts over eval.max_prompt_tokens."
    return Table("Accuracy", [*head, "seconds", "truncated"], rows, note)


def _pass_table(scores: Mapping[str, Scores]) -> Table:
    columns = sorted({k for s in scores.values() for k in s if k.startswith("pass@")}, key=lambda k: int(k[5:]))
    rows = [[name, *_numbers(s, columns)] for name, s in scores.items()]
    return Table("Pass@k", ["benchmark", *columns], rows if len(columns) > 1 else [], "Unbiased estimates.")


def _splits_table(scores: Mapping[str, Scores]) -> Table:
    rows = [
        [name, split, str(s["questions"]), _accuracy(s), _pass_n(s)]
        for name, whole in scores.items()
        for split, s in whole.get("splits", {}).items()
    ]
    return Table("Splits", ["benchmark", "split", "questions", "accuracy [95 %]", "pass@n"], rows)


def _metrics_table(scores: Mapping[str, Scores]) -> Table:
    columns = [name for name in MEANS if any(name in s for s in scores.values())]
    rows = [[name, *_numbers(s, columns)] for name, s in scores.items()]
    note = "Means over trajectories, whatever the grader of the accuracy is."
    return Table("Rule-based metrics", ["benchmark", *columns], rows if columns else [], note)


def _tools_table(scores: Mapping[str, Scores]) -> Table:
    head = ["benchmark", "tool", "calls per trajectory", "failed", "cached", "seconds per call"]
    rows = [
        [name, tag, f"{s['calls']:.2f}", *_numbers(s, ["failed_share", "cached_share"]), f"{s['seconds']:.2f}"]
        for name, whole in scores.items()
        for tag, s in whole["tools"].items()
    ]
    return Table("Tools", head, rows)


def _failures_table(scores: Mapping[str, Scores]) -> Table:
    kinds = {"stop_reasons": "stop", "grade_reasons": "grade", "tool_errors": "tool error"}
    rows = [
        [name, words, reason, str(count), f"{count / s['trajectories']:.3f}"]
        for name, s in scores.items()
        for kind, words in kinds.items()
        for reason, count in s[kind].items()
    ]
    return Table("Stops and failures", ["benchmark", "what", "reason", "count", "per trajectory"], rows)
