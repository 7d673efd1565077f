"""The report of an evaluation: RUN/{scores.json, report.md, grades/<benchmark>.jsonl}.

The report depends only on records and grades, so the same report can be written again at any time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from arpo.config.contents import digest_of, paths_in
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
from arpo.trajectory import StopReason

JUDGE_REASONS = {
    "judge_unparsable": "with a judgement that is not clearly a verdict",
    "judge_failed": "that the judge could not be asked about (grading again asks again)",
}


def grade_and_report(run: Path, reward: RewardConfig, judge: Judge | None) -> None:
    """Grade all records of a run, write the report, and print where it is. Raises UserError if there are no records."""
    if begun_settings(run).get("script") != "evaluate":
        raise UserError(f"{run / 'config.yaml'}: no settings of evaluate.py; is {run} the folder of an evaluation?")
    unordered: dict[str, list[Record]] = {}
    for record in read_records(run):
        unordered.setdefault(record.benchmark, []).append(record)
    if not unordered:
        raise UserError(f"{run}: there is no finished trajectory; evaluate first")
    # Benchmarks come in the order of their table, then question files.
    records_by_set = {name: unordered[name] for name in [*BENCHMARKS, *unordered] if name in unordered}
    custom = load_custom("reward.file", reward.function) if reward.file else None
    grades_by_set = {
        name: grade_records(records, metric=records[0].metric, judge=judge, reward=reward, custom=custom)
        for name, records in records_by_set.items()
    }
    about, overlong = about_run(run)
    write_report(
        run,
        records_by_set,
        grades_by_set,
        judge=judge.cfg.model if judge else "",
        reward=name_of(reward),
        seed=settings_of(run).get("run.seed", 0),
        overlong=overlong,
        about=about,
    )
    if judge is not None:
        judge.close()
    print("\n## ".join((run / "report.md").read_text().split("\n## ")[:2]))  # its head and the first table
    print(f"all tables: {run / 'report.md'}\nevery trajectory: arpo-view {run}")


def name_of(reward: RewardConfig) -> str:
    """Return the built-in reward's name, or the name of a custom function with the digest of its file."""
    if not reward.file:
        return reward.compat
    [file] = paths_in(reward.function)
    return f"{Path(reward.function).name} {digest_of(file)}"


def write_report(
    folder: Path,
    records_by_benchmark: Mapping[str, Sequence[Record]],
    grades_by_benchmark: Mapping[str, Sequence[Grade]],
    *,
    judge: str = "",
    reward: str = "",
    seed: int = 0,
    overlong: Mapping[str, int] | None = None,
    about: str = "",
) -> dict[str, Scores]:
    """Write all files of the report. Return the scores by benchmark, as in scores.json.

    A benchmark's grades are in the order of its records. judge: name of the judge's model. reward: name of the reward.
    seed: seed of the bootstrap. overlong: question set -> number of questions left out. about: a line about the run.
    """
    scores: dict[str, Scores] = {}
    for name, records in records_by_benchmark.items():
        s = benchmark_scores(records, grades_by_benchmark[name], seed=seed)
        if s["metric"] == "judge":
            s["judge"] = judge
        if "reward" in s["metric"]:
            s["rewarded_by"] = reward
        if overlong and overlong.get(name):
            s["overlong"] = overlong[name]
        scores[name] = s
    families = {name: benchmark.family for name, benchmark in BENCHMARKS.items()}
    tables = report_tables(scores, averages(grades_by_benchmark, families, seed=seed))
    notes = notes_on(scores, judge)
    if about:
        notes = [about, *notes]

    folder.mkdir(parents=True, exist_ok=True)
    for name, grades in grades_by_benchmark.items():
        write_grades(grades_path(folder, name), grades)
    replace_file(folder / "report.md", [markdown_report(folder.resolve().name, notes, tables)])
    # Last: its presence means that everything is written.
    replace_file(folder / "scores.json", [json.dumps(scores, indent=1), "\n"])
    return scores


