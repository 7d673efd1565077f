"""Grading turns records into grades: what each trajectory answered, and whether it is right. It loads no model.

    metric    scores                      correct (0..1) is
    math      math_equal                  math_equal
    qa        em, f1 (and judge)          the judge's verdict where there is a judge, else f1
    reward    reward, well_formed         the reward's accuracy part: what training optimises

The answer that counts is looked for in what the model wrote, never in tool results: the last box of the last <answer>
block, else the block's text, else the last box after the thoughts. `reward` has the format's own, stricter rule.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from arpo.errors import UserError
from arpo.evals.judge import Judge, JudgeTask, Verdict
from arpo.evals.records import Record
from arpo.options import RewardConfig
from arpo.rewards import score_trajectories
from arpo.rewards.custom import CustomReward
from arpo.rewards.format import derive_segments, format_error, last_box, model_text
from arpo.rewards.math_answer import math_accuracy
from arpo.rewards.qa import option_letter, qa_accuracy, tokens, unwrap
from arpo.trajectory import Prompt, ToolCall, Trajectory, Turn

Metric = Literal["math", "qa", "reward"]
MAX_PREDICTION_CHARS = 2000
"""Longest prediction taken from an answer block without a box."""
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Grade:
    """The grade of one trajectory."""

    question_id: str
    sample: int
    scores: dict[str, float]
    """Scores by name. The judge's score is there only where its verdict could be read."""
    correct: float
    """0..1; a sample counts as solved at 1."""
    metric: str
    """Name of the score that `correct` is: math_equal, f1, judge or reward."""
    reason: str
    """Why it is not right, or how the grade came about, as a short stable name: "" = graded as usual, no_answer,
    judge_unparsable, judge_failed, or the format's defect."""
    prediction: str = ""
    """The answer that was graded; "" = none."""
    judge_reply: str = ""
    """The judge's whole reply, or the reason why there is none."""
    question_digest: str = ""
    """Digest of question and answers. Runs are compared on equal questions only."""


