"""The numbers of a report, from records and their grades."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arpo.evals import bootstrap_interval, bootstrap_means, interval_of, pass_at_k
from arpo.evals.grading import Grade, well_formed
from arpo.evals.records import Record
from arpo.trajectory import Group, StopReason, Trajectory

Scores = dict[str, Any]
"""Name -> number, or a table of numbers (splits, tools, failures, stop_reasons, grade_reasons, tool_errors)."""
MEANS = ("em", "f1", "math_equal", "reward")
"""Scores of the grades whose mean over trajectories is reported besides `accuracy`."""
ALL = "all"
"""Name of the average over all benchmarks."""


def benchmark_scores(records: Sequence[Record], grades: Sequence[Grade], *, seed: int = 0) -> Scores:
    """Scores of one benchmark; records and grades go in pairs.

    `accuracy` is avg@n, the mean of `correct` over questions and samples, with a 95 % bootstrap interval over
    questions; `pass@k` is unbiased, over the questions with at least k samples, a sample being solved where `correct`
    is 1. Token, call and second counts are means over trajectories.
    """
    pairs = sorted(zip(records, grades, strict=True), key=lambda pair: (pair[0].question_id, pair[0].sample))
    records, grades = [record for record, _ in pairs], [grade for _, grade in pairs]
    calls = [call for record in records for call in record.tool_calls]
    scores: Scores = {
        **accuracy_scores(grades, seed=seed),
        "trajectories": len(records),
        "metric": " and ".join(sorted({grade.metric for grade in grades})),
        "well_formed": float(
            np.mean([g.scores.get("well_formed", float(well_formed(r))) for r, g in zip(records, grades, strict=True)])
        ),
    }
    for name in MEANS:
        if all(name in grade.scores for grade in grades):
            scores[name] = float(np.mean([grade.scores[name] for grade in grades]))
    scores |= {
        "tool_calls": float(np.mean([len(r.tool_calls) for r in records])),
        "failed_tool_calls": float(np.mean([sum(not call["ok"] for call in r.tool_calls) for r in records])),
        "response_tokens": float(np.mean([r.num_tokens for r in records])),
        "sampled_tokens": float(np.mean([r.num_sampled_tokens for r in records])),
        "seconds": float(np.mean([r.wall_s for r in records])),
        "truncated": float(np.mean([r.stop_reason == StopReason.LENGTH for r in records])),
        "tools": tool_scores(calls, len(records)),
        "failures": counts(failure(r, g) for r, g in zip(records, grades, strict=True) if g.correct < 1.0),
        "stop_reasons": counts(r.stop_reason for r in records),
        "grade_reasons": counts(g.reason for g in grades if g.reason),
        "tool_errors": counts(f"{c['tag']}: {c['error_kind'] or 'failed'}" for c in calls if not c["ok"]),
    }
    by_split: dict[str, list[Grade]] = defaultdict(list)
    for record, grade in zip(records, grades, strict=True):
        by_split[record.split].append(grade)
    if set(by_split) != {""}:
        scores["splits"] = {
            name or "(none)": accuracy_scores(part, seed=seed) for name, part in sorted(by_split.items())
        }
    return scores


def failure(record: Record, grade: Grade) -> str:
    """The first thing that kept a trajectory from being right; each has one."""
    if record.stop_reason != StopReason.EOS:
        return f"stop_{record.stop_reason}"
    return grade.reason or ("partly_right" if grade.correct > 0 else "wrong_answer")


def accuracy_scores(grades: Sequence[Grade], *, seed: int = 0) -> Scores:
    """questions, samples, accuracy with its interval, pass@k."""
    by_question = correct_by_question(grades)
    low, high = bootstrap_interval([float(np.mean(samples)) for samples in by_question.values()], seed=seed)
    num_samples = max(map(len, by_question.values()))
    return {
        "questions": len(by_question),
        "samples": num_samples,
        "accuracy": float(np.mean([correct for samples in by_question.values() for correct in samples])),
        "accuracy_low": low,
        "accuracy_high": high,
        **{f"pass@{k}": float(np.mean(pass_values(by_question, k))) for k in ks_of(num_samples)},
    }


def correct_by_question(grades: Sequence[Grade]) -> dict[str, list[float]]:
    """question -> `correct` of its samples, in their order."""
    by_question: dict[str, list[float]] = defaultdict(list)
    for grade in sorted(grades, key=lambda g: (g.question_id, g.sample)):
        by_question[grade.question_id].append(grade.correct)
    return by_question


def ks_of(num_samples: int) -> list[int]:
    """The k that Pass@k is reported for: powers of two, 5 (which the papers report), and n.

    >>> ks_of(1), ks_of(5), ks_of(16)
    ([1], [1, 2, 4, 5], [1, 2, 4, 5, 8, 16])
    """
    return sorted({k for k in (1, 2, 4, 5, 8, 16, 32, 64) if k <= num_samples} | {num_samples})


def pass_values(by_question: Mapping[str, Sequence[float]], k: int) -> list[float]:
    """Pass@k of each question with at least k samples."""
    return [pass_at_k(len(c), sum(x >= 1.0 for x in c), k) for c in by_question.values() if len(c) >= k]


def tool_scores(calls: Sequence[dict], num_trajectories: int) -> dict[str, dict[str, float]]:
    """tag -> calls in a trajectory, share that failed and came from a cache, mean seconds of those that were run."""
    by_tag: dict[str, list[dict]] = defaultdict(list)
    for call in calls:
        by_tag[call["tag"]].append(call)
    return {
        tag: {
            "calls": len(mine) / num_trajectories,
            "failed_share": float(np.mean([not call["ok"] for call in mine])),
            "cached_share": float(np.mean([call["cached"] for call in mine])),
            "seconds": float(np.mean([call["seconds"] for call in mine])),
        }
        for tag, mine in sorted(by_tag.items())
    }


def counts(names) -> dict[str, int]:
    """Most frequent first; ties by name."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def averages(
    grades_by_benchmark: Mapping[str, Sequence[Grade]], families: Mapping[str, str], *, seed: int = 0
) -> dict[str, Scores]:
    """Family -> mean over its benchmarks, each counting the same (as in the papers), and `all`.

    The interval resamples the questions within each benchmark. A family of one benchmark has no row of its own.
    """
    means, members = {}, defaultdict(list)
    for number, (name, grades) in enumerate(sorted(grades_by_benchmark.items())):
        questions = [float(np.mean(samples)) for samples in correct_by_question(grades).values()]
        # drawn independently of each other: with one seed for all, benchmarks of equal size would move together
        means[name] = (accuracy_scores(grades), bootstrap_means(questions, seed=(seed, number)))
        members[families.get(name, "")].append(name)
        members[ALL].append(name)
    table = {}
    for family, names in members.items():
        if family and len(names) > 1:
            low, high = interval_of(np.mean([means[name][1] for name in names], axis=0))
            own = [means[name][0] for name in names]
            common = [k for k in own[0] if k.startswith("pass@") and all(k in scores for scores in own)]
            table[family] = {
                "benchmarks": len(names),
                "accuracy": float(np.mean([scores["accuracy"] for scores in own])),
                "accuracy_low": low,
                "accuracy_high": high,
                **{k: float(np.mean([scores[k] for scores in own])) for k in common},
            }
    return dict(sorted(table.items(), key=lambda item: item[0] == ALL))