def notes_on(scores: Mapping[str, Scores], judge: str) -> list[str]:
    """Return notes on the control sets, the graders, and the numbers of failed judgements and trajectories."""
    notes = []
    if any(name.endswith(MUTED) for name in scores):
        notes.append(f"SET{MUTED}: all tool calls were refused.")
    judged = [name for name, s in scores.items() if "judge" in s["metric"]]
    if judged:
        notes.append(f"Judge: {judge or 'unnamed'} graded {', '.join(judged)}.")
    graded_by_f1 = [name for name, s in scores.items() if s["metric"] == "f1"]
    if graded_by_f1:
        notes.append(f"No judge: {', '.join(graded_by_f1)} graded by rule (token F1; solved = an F1 of 1).")
    reward_only = [name for name, s in scores.items() if REWARD_ONLY in s["metric"]]
    if reward_only:
        notes.append(f"No accuracy of {', '.join(reward_only)}: --reward.file returns none; its column has the reward.")
    for reason, words in JUDGE_REASONS.items():
        num_trajectories = sum(s["grade_reasons"].get(reason, 0) for s in scores.values())
        if num_trajectories:
            notes.append(f"{num_trajectories} trajectories {words}; they count as not correct.")
    num_failed = sum(s["stop_reasons"].get(StopReason.ERROR, 0) for s in scores.values())
    if num_failed:
        cut_off = f"{num_failed} trajectories were cut off by an infrastructure error (the same command asks again)"
        notes.append(f"{cut_off}; without an answer they count as not correct.")
    return notes


# ---- tables


def report_tables(scores: Mapping[str, Scores], averages: Mapping[str, Scores]) -> list[Table]:
    """Return all tables with rows."""
    means = {f"mean of {s['benchmarks']} ({family})": s for family, s in averages.items()}
    tables = [
        _main_table(scores, means),
        _pass_table({**scores, **means}),
        _splits_table(scores),
        _metrics_table(scores),
        _tools_table(scores),
        _failures_table(scores),
    ]
    return [table for table in tables if table.rows]


def _accuracy(s: Scores) -> str:
    return with_interval(s["accuracy"], s["accuracy_low"], s["accuracy_high"])


def _pass_n(s: Scores) -> str:
    [text] = _numbers(s, [f"pass@{s['samples']}"])
    return text


def _numbers(s: Scores, names: Sequence[str]) -> list[str]:
    return [f"{s[name]:.3f}" if name in s else "" for name in names]


def _main_table(scores: Mapping[str, Scores], means: Mapping[str, Scores]) -> Table:
    rows = []
    for name, s in scores.items():
        columns = {
            "benchmark": name,
            "questions": f"{s['questions']} ({s['overlong']} left out)" if "overlong" in s else str(s["questions"]),
            "n": str(s["samples"]),
            "accuracy [95 %]": _accuracy(s),
            "pass@n": _pass_n(s),
            "grader": s["metric"],
            "well-formed": f"{s['well_formed']:.3f}",
            "calls": f"{s['tool_calls']:.2f}",
            "tokens": f"{s['response_tokens']:.0f}",
            "seconds": f"{s['seconds']:.1f}",
            "truncated": f"{s['truncated']:.3f}",
        }
        rows.append(list(columns.values()))
    rows += [[name, "", "", _accuracy(s), *[""] * 7] for name, s in means.items()]
    note = "accuracy: mean over questions and n samples, intervals over questions; calls, tokens, seconds: means over "
    note += "trajectories; truncated: share that ran out of tokens. Left out: prompts over eval.max_prompt_tokens."
    return Table("Accuracy", list(columns), rows, note)


def _pass_table(scores: Mapping[str, Scores]) -> Table:
    columns = sorted({k for s in scores.values() for k in s if k.startswith("pass@")}, key=lambda k: int(k[5:]))
    rows = [[name, *_numbers(s, columns)] for name, s in scores.items()]
    return Table("Pass@k", ["benchmark", *columns], rows if len(columns) > 1 else [], "Unbiased estimates.")


def _splits_table(scores: Mapping[str, Scores]) -> Table:
    rows = [
        [name, split, str(s["questions"]), _accuracy(s), _pass_n(s)]
        for name, scores_of_set in scores.items()
        for split, s in scores_of_set.get("splits", {}).items()
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
        for name, scores_of_set in scores.items()
        for tag, s in scores_of_set["tools"].items()
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