def grade_records(
    records: Sequence[Record],
    *,
    metric: Metric,
    judge: Judge | None = None,
    reward: RewardConfig | None = None,
    custom: CustomReward | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> list[Grade]:
    """Grades in the order of the records.

    `reward` and `custom` are those of training (metric "reward"). `on_progress` gets the number of judgements done.
    Raises UserError where the judge must be asked and cannot be reached, or a custom reward fails.
    """
    if metric == "reward":
        return _reward_grades(records, reward or RewardConfig(), custom)
    if metric == "math":
        return [_math_grade(record) for record in records]
    predictions = [extract_prediction(segments_of(record)) for record in records]
    verdicts: dict[int, Verdict] = {}
    if judge is not None:
        answered = [i for i, prediction in enumerate(predictions) if prediction]
        tasks = [JudgeTask(records[i].question, tuple(records[i].answers), predictions[i]) for i in answered]
        verdicts = dict(zip(answered, judge.judge(tasks, on_progress), strict=True))
    return [
        _qa_grade(record, predictions[i], verdicts.get(i), has_judge=judge is not None)
        for i, record in enumerate(records)
    ]


def segments_of(record: Record) -> list[tuple[str, bool]]:
    """A record's runs; those of a response known only as text are derived from it."""
    return [(text, bool(by_model)) for text, by_model in record.segments] or derive_segments(record.text, record.tools)


def extract_prediction(segments: list[tuple[str, bool]]) -> str:
    r"""The answer that the model gave; "" = none.

    >>> extract_prediction([(r"<think>\boxed{1}</think><answer>It is \boxed{2}.</answer>", True)])
    '2'
    >>> extract_prediction([("<think>t</think><answer> Paris </answer>", True)])
    'Paris'
    """
    text = model_text(segments)
    if blocks := _ANSWER.findall(text):
        box = last_box(blocks[-1])
        return blocks[-1].strip()[:MAX_PREDICTION_CHARS] if box is None else box
    return last_box(text.rpartition("</think>")[2]) or ""


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 where prediction and an answer are the same tokens (case, punctuation and articles do not count)."""
    for answer in answers:
        letter = option_letter(answer) if len(unwrap(answer).strip("().:")) == 1 else None
        same = option_letter(prediction) == letter if letter else tokens(prediction) == tokens(answer)
        if same:
            return 1.0
    return 0.0


def _math_grade(record: Record) -> Grade:
    prediction = extract_prediction(segments_of(record))
    equal = math_accuracy(prediction, record.answers) if prediction else 0.0
    reason = "" if prediction else "no_answer"
    return _grade(record, equal, "math_equal", {"math_equal": equal}, reason=reason, prediction=prediction)


def _qa_grade(record: Record, prediction: str, verdict: Verdict | None, *, has_judge: bool) -> Grade:
    scores = {"em": 0.0, "f1": 0.0}
    if prediction:
        scores = {"em": exact_match(prediction, record.answers), "f1": qa_accuracy(prediction, record.answers)}
    reason = "" if prediction else "no_answer"
    correct = scores["f1"]
    if has_judge:
        correct = float(verdict is not None and verdict.status == "correct")
        if verdict is not None and verdict.status in ("unparsable", "failed"):
            reason = f"judge_{verdict.status}"
        else:
            scores["judge"] = correct
    reply = "" if verdict is None else verdict.reply
    metric = "judge" if has_judge else "f1"
    return _grade(record, correct, metric, scores, reason=reason, prediction=prediction, judge_reply=reply)


def _reward_grades(records: Sequence[Record], cfg: RewardConfig, custom: CustomReward | None) -> list[Grade]:
    prompts, trajectories = {}, []
    for r in records:
        messages = [{"role": "user", "content": r.question}]
        prompts[r.question_id] = Prompt(r.question_id, messages, r.answers, r.data_source, meta=r.meta)
        turns = [Turn(0, tool_call=ToolCall(**call)) for call in r.tool_calls]
        segments = [(text, bool(by_model)) for text, by_model in r.segments]
        trajectories.append(Trajectory(r.question_id, str(r.sample), turns=turns, text=r.text, segments=segments))
    tools = records[0].tools if records else ()  # the same in all records of a run
    score_trajectories(trajectories, prompts, cfg, custom, tools=tools)
    grades = []
    for record, t in zip(records, trajectories, strict=True):
        # a custom reward without such a part is its own measure
        correct = t.reward_parts.get("accuracy", t.reward)
        scores = {**t.reward_parts, "reward": t.reward, "well_formed": float(t.reward >= 0)}
        prediction = extract_prediction(segments_of(record))
        grades.append(_grade(record, correct, "reward", scores, reason=t.reward_reason, prediction=prediction))
    return grades


def _grade(record: Record, correct: float, metric: str, scores: dict[str, float], **words: str) -> Grade:
    digest = hashlib.sha256(json.dumps([record.question, record.answers]).encode()).hexdigest()[:16]
    return Grade(record.question_id, record.sample, scores, correct, metric, **words, question_digest=digest)


def well_formed(record: Record) -> bool:
    """Whether the response is in the format of training."""
    return not format_error(segments_of(record), record.tools)


def write_grades(path: Path, grades: Sequence[Grade]) -> None:
    """One line per grade."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(grade)) + "\n" for grade in grades), encoding="utf-8")


def read_grades(path: Path) -> list[Grade]:
    """Read what `write_grades` wrote. Raises UserError that names file and line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read the grades ({error}); regrade the run") from None
    return [_parse_grade(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _parse_grade(line: str, place: str) -> Grade:
    try:
        row = json.loads(line)
        grade = Grade(**{f.name: row[f.name] for f in fields(Grade)})
        if not isinstance(grade.correct, int | float) or not isinstance(grade.scores, dict):
            raise TypeError("'correct' must be a number and 'scores' an object")
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{place}: not a grade ({reason}); regrade the run") from None
    return grade
