"""The numbers of a report, computed from records and their grades."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from arpo.evals import bootstrap_means, interval_of, mean, pass_at_k, wilson_interval
from arpo.evals.grading import REWARD_ONLY, well_formed
from arpo.evals.records import Grade, Record
from arpo.metrics import source_names
from arpo.trajectory import Group, StopReason, ToolCall

Scores = dict[str, Any]
"""Name -> number, or a table of numbers (splits, tools, stop_reasons, grade_reasons, tool_errors)."""
MEANS = ("em", "f1", "math_equal", "reward")
"""Scores of the grades with a mean over trajectories in the report, besides `accuracy`."""
ALL = "all"
"""Name of the average over all benchmarks."""
MUTED = "_muted"
"""Suffix of a control set: the same questions, with every tool call refused."""


def benchmark_scores(records: Sequence[Record], grades: Sequence[Grade], *, seed: int = 0) -> Scores:
    """Return the scores of one benchmark; `grades[i]` is the grade of `records[i]`.

    `accuracy` is avg@n: the mean of `correct` over questions and samples, with its 95 % interval over questions
    (`accuracy_interval`). `pass@k` is unbiased, over the questions with at least k samples. A sample is solved if
    `correct` is 1. Counts of tokens, calls and seconds are means over trajectories.
    """
    # In a fixed order, since sums of floats depend on it.
    pairs = sorted(zip(records, grades, strict=True), key=lambda pair: (pair[0].question_id, pair[0].sample))
    grades = [grade for _, grade in pairs]
    trajectories = [record.trajectory for record, _ in pairs]
    calls = [call for t in trajectories for call in t.tool_calls]
    by_split: dict[str, list[Grade]] = defaultdict(list)
    for record, grade in pairs:
        by_split[record.split].append(grade)
    scores: Scores = {
        **accuracy_scores(grades, seed=seed),
        "trajectories": len(trajectories),
        "metric": " and ".join(sorted({grade.metric for grade in grades})),
        "well_formed": mean(g.scores.get("well_formed", float(well_formed(r))) for r, g in pairs),
        **{m: mean(g.scores[m] for g in grades) for m in MEANS if all(m in g.scores for g in grades)},
        "tool_calls": mean(len(t.tool_calls) for t in trajectories),
        "failed_tool_calls": mean(sum(not call.ok for call in t.tool_calls) for t in trajectories),
        "response_tokens": mean(len(t.token_ids) for t in trajectories),
        "sampled_tokens": mean(t.num_sampled_tokens for t in trajectories),
        "seconds": mean(record.wall_s for record, _ in pairs),
        "truncated": mean(t.stop_reason == StopReason.LENGTH for t in trajectories),
        "tools": tool_scores(calls, len(trajectories)),
        "stop_reasons": counts(str(t.stop_reason) for t in trajectories),
        "grade_reasons": counts(g.reason for g in grades if g.reason),
        "tool_errors": counts(f"{c.tag}: {c.error_kind or 'failed'}" for c in calls if not c.ok),
    }
    if set(by_split) != {""}:
        scores["splits"] = {
            name or "(none)": accuracy_scores(grades_of_split, seed=seed)
            for name, grades_of_split in sorted(by_split.items())
        }
    return scores


def accuracy_scores(grades: Sequence[Grade], *, seed: int = 0) -> Scores:
    """Return questions, samples, accuracy with its interval, and pass@k. Rewards without an accuracy have no pass@k."""
    scores = scores_of_samples(list(correct_by_question(grades).values()), seed=seed)
    if are_accuracies(grades):
        return scores
    return {name: value for name, value in scores.items() if not name.startswith("pass@")}


def are_accuracies(grades: Iterable[Grade]) -> bool:
    """Return False if `correct` of a grade is a reward that says nothing about right and wrong."""
    return all(grade.metric != REWARD_ONLY for grade in grades)


def scores_of_samples(questions: Sequence[Sequence[float]], *, seed: int) -> Scores:
    """Return `accuracy_scores` from numbers: `questions[i][j]` is `correct` (0..1) of sample j of question i."""
    resampled = bootstrap_means([mean(samples) for samples in questions], seed=seed)
    low, high = accuracy_interval(resampled, len(questions))
    num_samples = max(map(len, questions))
    return {
        "questions": len(questions),
        "samples": num_samples,
        "accuracy": mean(correct for samples in questions for correct in samples),
        "accuracy_low": low,
        "accuracy_high": high,
        **{f"pass@{k}": mean(pass_values(questions, k)) for k in ks_of(num_samples)},
    }


def accuracy_interval(resampled: np.ndarray, num_questions: float) -> tuple[float, float]:
    """Return the 95 % interval of an accuracy: the bootstrap's, or Wilson's where all answers are right or all wrong.

    There every resampled mean is the same, and the bootstrap would say that ten right answers prove 100 %.
    """
    low, high = interval_of(resampled)
    return wilson_interval(low, num_questions) if low == high and low in (0.0, 1.0) else (low, high)


def correct_by_question(grades: Sequence[Grade]) -> dict[str, list[float]]:
    """Question id -> `correct` of its samples, in their order. The questions are sorted by id."""
    by_question: dict[str, list[float]] = defaultdict(list)
    for grade in sorted(grades, key=lambda g: (g.question_id, g.sample)):
        by_question[grade.question_id].append(grade.correct)
    return by_question


def ks_of(num_samples: int) -> list[int]:
    """Return the k of the reported pass@k: powers of two, 5 (as in the papers), and n.

    >>> ks_of(1), ks_of(5), ks_of(16)
    ([1], [1, 2, 4, 5], [1, 2, 4, 5, 8, 16])
    """
    return sorted({k for k in (1, 2, 4, 5, 8, 16, 32, 64) if k <= num_samples} | {num_samples})


def pass_values(questions: Iterable[Sequence[float]], k: int) -> list[float]:
    """Return pass@k of each question with at least k samples."""
    values = []
    for samples in questions:
        if len(samples) >= k:
            num_solved = sum(correct >= 1.0 for correct in samples)
            values.append(pass_at_k(len(samples), num_solved, k))
    return values


def tool_scores(calls: Sequence[ToolCall], num_trajectories: int) -> dict[str, dict[str, float]]:
    """Tag -> calls per trajectory, share of failed calls, share of calls answered by a cache, mean seconds of a
    call."""
    by_tag: dict[str, list[ToolCall]] = defaultdict(list)
    for call in calls:
        by_tag[call.tag].append(call)
    return {
        tag: {
            "calls": len(calls_of_tag) / num_trajectories,
            "failed_share": mean(not call.ok for call in calls_of_tag),
            "cached_share": mean(call.cached for call in calls_of_tag),
            "seconds": mean(call.seconds for call in calls_of_tag),
        }
        for tag, calls_of_tag in sorted(by_tag.items())
    }


def counts(names: Iterable[str]) -> dict[str, int]:
    """Name -> number of occurrences. The most frequent name comes first, ties by name."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def averages(
    grades_by_benchmark: Mapping[str, Sequence[Grade]], families: Mapping[str, str], *, seed: int = 0
) -> dict[str, Scores]:
    """Return the means of each family over its benchmarks, and of `all`. Each benchmark counts the same, as in the
    papers.

    The interval resamples the questions within each benchmark. A family of one benchmark gets no row. Control sets
    (MUTED) and rewards without an accuracy do not count.
    """
    scores: dict[str, Scores] = {}
    resampled: dict[str, np.ndarray] = {}
    members: dict[str, list[str]] = defaultdict(list)
    asked = {
        name: grades
        for name, grades in grades_by_benchmark.items()
        if not name.endswith(MUTED) and are_accuracies(grades)
    }
    for index, (name, grades) in enumerate(sorted(asked.items())):
        scores[name] = accuracy_scores(grades)
        questions = [mean(samples) for samples in correct_by_question(grades).values()]
        # A seed for each benchmark: with the same seed, benchmarks of equal size would move together.
        resampled[name] = bootstrap_means(questions, seed=(seed, index))
        for family in (families.get(name, ""), ALL):
            members[family].append(name)
    table = {}
    for family, names in sorted(members.items(), key=lambda item: item[0] == ALL):
        if family and len(names) > 1:
            # Each benchmark counts the same, so the small ones decide how sure the mean is.
            num_questions = len(names) ** 2 / sum(1 / scores[name]["questions"] for name in names)
            low, high = accuracy_interval(np.mean([resampled[name] for name in names], axis=0), num_questions)
            passes = [key for key in scores[names[0]] if key.startswith("pass@")]
            common = [key for key in passes if all(key in scores[name] for name in names)]
            means = {key: mean(scores[name][key] for name in names) for key in ("accuracy", *common)}
            table[family] = {"benchmarks": len(names), **means, "accuracy_low": low, "accuracy_high": high}
    return table


