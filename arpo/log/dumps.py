"""Trajectory dumps: all trajectories of a step, a line each, gzipped. A thread writes a dump while the run goes on.

    RUN/trajectories/step_000100.jsonl.gz  valid_000100.jsonl.gz     of a training
    RUN/trajectories/gaia.0.jsonl  gaia.1.jsonl                      of an evaluation (evals/records.py)

A row has the trajectory's fields (trajectory.py), the prompt (question, answers, messages, data_source), and the rank
that sampled the trajectory. An evaluation adds fields for grading.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

from arpo.config.bounded import MAX_LINE_BYTES, parse_json
from arpo.config.named import brief
from arpo.config.typed import check_types
from arpo.errors import UserError
from arpo.trajectory import BranchDecision, Context, Group, ToolCall, Trajectory, Turn

SUFFIX = ".jsonl.gz"
# Level 1 gives a fifth of the size. Level 9 takes ten times longer for 10 % smaller files (benchmarks/dumps.py).
COMPRESSION = 1


class DumpWriter:
    """Writes dumps in a thread, one after the other. Only the newest `keep` dumps of each kind stay (0 = all).

    A failed dump is lost, with one line to `say`. It does not end the run.
    """

    def __init__(self, folder: Path, *, keep: int = 0, say: Callable[[str], None] = print):
        self.folder = folder
        self.keep = keep
        self.num_lost = 0
        self._say = say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="arpo-dumps")
        self._pending: Future | None = None

    def write(self, step: int, groups: list[Group], kind: str) -> None:
        """Start to write KIND_STEP, after the dump before it is written. The groups must not change afterwards."""
        self.wait()
        self._pending = self._thread.submit(self._write, self.folder / f"{kind}_{step:06d}{SUFFIX}", groups, kind)

    def drop_after(self, step: int) -> None:
        """Remove the dumps of later steps and validations, which a continued run does again."""
        later = [dump for kind in ("step", "valid") for dump in self._dumps(kind) if _step_of(dump) > step]
        for dump in later:
            dump.unlink()
        if later:
            self._say(f"{self.folder}: removed {len(later)} dumps of steps after {step}, which are done again")

    def wait(self) -> None:
        """Wait until the newest dump is on disk, or lost."""
        pending = self._pending
        self._pending = None
        try:
            if pending:
                pending.result()
        except OSError as error:
            self.num_lost += 1
            fix = "free some space, or raise run.dump_every"
            self._say(f"warning: {self.folder}: cannot write the trajectory dump ({error.strerror}); {fix}")
        except (TypeError, ValueError) as error:
            self.num_lost += 1
            self._say(f"warning: {self.folder}: cannot write the trajectory dump ({brief(error)}), which is no JSON")

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, path: Path, groups: list[Group], kind: str) -> None:
        self.folder.mkdir(exist_ok=True)
        # Renamed when it is complete, so that a killed run leaves no unfinished dump under the final name.
        temporary = path.with_suffix(".tmp")
        try:
            with gzip.open(temporary, "wb", compresslevel=COMPRESSION) as file:
                for group in groups:
                    for trajectory in group.trajectories:
                        file.write(dump_line(group, trajectory, {}))
        except (OSError, TypeError, ValueError):
            temporary.unlink(missing_ok=True)
            raise
        temporary.replace(path)
        if self.keep:
            for old in self._dumps(kind)[: -self.keep]:
                old.unlink()

    def _dumps(self, kind: str) -> list[Path]:
        """Return the dumps of a kind, oldest first; not a user's copies of dumps."""
        is_ours = re.compile(rf"{kind}_\d{{6,}}{re.escape(SUFFIX)}").fullmatch
        paths = sorted(self.folder.iterdir()) if self.folder.exists() else []
        return [path for path in paths if is_ours(path.name)]


def _step_of(dump: Path) -> int:
    return int(dump.name.removesuffix(SUFFIX).rpartition("_")[2])


def dump_line(group: Group, trajectory: Trajectory, extra_fields: dict) -> bytes:
    """Return a trajectory of a group as a line of a dump."""
    prompt = group.prompt
    prompt_fields = {
        "question": prompt.messages[-1]["content"],
        "answers": prompt.answers,
        "messages": prompt.messages,
        "data_source": prompt.data_source,
        "sampled_by": group.sampled_by,
    }
    return json.dumps(prompt_fields | extra_fields | trajectory.to_dict(), ensure_ascii=False).encode() + b"\n"


def read_dump(path: Path) -> Iterator[tuple[str, Trajectory, dict]]:
    """Yield (FILE:LINE, trajectory, other fields) for each line of a dump, compressed or not.

    A last line without a newline is skipped: its process was killed, or is still writing. Raises UserError if the file
    cannot be read, or with FILE:LINE if a line is not a complete, consistent trajectory.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                    place = f"{path}:{number}"
                    trajectory, row = _parse_line(line, place)
                    yield place, trajectory, row
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot read the dump ({reason}); check the path") from None


def _parse_line(line: bytes, place: str) -> tuple[Trajectory, dict]:
    """Invert `dump_line`. Raises UserError for a malformed line."""
    try:
        row = parse_json(line)
        t = Trajectory(**{f.name: row.pop(f.name) for f in fields(Trajectory) if f.name in row})
        t.segments = [tuple(segment) for segment in t.segments]
        t.turns = [Turn(**turn) for turn in t.turns]
        t.contexts = [Context(**context) for context in t.contexts]
        for turn in t.turns:
            turn.tool_calls = [ToolCall(**call) for call in turn.tool_calls]
            turn.decision = BranchDecision(**turn.decision) if turn.decision else None
        decisions = [turn.decision for turn in t.turns if turn.decision]
        for record in (t, *t.turns, *t.tool_calls, *decisions, *t.contexts):
            check_types(record)
        t.check()
        return t, row
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        raise UserError(f"{place}: not a trajectory ({brief(error)}); drop the line or dump again") from None
