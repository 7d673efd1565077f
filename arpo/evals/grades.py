"""Grades of an evaluation's trajectories, and the file that keeps them: RUN/grades/<benchmark>.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from arpo.config.bounded import parse_json, read_file
from arpo.config.named import brief
from arpo.errors import UserError


@dataclass(frozen=True)
class Grade:
    """The grade of one trajectory."""

    question_id: str
    sample: int
    scores: dict[str, float]
    """Name -> score. `judge` is there only if the judge's verdict could be read."""
    correct: float
    """Share of correctness, 0..1; a sample counts as solved at 1."""
    metric: str
    """Name of the score that `correct` is: math_equal, f1, judge or reward."""
    reason: str
    """Short stable name of what was unusual: "" = nothing, no_answer, judge_unparsable, judge_failed, or the format's
    defect."""
    prediction: str = ""
    """The answer that was graded; "" = none."""
    judge_reply: str = ""
    """The judge's whole reply, or the reason why there is none."""
    question_digest: str = ""
    """Digest of question and answers. Runs are compared on equal questions only."""


def grades_path(run: Path, benchmark: str) -> Path:
    return run / "grades" / f"{benchmark}.jsonl"


def write_grades(path: Path, grades: Sequence[Grade]) -> None:
    """Write one line per grade."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(grade)) + "\n" for grade in grades), encoding="utf-8")


def read_grades(path: Path) -> list[Grade]:
    """Read what `write_grades` wrote. Raises UserError that names file and line."""
    grades: list[Grade] = []
    try:
        for line in read_file(path).decode().split("\n")[:-1]:
            grades.append(Grade(**parse_json(line)))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}:{len(grades) + 1}: cannot read the grades ({brief(error)}); regrade the run") from None
    return grades