def summarize(groups: list[Group], *, seed: int = 0) -> dict[str, float]:
    """Scores of one question file.

    `accuracy` is avg@n, the mean over questions and samples of the reward's accuracy part, with a 95 % bootstrap
    interval over questions; `pass@k` is unbiased, a sample being solved where its accuracy is 1 (an exact answer).
    """
    accuracies = [[accuracy(t) for t in group.trajectories] for group in groups]
    trajectories = [t for group in groups for t in group.trajectories]
    low, high = bootstrap_interval([float(np.mean(samples)) for samples in accuracies], seed=seed)
    num_samples = max(map(len, accuracies))
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < num_samples] + [num_samples]
    solved = [(len(samples), sum(a >= 1.0 for a in samples)) for samples in accuracies]
    return {
        "questions": len(groups),
        "samples": num_samples,
        "accuracy": float(np.mean([a for samples in accuracies for a in samples])),
        "accuracy_low": low,
        "accuracy_high": high,
        **{f"pass@{k}": float(np.mean([pass_at_k(n, c, k) for n, c in solved])) for k in ks},
        "well_formed": float(np.mean([t.reward is not None and t.reward >= 0 for t in trajectories])),
        "reward": float(np.mean([t.reward or 0.0 for t in trajectories])),
        "tool_calls": float(np.mean([len(t.tool_calls) for t in trajectories])),
        "failed_tool_calls": float(np.mean([sum(not c.ok for c in t.tool_calls) for t in trajectories])),
        "response_tokens": float(np.mean([len(t.token_ids) for t in trajectories])),
        "truncated": float(np.mean([t.stop_reason == StopReason.LENGTH for t in trajectories])),
    }


def accuracy(trajectory: Trajectory) -> float:
    """The reward's accuracy part; a custom reward without such a part is its own measure. Errors of ours count as 0."""
    return trajectory.reward_parts.get("accuracy", trajectory.reward or 0.0)
