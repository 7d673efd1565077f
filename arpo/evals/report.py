"""The report of an evaluation: RUN/{scores.json, report.md, grades/<benchmark>.jsonl}.

All of it is made of records and grades, so that it can be made again at any time, and comes out the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arpo.config.evals import JudgeConfig
from arpo.config.rewards import RewardConfig
from arpo.evals.about import left_out, read_sessions, settings_rows
from arpo.evals.benchmarks import BENCHMARKS
from arpo.evals.grades import Grade, grades_path, write_grades
from arpo.evals.grading import REWARD_ONLY, grade_records
from arpo.evals.judge import Judge
from arpo.evals.records import Record, read_records
from arpo.evals.resume import read_settings
from arpo.evals.scores import ALL, MEANS, MUTED, Scores, averages, benchmark_scores
from arpo.evals.tables import Table, markdown_report, replace_file, with_interval
from arpo.rewards import load_custom

JUDGE_REASONS = {
    "judge_unparsable": "with a judgement that is not clearly a verdict",
    "judge_failed": "that the judge could not be asked about (grading again asks again)",
}


@dataclass(frozen=True)
class RunMeta:
    """Facts about the run that a report states besides its numbers."""

    title: str
    """Name of the run."""
    judge: str = ""
    """Name of the judge's model; "" = there was none."""
    seed: int = 0
    """Seed of the bootstrap."""
    overlong: dict[str, int] = field(default_factory=dict)
    """Set -> number of its questions that were left out because their prompts are too long."""
    settings: Sequence[Sequence[str]] = ()
    """(name, value) of what the run was made with, the most important first."""


def grade_and_report(run: Path, reward: RewardConfig, judge_cfg: JudgeConfig, judge: Judge | None) -> None:
    """Grade all records of a run, write its report, and say where that is."""
    settings, sessions = read_settings(run), read_sessions(run)
    found: dict[str, list[Record]] = {}
    for record in read_records(run):
        found.setdefault(record.benchmark, []).append(record)
    by_name = {name: found[name] for name in [*BENCHMARKS, *found] if name in found}  # benchmarks in their own order
    custom = load_custom("reward.file", reward.function) if reward.file else None
    grades = {
        name: grade_records(records, metric=records[0].metric, judge=judge, reward=reward, custom=custom)
        for name, records in by_name.items()
    }
    meta = RunMeta(
        title=run.resolve().name,
        judge=judge_cfg.model,
        seed=settings["seed"],
        overlong=left_out(sessions),
        settings=settings_rows(settings, sessions, judge_cfg.model),
    )
    write_report(run, by_name, grades, meta)
    if judge is not None:
        judge.close()
    print(summary(run))
    print(f"all tables: {run / 'report.md'}\nevery trajectory: arpo-view {run}")


def write_report(
    folder: Path,
    records_by_benchmark: Mapping[str, Sequence[Record]],
    grades_by_benchmark: Mapping[str, Sequence[Grade]],
    meta: RunMeta,
) -> dict[str, Scores]:
    """Write all files of the report; returns the scores by benchmark, as in scores.json.

    A benchmark's grades stand in the order of its records. A benchmark without any record is left out, and named.
    """
    names = [name for name, records in records_by_benchmark.items() if records]
    grades = {name: grades_by_benchmark[name] for name in names}
    scores = {name: benchmark_scores(records_by_benchmark[name], grades[name], seed=meta.seed) for name in names}
    for name, s in scores.items():
        if s["metric"] == "judge":
            s["judge"] = meta.judge
        if meta.overlong.get(name):
            s["overlong"] = meta.overlong[name]
    empty = [f"{name}: no finished trajectory." for name in records_by_benchmark if name not in scores]
    families = {name: benchmark.family for name, benchmark in BENCHMARKS.items()}
    means = averages(grades, families, seed=meta.seed)
    tables, title = report_tables(scores, means), headline(meta.title, {**scores, **means})
    notes = [*muted_note(scores), *overlong_note(scores), *grader_notes(scores, meta.judge), *empty]
    tables += [Table("Settings", ["setting", "value"], list(map(list, meta.settings)))] if meta.settings else []

    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        write_grades(grades_path(folder, name), grades[name])
    replace_file(folder / "report.md", [markdown_report(title, notes, tables)])
    replace_file(folder / "scores.json", [json.dumps(scores, indent=1), "\n"])  # last: what is there is whole
    return scores


