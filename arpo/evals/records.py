"""Records: the finished trajectories of an evaluation with their questions, read from dumps (log/dumps.py).

    RUN/trajectories/gaia.0.jsonl  gaia.1.jsonl ...     groups of a question set; a file per process
    RUN/grades/gaia.jsonl                               their grades

A group is on disk before the next group is handled. No two processes write to the same file. So if a process is killed
within a line, the incomplete line stays in the process's file, and readers skip the line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from arpo.config.bounded import parse_json, read_file
from arpo.config.named import brief
from arpo.config.typed import check_types
from arpo.errors import UserError
from arpo.evals.tables import replace_file
from arpo.log.dumps import dump_line, read_dump
from arpo.protocol import FORMS
from arpo.protocol.tags import PAPER_TOOLS
from arpo.trajectory import Group, Prompt, StopReason, Trajectory

FOLDER = "trajectories"


@dataclass(frozen=True)
class Record:
    """A finished trajectory of an evaluation."""

    prompt: Prompt
    trajectory: Trajectory
    """The trajectory, `compact`: lists of numbers per token are arrays."""
    benchmark: str
    """Name in the table of benchmarks, or stem of the question file."""
    sample: int
    """Index of the trajectory among the n trajectories of its question."""
    metric: str
    """Grading rule: "math", "qa", or "reward" (for custom question files)."""
    wall_s: float
    """Seconds from the first token to the end. Includes tool calls, not the wait for a slot in the batch."""
    tools: tuple[str, ...] = PAPER_TOOLS
    """Tags of all loaded tools. Calls of these tools must be well-formed."""
    protocol: str = "tags"
    """The protocol.format of the run."""

    @property
    def question_id(self) -> str:
        """Name of the question, unique within the benchmark."""
        return self.prompt.prompt_id

    @property
    def question(self) -> str:
        return self.prompt.messages[-1]["content"]

    @property
    def has_failed(self) -> bool:
        """True if an infrastructure error cut the trajectory off. The same command then asks the question again."""
        return self.trajectory.stop_reason == StopReason.ERROR

    @property
    def split(self) -> str:
        """Part of the benchmark with its own score: "level 1" (GAIA), a category (HLE); "" = none."""
        return str(self.prompt.meta.get("split", ""))


class SetDump:
    """Writes the groups of one question set from this process. The first group creates the file."""

    def __init__(self, run: Path, benchmark: str, *, metric: str, tools: Sequence[str], protocol: str):
        self.run = run
        self.benchmark = benchmark
        self.set_fields = {"benchmark": benchmark, "metric": metric, "tools": list(tools), "protocol": protocol}
        self.path: Path | None = None

    def add(self, group: Group, wall_s: Sequence[float]) -> None:
        """Write a finished group and wait until it is on disk. wall_s[i] are the seconds of trajectory i."""
        lines = []
        for sample, (trajectory, seconds) in enumerate(zip(group.trajectories, wall_s, strict=True)):
            sample_fields = {"sample": sample, "wall_s": round(seconds, 3), "meta": group.prompt.meta}
            lines.append(dump_line(group, trajectory, self.set_fields | sample_fields))
        if self.path is None:
            self.path = self._new_file()
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
                path.open("xb").close()  # "x": if two processes try the same name, only one of them succeeds
                return path


def read_records(run: Path) -> list[Record]:
    """Read the records of an evaluation, ordered by benchmark, question and sample.

    If a sample occurs twice, the first trajectory without an infrastructure error counts. Raises UserError with file
    and line for any damage.
    """
    records: dict[tuple[str, str, int], Record] = {}
    for path in sorted((run / FOLDER).glob("*.jsonl")):
        for place, trajectory, row in read_dump(path):
            record = make_record(trajectory, row, place)
            key = (record.benchmark, record.question_id, record.sample)
            if key not in records or records[key].has_failed:
                records[key] = record
    return [records[key] for key in sorted(records)]


def make_record(trajectory: Trajectory, row: dict[str, Any], place: str) -> Record:
    """Return the record of a dumped trajectory. row: the other fields of its line. place: FILE:LINE, for errors."""
    protocol = str(row.get("protocol", "tags"))
    if protocol not in FORMS:
        raise UserError(f"{place}: its calls are in the form {protocol!r}; pass it as --protocol.format")
    try:
        prompt = Prompt(
            prompt_id=trajectory.prompt_id,
            messages=row["messages"],
            answers=row["answers"],
            data_source=row["data_source"],
            meta=row["meta"],
        )
        record = Record(
            prompt=prompt,
            trajectory=trajectory.compact(),
            benchmark=row["benchmark"],
            sample=row["sample"],
            metric=row["metric"],
            wall_s=row["wall_s"],
            tools=tuple(row["tools"]),
            protocol=row["protocol"],
        )
        check_types(prompt)
        check_types(record)
        return record
    except KeyError as error:
        raise UserError(f"{place}: no trajectory of an evaluation ({error} is missing); remove the line") from None
    except TypeError as error:
        raise UserError(f"{place}: no trajectory of an evaluation ({error}); remove the line") from None


# ---- grades


@dataclass(frozen=True)
class Grade:
    """The grade of a trajectory."""

    question_id: str
    sample: int
    scores: dict[str, float]
    """Name -> score. `judge` is missing if the judge's verdict could not be read."""
    correct: float
    """Share of correctness, 0..1. A sample counts as solved at 1."""
    metric: str
    """Name of the score behind `correct`: math_equal, f1, judge or reward."""
    reason: str
    """Short stable name of a problem: no_answer, judge_unparsable, judge_failed, or the format's defect; "" = none."""
    prediction: str = ""
    """The graded answer; "" = none."""
    judge_reply: str = ""
    """The judge's full reply, or the reason why there is no reply."""
    question_digest: str = ""
    """Digest of question and answers. Comparisons of runs use equal questions only."""


def grades_path(run: Path, benchmark: str) -> Path:
    return run / "grades" / f"{benchmark}.jsonl"


def write_grades(path: Path, grades: Sequence[Grade]) -> None:
    """Write one line per grade."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(asdict(grade)) + "\n" for grade in grades))


def read_grades(path: Path) -> list[Grade]:
    """Read a file of `write_grades`. Raises UserError with file and line for any damage."""
    grades: list[Grade] = []
    try:
        *lines, rest = read_file(path).decode().split("\n")
        for line in lines:
            grade = Grade(**parse_json(line))
            check_types(grade)
            grades.append(grade)
        if rest:
            raise ValueError("the last line is cut off")
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}:{len(grades) + 1}: cannot read the grades ({brief(error)}); regrade the run") from None
    return grades
