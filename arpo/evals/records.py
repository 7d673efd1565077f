"""Records of an evaluation's finished trajectories, from which grades and reports are made.

    RUN/records/<benchmark>.jsonl, <benchmark>.rank1.jsonl, ...     one line per trajectory, only ever appended to

A group's lines are on disk before the next group is handled, so a killed run continues behind its last whole line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from arpo.errors import UserError
from arpo.protocol.tags import PAPER_TOOLS
from arpo.trajectory import Group


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
    split: str
    """Part of the benchmark that is reported on its own: "level 1" (GAIA), a category (HLE); "" = none."""
    metric: str
    """Grading rule: "math", "qa", or "reward" (for question files of one's own)."""
    text: str
    """The whole response, tool results included."""
    segments: list
    """`text` as [text, written by the model] runs."""
    stop_reason: str
    num_tokens: int
    """Number of tokens of the response, tool results included."""
    num_sampled_tokens: int
    wall_s: float
    """Seconds from the first token to the end, with tool calls, without the wait for a place in the batch."""
    tool_calls: list[dict]
    """The tool calls in order, each with the fields of arpo.trajectory.ToolCall."""
    meta: dict = field(default_factory=dict)
    """The question's other fields (`ability`, `extra_info`, ...), for a reward of one's own."""
    tools: list[str] = field(default_factory=lambda: list(PAPER_TOOLS))
    """Tags of the tools that were loaded; their calls must be well-formed."""
    protocol: str = "tags"
    """The protocol.format of the run."""


def group_records(
    group: Group,
    benchmark: str,
    metric: str,
    wall_s: Sequence[float],
    tools: Sequence[str] = PAPER_TOOLS,
    protocol: str = "tags",
) -> list[Record]:
    """Make a record of each trajectory of a finished group; `wall_s[i]` are the seconds of trajectory i."""
    prompt = group.prompt
    return [
        Record(
            benchmark=benchmark,
            question_id=prompt.prompt_id,
            sample=sample,
            question=prompt.messages[-1]["content"],
            answers=prompt.answers,
            data_source=prompt.data_source,
            split=prompt.meta.get("split", ""),
            metric=metric,
            text=t.text,
            segments=[list(run) for run in t.segments],
            stop_reason=str(t.stop_reason),
            num_tokens=len(t.token_ids),
            num_sampled_tokens=t.num_sampled_tokens,
            wall_s=round(seconds, 3),
            tool_calls=[asdict(call) for call in t.tool_calls],
            meta=prompt.meta,
            tools=list(tools),
            protocol=protocol,
        )
        for sample, (t, seconds) in enumerate(zip(group.trajectories, wall_s, strict=True))
    ]


def append_records(path: str | Path, records: Sequence[Record]) -> None:
    """Append records in one write, and wait until they are on disk. Only one process at a time may write to a file.

    First an incomplete last line, which a killed writer left, is cut off.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records).encode()
    with path.open("ab+") as file:
        file.truncate(_end_of_last_line(file))
        file.write(lines)
        file.flush()
        os.fsync(file.fileno())


def _end_of_last_line(file) -> int:
    """Return the position behind the last newline; 0 without one."""
    end = file.seek(0, os.SEEK_END)
    for start in range(end - 65536, -65536, -65536):
        file.seek(max(0, start))
        found = file.read(65536 + min(0, start)).rfind(b"\n")
        if found >= 0:
            return max(0, start) + found + 1
    return 0


def read_records(folder_or_path: str | Path) -> list[Record]:
    """Read the records of a file, or of all files of a folder, ordered by benchmark, question and sample.

    An incomplete last line is dropped; if a trajectory is there twice, its first record counts. Raises UserError that
    names file and line for any other damage.
    """
    path = Path(folder_or_path)
    found: dict[tuple[str, str, int], Record] = {}
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as error:
            raise UserError(f"{file}: cannot read the records ({error.strerror}); check the path") from None
        for number, line in enumerate(lines[:-1], 1):  # the last piece is empty, or a line that never got its newline
            try:
                record = _parse(line)
            except ValueError as error:
                raise UserError(f"{file}:{number}: {error}; remove the line, and run again") from None
            found.setdefault((record.benchmark, record.question_id, record.sample), record)
    return [found[key] for key in sorted(found)]


def _parse(line: bytes) -> Record:
    kinds = {"sample": int, "num_tokens": int, "num_sampled_tokens": int, "wall_s": float | int, "meta": dict}
    kinds |= dict.fromkeys(("answers", "segments", "tool_calls", "tools"), list)
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, not {type(row).__name__}")
    row = {"tools": list(PAPER_TOOLS), "protocol": "tags"} | row  # older records name neither: there were no others
    for f in fields(Record):
        if not isinstance(row.get(f.name), kinds.get(f.name, str)):
            raise ValueError(f"field {f.name!r} is missing or of the wrong kind")
    return Record(**{f.name: row[f.name] for f in fields(Record)})