def headline(name: str, scores: Mapping[str, Scores]) -> str:
    """Return a report's title: the run's name, and its accuracy over all sets that are no control, each counting the
    same. {"test": ...} -> "demo_eval: accuracy 0.943 on 400 questions"
    """
    asked = [s for set_name, s in scores.items() if "questions" in s and not set_name.endswith(MUTED)]
    if not asked:
        return name
    word = "reward" if any(REWARD_ONLY in s["metric"] for s in asked) else "accuracy"
    number = f"{word} {scores.get(ALL, asked[0])['accuracy']:.3f}"
    questions = f"{sum(s['questions'] for s in asked):,} questions"
    return f"{name}: " + (
        f"mean {number} of {len(asked)} sets, {questions}" if len(asked) > 1 else f"{number} on {questions}"
    )


def summary(folder: Path) -> str:
    """Return what the console shows of a written report: its head and the first table, accuracy by benchmark."""
    return "\n## ".join((folder / "report.md").read_text().split("\n## ")[:2])


def muted_note(scores: Mapping[str, Scores]) -> list[str]:
    """Return a line about the sets that are a control."""
    return [f"SET{MUTED}: all tool calls were refused."] if any(name.endswith(MUTED) for name in scores) else []


def overlong_note(scores: Mapping[str, Scores]) -> list[str]:
    """Return a line about questions that were left out, as the numbers are then not of the whole set."""
    parts = [
        f"{name}: {s['overlong']} of {s['questions'] + s['overlong']}" for name, s in scores.items() if "overlong" in s
    ]
    words = "Left out, and in no number: questions with longer prompts than eval.max_prompt_tokens"
    return [f"{words} ({', '.join(parts)})."] if parts else []


def grader_notes(scores: Mapping[str, Scores], judge: str) -> list[str]:
    """Return lines that say who graded, and how often that went wrong."""
    notes = []
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


def _questions(s: Scores) -> str:
    return f"{s['questions']} ({s['overlong']} left out)" if "overlong" in s else str(s["questions"])


def _pass_n(s: Scores) -> str:
    return f"{s['pass@' + str(s['samples'])]:.3f}"


def _numbers(s: Scores, names: Sequence[str]) -> list[str]:
    return [f"{s[name]:.3f}" if name in s else "" for name in names]


def _main_table(scores: Mapping[str, Scores], means: Mapping[str, Scores]) -> Table:
    head = ["benchmark", "questions", "n", "accuracy [95 %]", "pass@n", "grader", "well-formed", "calls", "tokens"]
    rows = [
        [
            name, _questions(s), str(s["samples"]), _accuracy(s), _pass_n(s), s["metric"],
            f"{s['well_formed']:.3f}", f"{s['tool_calls']:.2f}", f"{s['response_tokens']:.0f}",
            f"{s['seconds']:.1f}", f"{s['truncated']:.3f}",
        ]
        for name, s in scores.items()
    ]  # fmt: skip
    rows += [[name, "", "", _accuracy(s), *[""] * 7] for name, s in means.items()]
    note = "accuracy: mean over questions and n samples, intervals over questions; calls, tokens, seconds: means over "
    note += "trajectories; truncated: share that ran out of tokens."
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
    kinds = {"failures": "not right", "stop_reasons": "stop", "grade_reasons": "grade", "tool_errors": "tool error"}
    rows = [
        [name, words, reason, str(count), f"{count / s['trajectories']:.3f}"]
        for name, s in scores.items()
        for kind, words in kinds.items()
        for reason, count in s[kind].items()
    ]
    note = "not right: the first thing that kept a trajectory from being right. The others are of all trajectories."
    return Table("Stops and failures", ["benchmark", "what", "reason", "count", "per trajectory"], rows, note)
