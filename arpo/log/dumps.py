"""Trajectory dumps: whole trajectories of a step, one per line, gzipped, written while the run goes on.

    RUN/trajectories/step_000100.jsonl.gz  valid_000100.jsonl.gz

A row is a trajectory's fields (trajectory.py), its prompt (question, answers, messages, data_source), and the rank that
sampled it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from arpo.trajectory import Group

SUFFIX = ".jsonl.gz"
COMPRESSION = 1  # a fifth of the size in a tenth of the time of level 9, which is 10 % smaller (benchmarks/dumps.py)


class DumpWriter:
    """Writes dumps one after the other in a thread; only the newest `keep` of each kind stay (0 = all).

    A dump that cannot be written is lost, with one line to `say`: no run ends for it.
    """

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

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, path: Path, groups: list[Group], kind: str) -> None:
        temporary = path.with_suffix(".tmp")  # a killed run leaves no half dump under the name of a whole one
        try:
            self._write_to(temporary, groups)
        except OSError:
            with contextlib.suppress(OSError):  # there is none
                temporary.unlink()
            raise
        temporary.replace(path)
        dumps = sorted(self.folder.glob(f"{kind}_*{SUFFIX}"))
        for old in dumps[: -self.keep] if self.keep else ():
            old.unlink()

    def _write_to(self, temporary: Path, groups: list[Group]) -> None:
        self.folder.mkdir(exist_ok=True)
        with gzip.open(temporary, "wb", compresslevel=COMPRESSION) as file:
            for group in groups:
                prompt = group.prompt
                about = {"question": prompt.messages[-1]["content"], "answers": prompt.answers}
                about |= {"messages": prompt.messages, "data_source": prompt.data_source}
                about |= {"sampled_by": group.sampled_by}
                for trajectory in group.trajectories:
                    file.write(json.dumps(about | trajectory.to_dict(), ensure_ascii=False).encode() + b"\n")


def open_dump(path: Path) -> BinaryIO:
    """Open a dump for reading, compressed or not. Raises OSError."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")
