"""Grading finds out what each recorded trajectory answered, and whether it is right. It loads no model.

    metric    scores                      correct (0..1) is
    math      math_equal                  math_equal
    qa        em, f1 (and judge)          the judge's verdict where there is a judge, else f1
    reward    reward, well_formed         the reward's accuracy part: what training optimises

The answer that counts is looked for in what the model wrote, never in tool results: the last box of the last <answer>
block, else the block's text, else the last box after the thoughts (with calls in JSON: of the last turn). `reward` has
the format's own, stricter rule.
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
from arpo.trajectory import Group, Prompt, Trajectory, Turn

Metric = Literal["math", "qa", "reward"]
REWARD_ONLY = "reward, no accuracy"
"""Grader of a custom reward without an accuracy part."""
MEASURES = {"math": {"math_equal": math_accuracy}, "qa": {"em": exact_match, "f1": qa_accuracy}}
"""The scores of a grade by rule; the last one is `correct`."""
MAX_PREDICTION_CHARS = 2000
"""Longest prediction that is taken from an answer block without a box."""
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def grade_records(
    records: Sequence[Record],
    *,
    metric: Metric,
    judge: Judge | None = None,
    reward: RewardConfig | None = None,
    custom: CustomReward | None = None,
) -> list[Grade]:
    """Return grades in the order of the records; `reward` and `custom` are those of training (metric "reward"). Raises
    UserError where the judge must be asked and cannot be reached, or a custom reward fails."""
    if metric == "reward":
        return _reward_grades(records, reward or RewardConfig(), custom)
    grades = [_grade_by_rule(record, metric) for record in records]
    if metric == "math" or judge is None:
        return grades
    answered = [(record, grade) for record, grade in zip(records, grades, strict=True) if grade.prediction]
    tasks = [JudgeTask(record.question, tuple(record.answers), grade.prediction) for record, grade in answered]
    verdicts = iter(judge.judge(tasks))
    return [_judged(grade, next(verdicts) if grade.prediction else None) for grade in grades]


def predicted(segments: list[tuple[str, bool]], form: str) -> str:
    r"""Return the answer that a response in this protocol.format gives; "" = none.

    >>> predicted([(r"<think>\boxed{1}</think><answer>It is \boxed{2}.</answer>", True)], "tags")
    '2'
    >>> predicted([("<think>t</think><answer> Paris </answer>", True)], "tags")
    'Paris'
    """
    text = form_of(form).rules.graded_text(segments)
    if blocks := _ANSWER.findall(text):
        box = last_box(blocks[-1])
        return blocks[-1].strip()[:MAX_PREDICTION_CHARS] if box is None else box
    return last_box(text.rpartition("</think>")[2]) or ""


def _grade_by_rule(record: Record, metric: Metric) -> Grade:
    prediction, measures = predicted(record.segments, record.protocol), MEASURES[metric]
    scores = {name: measure(prediction, record.answers) if prediction else 0.0 for name, measure in measures.items()}
    return _grade(record, list(measures)[-1], scores, prediction)


def _judged(grade: Grade, verdict: Verdict | None) -> Grade:
    """Put the judge's verdict into a grade; None = there was no answer to judge."""
    status, reply = (verdict.status, verdict.reply) if verdict else ("incorrect", "")
    correct = float(status == "correct")
    grade = replace(grade, correct=correct, metric="judge", judge_reply=reply)
    if status in ("unparsable", "failed"):
        return replace(grade, reason=f"judge_{status}")
    return replace(grade, scores=grade.scores | {"judge": correct})


def _reward_grades(records: Sequence[Record], cfg: RewardConfig, custom: CustomReward | None) -> list[Grade]:
    groups = []
    for r in records:
        messages = [{"role": "user", "content": r.question}]
        prompt = Prompt(r.question_id, messages, r.answers, r.data_source, meta=r.meta)
        turns = [Turn(0, tool_calls=[call]) for call in r.tool_calls]
        sample = Trajectory(r.question_id, str(r.sample), turns=turns, text=r.text, segments=r.segments)
        groups.append(Group(prompt, [sample]))
    tools = records[0].tools if records else ()  # the same in all records of a run
    form = records[0].protocol if records else "tags"
    score_groups(groups, cfg, custom, tools=tools, form=form)
    grades = []
    for record, group in zip(records, groups, strict=True):
        [t] = group.trajectories
        if t.reward is None:
            why = f"no reward for question {record.question_id} ({t.reward_reason}), and an evaluation needs one"
            raise UserError(f"reward.file={cfg.file}: {why}")
        scores = {**t.reward_parts, "reward": t.reward, "well_formed": float(t.reward >= 0)}
        grade = _grade(record, "reward", scores, predicted(record.segments, record.protocol))
        # a custom reward that does not say what is right is its own measure, under its own name
        correct, metric = (t.reward, REWARD_ONLY) if t.accuracy is None else (t.accuracy, "reward")
        grades.append(replace(grade, correct=correct, metric=metric, reason=t.reward_reason))
    return grades


def _grade(record: Record, metric: str, scores: dict[str, float], prediction: str) -> Grade:
    digest = question_digest(record.question, record.answers)
    reason = "" if prediction else "no_answer"
    return Grade(record.question_id, record.sample, scores, scores[metric], metric, reason, prediction, "", digest)


def question_digest(question: str, answers: list[str]) -> str:
    """Return what tells a question apart from another of the same number."""
    return hashlib.sha256(json.dumps([question, answers]).encode()).hexdigest()[:16]


def well_formed(record: Record) -> bool:
    """Return whether the response is in the format of training."""
    return not form_of(record.protocol).rules.format_error(record.segments, record.tools)