def summarize(groups: list[Group], *, seed: int = 0) -> dict[str, float]:
    """Return the scores of one question file, for the validation during a training.

    accuracy: avg@n, the mean of the reward's accuracy part over questions and samples, with a 95 % bootstrap interval
        over questions. Missing if the reward has no accuracy part.
    accuracy/SOURCE: the same per data source, if there are several.
    pass@k: unbiased. A sample is solved if its accuracy is 1 (an exact answer).
    reward: mean over the trajectories with a reward.
    reward/PART: mean of each other part of the reward, over the trajectories that have it.
    well_formed: mean of the reward's format part. Missing if the reward has no format part.
    unscored: number of trajectories without a reward, if there are any. Without an accuracy they count as wrong, as in
        an evaluation. Otherwise a reward that skips bad answers, or a broken judge, would raise the accuracy.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    has_accuracy = any(t.accuracy is not None for t in trajectories)
    scores: Scores = {"questions": len(groups)}
    by_source: dict[str, list[float]] = defaultdict(list)
    if has_accuracy:
        correct = [[t.accuracy or 0.0 for t in group.trajectories] for group in groups]
        scores = scores_of_samples(correct, seed=seed)
        if scores["samples"] != 5:
            scores.pop("pass@5", None)  # only for the comparison with the papers
        sources = source_names([group.prompt for group in groups])
        for group, values in zip(groups, correct, strict=True):
            source = sources.get(group.prompt.data_source)
            if source:
                by_source[source] += values
    scores |= {f"accuracy/{source}": mean(values) for source, values in by_source.items()}
    if rewards:
        scores["reward"] = mean(rewards)
    num_unscored = len(trajectories) - len(rewards)
    if num_unscored:
        scores["unscored"] = num_unscored
    by_part: dict[str, list[float]] = defaultdict(list)
    for t in trajectories:
        for part, value in t.reward_parts.items():
            by_part[part].append(value)
    by_part.pop("accuracy", None)
    if "format" in by_part:
        scores["well_formed"] = mean(by_part.pop("format"))
    scores |= {f"reward/{part}": mean(values) for part, values in by_part.items()}
    return scores | {
        "tool_calls": mean(len(t.tool_calls) for t in trajectories),
        "failed_tool_calls": mean(sum(not call.ok for call in t.tool_calls) for t in trajectories),
        "response_tokens": mean(len(t.token_ids) for t in trajectories),
        "truncated": mean(t.stop_reason == StopReason.LENGTH for t in trajectories),
    }
