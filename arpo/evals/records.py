"""Records: what grading and reports read of an evaluation's finished trajectories, which are dumps (log/dumps.py).

    RUN/trajectories/gaia.0.jsonl  gaia.1.jsonl ...     a set's groups; a file for each process that sampled of them
    RUN/grades/gaia.jsonl                               their grades

A group is on disk before the next one is handled. No file is written to by a second process, so what a killed one left
of a last line stays, and is passed over: the next start of the command makes files of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from arpo.config.bounded import parse_json, read_file
from arpo.config.named import brief
from arpo.config.typed import check_types
from arpo.errors import UserError
from arpo.log.dumps import dump_line, read_dump
from arpo.protocol import FORMS
from arpo.protocol.tags import PAPER_TOOLS
from arpo.trajectory import Group, ToolCall, Trajectory

FOLDER = "trajectories"


@dataclass(frozen=True)
class Record:
    """One finished trajectory of an evaluation."""

    benchmark: str
    """Name in the table of benchmarks, or stem of the question file."""
    question_id: str
    """Name of the question, unique within the benchmark."""
    sample: int
    """Number of the trajectory among the n of its question, from 0."""
    question: str
    answers: list[str]
    """Accepted answers (aliases)."""
    data_source: str
    metric: str
    """Grading rule: "math", "qa", or "reward" (for question files of one's own)."""
    text: str
    """The whole response, tool results included."""
    segments: list[tuple[str, bool]]
    """`text` as (text, written by the model) runs."""
    stop_reason: str
    num_tokens: int
    """Number of tokens of the response, tool results included."""
    num_sampled_tokens: int
    wall_s: float
    """Seconds from the first token to the end, with tool calls, without the wait for a place in the batch."""
    tool_calls: list[ToolCall]
    meta: dict = field(default_factory=dict)
    """The question's other fields (`ability`, `extra_info`, ...), for a reward of one's own."""
    tools: tuple[str, ...] = PAPER_TOOLS
    """Tags of the tools that were loaded; their calls must be well-formed."""
    protocol: str = "tags"
    """The protocol.format of the run."""

    @property
    def split(self) -> str:
        """Part of the benchmark that is reported on its own: "level 1" (GAIA), a category (HLE); "" = none."""
        return str(self.meta.get("split", ""))


class SetDump:
    """This process' dump of one set of questions. Its file is made with the first group."""

    def __init__(self, run: Path, benchmark: str, *, metric: str, tools: Sequence[str], protocol: str):
        self.run, self.benchmark = run, benchmark
        self.about = {"benchmark": benchmark, "metric": metric, "tools": list(tools), "protocol": protocol}
        self.path: Path | None = None

    def add(self, group: Group, wall_s: Sequence[float]) -> None:
        """Write a finished group, and wait until it is on disk; `wall_s[i]` are the seconds of trajectory i."""
        lines = []
        for sample, (trajectory, seconds) in enumerate(zip(group.trajectories, wall_s, strict=True)):
            more = {"sample": sample, "wall_s": round(seconds, 3), "meta": group.prompt.meta}
            lines.append(dump_line(group, trajectory, self.about | more))
        self.path = self.path or self._new_file()
        with self.path.open("ab") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())

    def _new_file(self) -> Path:
        folder = self.run / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for number in count():
            path = folder / f"{self.benchmark}.{number}.jsonl"
            with suppress(FileExistsError):
                path.open("xb").close()  # of two processes only one makes it
                return path


def read_records(run: Path) -> list[Record]:
    """Read the records of an evaluation, ordered by benchmark, question and sample; of a trajectory that is there twice
    the first. Raises UserError that names file and line for any damage."""
    found: dict[tuple[str, str, int], Record] = {}
    for path in sorted((run / FOLDER).glob("*.jsonl")):
        for place, trajectory, row in read_dump(path):
            record = as_record(trajectory, row, place)
            found.setdefault((record.benchmark, record.question_id, record.sample), record)
    return [found[key] for key in sorted(found)]


def as_record(trajectory: Trajectory, row: dict[str, Any], place: str) -> Record:
    """Return the record of a dumped trajectory; `row`: the other fields of its line."""
    if (protocol := str(row.get("protocol", "tags"))) not in FORMS:
        raise UserError(f"{place}: its calls are in the form {protocol!r}; pass it as --protocol.format")
    try:
        record = Record(
            benchmark=row["benchmark"],
            question_id=trajectory.prompt_id,
            sample=row["sample"],
            question=row["question"],
            answers=row["answers"],
            data_source=row["data_source"],
            metric=row["metric"],
            text=trajectory.text,
            segments=[(text, by_model) for text, by_model in trajectory.segments],
            stop_reason=str(trajectory.stop_reason),
            num_tokens=len(trajectory.token_ids),
            num_sampled_tokens=trajectory.num_sampled_tokens,
            wall_s=row["wall_s"],
            tool_calls=trajectory.tool_calls,
            meta=row["meta"],
            tools=tuple(row["tools"]),
            protocol=row["protocol"],
        )
        check_types(record)
        return record
    except KeyError as error:
        raise UserError(f"{place}: no trajectory of an evaluation ({error} is missing); remove the line") from None
    except TypeError as error:
        raise UserError(f"{place}: no trajectory of an evaluation ({error}); remove the line") from None


# ---- grades


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
            grade = Grade(**parse_json(line))
            check_types(grade)
            grades.append(grade)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}:{len(grades) + 1}: cannot read the grades ({brief(error)}); regrade the run") from None
    return grades
