"""Grading extracts the answer of each recorded trajectory and decides if the answer is correct. No model is loaded.

    metric    scores                      correct (0..1) is
    math      math_equal                  math_equal
    qa        em, f1 (and judge)          the judge's verdict, or f1 without a judge
    reward    reward, well_formed         the reward's accuracy part, as in training

The graded answer comes from the model's own text, never from tool results: the last box of the last <answer> block, or
the block's text if there is no box. Without a block: the last box after the thoughts (if calls are in JSON: in the last
turn). `reward` follows the stricter rule of the format.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from arpo.config.rewards import RewardConfig
from arpo.errors import UserError
from arpo.evals.judge import Judge, JudgeTask, Verdict
from arpo.evals.records import Grade, Record
from arpo.protocol import form_of
from arpo.protocol.format_rules import last_box
from arpo.rewards import score_groups
from arpo.rewards.custom import CustomReward
from arpo.rewards.math_answer import math_accuracy
from arpo.rewards.qa import exact_match, qa_accuracy
from arpo.trajectory import Group

Metric = Literal["math", "qa", "reward"]
REWARD_ONLY = "reward, no accuracy"
"""Metric of grades by a custom reward without an accuracy part."""
MEASURES = {"math": {"math_equal": math_accuracy}, "qa": {"em": exact_match, "f1": qa_accuracy}}
"""Metric -> the scores of a grade by rule. The last score is `correct`."""
MAX_PREDICTION_CHARS = 2000
"""An answer block without a box is cut to this length."""
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def grade_records(
    records: Sequence[Record],
    *,
    metric: Metric,
    judge: Judge | None = None,
    reward: RewardConfig | None = None,
    custom: CustomReward | None = None,
) -> list[Grade]:
    """Return grades in the order of the records. `reward` and `custom` are the reward of training (metric "reward").

    Raises UserError if a custom reward fails, or if a judge is needed and cannot be reached.
    """
    if metric == "reward":
        return _grade_by_reward(records, reward or RewardConfig(), custom)
    grades = [_grade_by_rule(record, metric) for record in records]
    if metric == "math" or judge is None:
        return grades
    tasks = [
        JudgeTask(record.question, tuple(record.prompt.answers), grade.prediction)
        for record, grade in zip(records, grades, strict=True)
        if grade.prediction
    ]
    verdicts = iter(judge.judge(tasks))
    return [_with_verdict(grade, next(verdicts) if grade.prediction else None) for grade in grades]


def extract_prediction(segments: list[tuple[str, bool]], form: str) -> str:
    r"""Return the answer of a response in this protocol.format; "" = none.

    >>> extract_prediction([(r"<think>\boxed{1}</think><answer>It is \boxed{2}.</answer>", True)], "tags")
    '2'
    >>> extract_prediction([("<think>t</think><answer> Paris </answer>", True)], "tags")
    'Paris'
    """
    text = form_of(form).rules.graded_text(segments)
    blocks = _ANSWER.findall(text)
    if not blocks:
        _, _, after_thoughts = text.rpartition("</think>")
        answer, _, _ = after_thoughts.partition("<think>")  # a thought that was cut off is not an answer
        return last_box(answer) or ""
    box = last_box(blocks[-1])
    return blocks[-1].strip()[:MAX_PREDICTION_CHARS] if box is None else box


def _grade_by_rule(record: Record, metric: Metric) -> Grade:
    prediction = extract_prediction(record.trajectory.segments, record.protocol)
    answers = record.prompt.answers
    measures = MEASURES[metric]
    scores = {name: measure(prediction, answers) if prediction else 0.0 for name, measure in measures.items()}
    return _grade(record, metric=list(measures)[-1], scores=scores, prediction=prediction)


def _with_verdict(grade: Grade, verdict: Verdict | None) -> Grade:
    """Add the judge's verdict to a grade. None = there was no answer to judge."""
    status = verdict.status if verdict else "incorrect"
    reply = verdict.reply if verdict else ""
    correct = float(status == "correct")
    grade = replace(grade, correct=correct, metric="judge", judge_reply=reply)
    if status in ("unparsable", "failed"):
        return replace(grade, reason=f"judge_{status}")
    return replace(grade, scores=grade.scores | {"judge": correct})


def _grade_by_reward(records: Sequence[Record], cfg: RewardConfig, custom: CustomReward | None) -> list[Grade]:
    # Scoring writes into the trajectories, so it gets copies.
    groups = [Group(record.prompt, [replace(record.trajectory)]) for record in records]
    tools = records[0].tools if records else ()  # the same in all records of a run
    form = records[0].protocol if records else "tags"
    score_groups(groups, cfg, custom, tools=tools, form=form)
    grades = []
    for record, group in zip(records, groups, strict=True):
        [t] = group.trajectories
        prediction = extract_prediction(t.segments, record.protocol)
        if t.reward is None and record.has_failed:
            grades.append(_grade(record, metric="reward", scores=t.reward_parts, prediction=prediction))
            continue
        if t.reward is None:
            why = f"no reward for question {record.question_id} ({t.reward_reason}), and an evaluation needs one"
            raise UserError(f"reward.file={cfg.file}: {why}")
        is_well_formed = t.reward_parts["format"] if custom is None else float(well_formed(record))
        scores = {**t.reward_parts, "reward": t.reward, "well_formed": is_well_formed}
        grade = _grade(record, metric="reward", scores=scores, prediction=prediction)
        if t.accuracy is None:
            # The report must not call this an accuracy, so the metric has another name.
            grade = replace(grade, correct=t.reward, metric=REWARD_ONLY)
        else:
            grade = replace(grade, correct=t.accuracy)
        grades.append(replace(grade, reason=t.reward_reason))
    return grades


def _grade(record: Record, *, metric: str, scores: dict[str, float], prediction: str) -> Grade:
    return Grade(
        question_id=record.question_id,
        sample=record.sample,
        scores=scores,
        correct=scores.get(metric, 0.0),  # after an infrastructure error a custom reward may give none
        metric=metric,
        reason="" if prediction else "no_answer",
        prediction=prediction,
        question_digest=question_digest(record.question, record.prompt.answers),
    )


def question_digest(question: str, answers: list[str]) -> str:
    """Return a digest of question and answers. Another question with the same id has another digest."""
    return hashlib.sha256(json.dumps([question, answers]).encode()).hexdigest()[:16]


def well_formed(record: Record) -> bool:
    """True if the response follows the format of training."""
    return not form_of(record.protocol).rules.format_error(record.trajectory.segments, record.tools)
