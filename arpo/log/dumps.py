"""Trajectory dumps: whole trajectories of a step, one per line, gzipped, written while the run goes on.

    RUN/trajectories/step_000100.jsonl.gz  valid_000100.jsonl.gz     of a training
    RUN/trajectories/gaia.0.jsonl  gaia.1.jsonl                      of an evaluation (evals/records.py)

A row is a trajectory's fields (trajectory.py), its prompt (question, answers, messages, data_source), and the rank that
sampled it. An evaluation adds what grading needs.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

from arpo.config.bounded import parse_json
from arpo.config.named import brief
from arpo.config.typed import check_types
from arpo.errors import UserError
from arpo.trajectory import BranchDecision, Context, Group, ToolCall, Trajectory, Turn

SUFFIX = ".jsonl.gz"
MAX_LINE_BYTES = 256 << 20
COMPRESSION = 1  # a fifth of the size in a tenth of the time of level 9, which is 10 % smaller (benchmarks/dumps.py)


class DumpWriter:
    """Writes dumps one after the other in a thread; only the newest `keep` of each kind stay (0 = all). One that cannot
    be written is lost, with one line to `say`: no run ends for it."""

    def __init__(self, folder: Path, *, keep: int = 0, say: Callable[[str], None] = print):
        self.folder, self.keep, self._say = folder, keep, say
        self.num_lost = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="arpo-dumps")
        self._written: Future | None = None

    def write(self, step: int, groups: list[Group], kind: str) -> None:
        """Begin to write KIND_STEP; the groups must not be changed afterwards. First waits for the dump before it."""
        self.wait()
        self._written = self._thread.submit(self._write, self.folder / f"{kind}_{step:06d}{SUFFIX}", groups, kind)

    def wait(self) -> None:
        """Wait until all is on disk, or is lost."""
        written, self._written = self._written, None
        try:
            if written:
                written.result()
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
        temporary = path.with_suffix(".tmp")  # a killed run leaves no half dump under the name of a whole one
        try:
            with gzip.open(temporary, "wb", compresslevel=COMPRESSION) as file:
                for group in groups:
                    for trajectory in group.trajectories:
                        file.write(dump_line(group, trajectory, {}))
        except (OSError, TypeError, ValueError):
            temporary.unlink(missing_ok=True)
            raise
        temporary.replace(path)
        dumps = sorted(self.folder.glob(f"{kind}_*{SUFFIX}"))
        for old in dumps[: -self.keep] if self.keep else ():
            old.unlink()


def dump_line(group: Group, trajectory: Trajectory, more: dict) -> bytes:
    """Return a trajectory of a group as a line of a dump, with `more` fields besides its own."""
    prompt = group.prompt
    about = {"question": prompt.messages[-1]["content"], "answers": prompt.answers}
    about |= {"messages": prompt.messages, "data_source": prompt.data_source, "sampled_by": group.sampled_by}
    return json.dumps(about | more | trajectory.to_dict(), ensure_ascii=False).encode() + b"\n"


def read_dump(path: Path) -> Iterator[tuple[str, Trajectory, dict]]:
    """Yield for each trajectory of a dump, compressed or not, its place (FILE:LINE), itself, and the other fields.

    A last line without its newline, which a killed or working process left, is passed over. Raises UserError where the
    file cannot be read, and with the place where a line is not a whole, consistent trajectory.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                if line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                    place = f"{path}:{number}"
                    yield (place, *_parsed(line, place))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot read the dump ({reason}); check the path") from None


def _parsed(line: bytes, place: str) -> tuple[Trajectory, dict]:
    """Invert `dump_line`. Raises UserError for a line that is not well-formed."""
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
        for one in (t, *t.turns, *t.tool_calls, *decisions, *t.contexts):
            check_types(one)
        t.check()
        return t, row
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        raise UserError(f"{place}: not a trajectory ({brief(error)}); drop the line or dump again") from None
