"""The numbers of a report, from records and their grades."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from arpo.evals import bootstrap_means, interval_of, mean, pass_at_k
from arpo.evals.grading import well_formed
from arpo.evals.records import Grade, Record
from arpo.metrics import source_names
from arpo.trajectory import Group, StopReason, ToolCall

Scores = dict[str, Any]
"""Name -> number, or a table of numbers (splits, tools, stop_reasons, grade_reasons, tool_errors)."""
MEANS = ("em", "f1", "math_equal", "reward")
"""Scores of the grades whose mean over trajectories is reported besides `accuracy`."""
ALL = "all"
"""Name of the average over all benchmarks."""
MUTED = "_muted"
"""End of the name of a set whose questions were asked with every tool call refused."""


def benchmark_scores(records: Sequence[Record], grades: Sequence[Grade], *, seed: int = 0) -> Scores:
    """Return the scores of one benchmark; `grades[i]` is the grade of `records[i]`.

    `accuracy` is avg@n, the mean of `correct` over questions and samples, with a 95 % bootstrap interval over
    questions; `pass@k` is unbiased, over the questions with at least k samples, a sample being solved where `correct`
    is 1. Token, call and second counts are means over trajectories.
    """
    pairs = sorted(zip(records, grades, strict=True), key=lambda pair: (pair[0].question_id, pair[0].sample))
    records, grades = [record for record, _ in pairs], [grade for _, grade in pairs]
    calls = [call for record in records for call in record.tool_calls]
    by_split: dict[str, list[Grade]] = defaultdict(list)
    for record, grade in pairs:
        by_split[record.split].append(grade)
    scores: Scores = {
        **accuracy_scores(grades, seed=seed),
        "trajectories": len(records),
        "metric": " and ".join(sorted({grade.metric for grade in grades})),
        "well_formed": mean(g.scores.get("well_formed", float(well_formed(r))) for r, g in pairs),
        **{m: mean(g.scores[m] for g in grades) for m in MEANS if all(m in g.scores for g in grades)},
        "tool_calls": mean(len(r.tool_calls) for r in records),
        "failed_tool_calls": mean(sum(not call.ok for call in r.tool_calls) for r in records),
        "response_tokens": mean(r.num_tokens for r in records),
        "sampled_tokens": mean(r.num_sampled_tokens for r in records),
        "seconds": mean(r.wall_s for r in records),
        "truncated": mean(r.stop_reason == StopReason.LENGTH for r in records),
        "tools": tool_scores(calls, len(records)),
        "stop_reasons": counts(r.stop_reason for r in records),
        "grade_reasons": counts(g.reason for g in grades if g.reason),
        "tool_errors": counts(f"{c.tag}: {c.error_kind or 'failed'}" for c in calls if not c.ok),
    }
    if set(by_split) != {""}:
        splits = sorted(by_split.items())
        scores["splits"] = {name or "(none)": accuracy_scores(part, seed=seed) for name, part in splits}
    return scores


def accuracy_scores(grades: Sequence[Grade], *, seed: int = 0) -> Scores:
    """Return questions, samples, accuracy with its interval, and pass@k."""
    return sample_scores(list(correct_by_question(grades).values()), seed=seed)


def sample_scores(questions: Sequence[Sequence[float]], *, seed: int) -> Scores:
    """`accuracy_scores` of questions that are given as the `correct` (0..1) of each one's samples."""
    low, high = interval_of(bootstrap_means([mean(samples) for samples in questions], seed=seed))
    num_samples = max(map(len, questions))
    return {
        "questions": len(questions),
        "samples": num_samples,
        "accuracy": mean(correct for samples in questions for correct in samples),
        "accuracy_low": low,
        "accuracy_high": high,
        **{f"pass@{k}": mean(pass_values(questions, k)) for k in ks_of(num_samples)},
    }


def correct_by_question(grades: Sequence[Grade]) -> dict[str, list[float]]:
    """Question id -> `correct` of its samples, in their order; questions are sorted by id."""
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


def pass_values(questions: Iterable[Sequence[float]], k: int) -> list[float]:
    """Pass@k of each question with at least k samples."""
    return [pass_at_k(len(c), sum(x >= 1.0 for x in c), k) for c in questions if len(c) >= k]


