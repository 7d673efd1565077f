"""Trajectory dumps: whole trajectories of a step, one per line, gzipped, written while the run goes on.

    RUN/trajectories/step_000100.jsonl.gz  valid_000100.jsonl.gz

A row is a trajectory's fields (trajectory.py), its prompt (question, answers, messages, data_source), and the rank that
sampled it.
"""

from __future__ import annotations

import gzip
import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from arpo.errors import UserError
from arpo.trajectory import Group

SUFFIX = ".jsonl.gz"
COMPRESSION = 1  # a fifth of the size in a tenth of the time of level 9, which is 10 % smaller (benchmarks/dumps.py)


class DumpWriter:
    """Writes dumps one after the other in a thread; only the newest `keep` of each kind stay (0 = all)."""

    def __init__(self, folder: Path, *, keep: int = 0):
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="arpo-dumps")
        self._written: Future | None = None

    def write(self, step: int, groups: list[Group], kind: str) -> None:
        """Begin to write KIND_STEP; the groups must not be changed afterwards. First waits for the dump before it.

        Raises UserError if that one could not be written.
        """
        self.wait()
        self._written = self._thread.submit(self._write, self.folder / f"{kind}_{step:06d}{SUFFIX}", groups, kind)

    def wait(self) -> None:
        """Wait until all is on disk. Raises UserError if it could not be written."""
        written, self._written = self._written, None
        try:
            if written:
                written.result()
        except OSError as error:
            fix = "free some space, or raise run.dump_every"
            raise UserError(f"{self.folder}: cannot write the trajectory dump ({error.strerror}); {fix}") from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, path: Path, groups: list[Group], kind: str) -> None:
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(".tmp")  # a killed run leaves no half dump under the name of a whole one
        with gzip.open(temporary, "wb", compresslevel=COMPRESSION) as file:
            for group in groups:
                prompt = group.prompt
                about = {"question": prompt.messages[-1]["content"], "answers": prompt.answers}
                about |= {"messages": prompt.messages, "data_source": prompt.data_source}
                about |= {"sampled_by": group.sampled_by}
                for trajectory in group.trajectories:
                    file.write(json.dumps(about | trajectory.to_dict(), ensure_ascii=False).encode() + b"\n")
        temporary.replace(path)
        dumps = sorted(self.folder.glob(f"{kind}_*{SUFFIX}"))
        for old in dumps[: -self.keep] if self.keep else ():
            old.unlink()


def open_dump(path: Path) -> BinaryIO:
    """Open a dump for reading, compressed or not. Raises OSError."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