def tool_scores(calls: Sequence[ToolCall], num_trajectories: int) -> dict[str, dict[str, float]]:
    """Tag -> calls per trajectory, share of calls that failed or came from a cache, mean seconds of a call."""
    by_tag: dict[str, list[ToolCall]] = defaultdict(list)
    for call in calls:
        by_tag[call.tag].append(call)
    return {
        tag: {
            "calls": len(mine) / num_trajectories,
            "failed_share": mean(not call.ok for call in mine),
            "cached_share": mean(call.cached for call in mine),
            "seconds": mean(call.seconds for call in mine),
        }
        for tag, mine in sorted(by_tag.items())
    }


def counts(names: Iterable[str]) -> dict[str, int]:
    """Name -> number of times it occurs, the most frequent first; ties by name."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def averages(
    grades_by_benchmark: Mapping[str, Sequence[Grade]], families: Mapping[str, str], *, seed: int = 0
) -> dict[str, Scores]:
    """Family -> mean over its benchmarks, each counting the same (as in the papers), and `all`. The interval resamples
    the questions within each benchmark. A family of one benchmark has no row of its own, and controls with muted tools
    (names that end with MUTED) are in none."""
    own, resampled, members = {}, {}, defaultdict(list)
    asked = {name: grades for name, grades in grades_by_benchmark.items() if not name.endswith(MUTED)}
    for number, (name, grades) in enumerate(sorted(asked.items())):
        own[name] = accuracy_scores(grades)
        questions = [mean(samples) for samples in correct_by_question(grades).values()]
        # drawn independently of each other: with one seed for all, benchmarks of equal size would move together
        resampled[name] = bootstrap_means(questions, seed=(seed, number))
        for family in (families.get(name, ""), ALL):
            members[family].append(name)
    table = {}
    for family, names in sorted(members.items(), key=lambda item: item[0] == ALL):
        if family and len(names) > 1:
            low, high = interval_of(np.mean([resampled[name] for name in names], axis=0))
            common = [k for k in own[names[0]] if k.startswith("pass@") and all(k in own[name] for name in names)]
            means = {k: mean(own[name][k] for name in names) for k in ("accuracy", *common)}
            table[family] = {"benchmarks": len(names), **means, "accuracy_low": low, "accuracy_high": high}
    return table


def summarize(groups: list[Group], *, seed: int = 0) -> dict[str, float]:
    """Return the scores of one question file, for the validation of a training.

    `accuracy` is avg@n, the mean over questions and samples of the reward's accuracy part, with a 95 % bootstrap
    interval over questions; `pass@k` is unbiased, a sample being solved where its accuracy is 1 (an exact answer).
    Where there are several data sources, `accuracy/SOURCE` is that of each. A reward without that part has none.
    `unscored` is the number of trajectories without a reward, where there are any. They count as wrong, as in an
    evaluation, unless they have an accuracy all the same: else a reward that says nothing of bad answers, or a judge
    that is down, would raise the accuracy. `reward` is the mean of the others.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    is_known = any(t.accuracy is not None for t in trajectories)
    correct = [[t.accuracy or 0.0 for t in group.trajectories] for group in groups]
    scores = sample_scores(correct, seed=seed) if is_known else {"questions": len(groups)}
    if scores.get("samples") != 5:
        scores.pop("pass@5", None)  # it is for the comparison with the papers
    sources = source_names([group.prompt for group in groups]) if is_known else {}
    by_source: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        if source := sources.get(group.prompt.data_source):
            by_source[source] += [t.accuracy or 0.0 for t in group.trajectories]
    scores |= {f"accuracy/{source}": mean(values) for source, values in by_source.items()}
    if rewards:
        scores["reward"] = mean(rewards)
    if num_unscored := len(trajectories) - len(rewards):
        scores["unscored"] = num_unscored
    return scores | {
        "well_formed": mean(t.reward is not None and t.reward >= 0 for t in trajectories),
        "tool_calls": mean(len(t.tool_calls) for t in trajectories),
        "failed_tool_calls": mean(sum(not call.ok for call in t.tool_calls) for t in trajectories),
        "response_tokens": mean(len(t.token_ids) for t in trajectories),
        "truncated": mean(t.stop_reason == StopReason.LENGTH for t in trajectories),
    }
