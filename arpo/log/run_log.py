"""The log of a run: console lines, metrics.jsonl, trackers (TensorBoard), trajectory dumps.

    runs/NAME/config.yaml  metrics.jsonl  tb/  trajectories/step_000100.jsonl.gz

An evaluation has only a `Console`. Only rank 0 writes; on other ranks every method does nothing.
"""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from arpo.errors import printable
from arpo.log.charts import Charts
from arpo.log.dumps import DumpWriter
from arpo.log.metrics_file import MetricsFile
from arpo.log.settings import record_settings
from arpo.log.trackers import TrackedRun, Trackers
from arpo.trajectory import Group

NUM_TRANSCRIPTS = 2
"""Number of prompts whose first trajectory the trackers show."""
LINES_PER_RUN, LINE_EVERY_S = 25, 60.0  # of a progress that no terminal shows


class Console:
    """The console of a script. Rank 0 prints lines and the progress of the run there, and the other ranks nothing."""

    def __init__(self, *, is_main: bool):
        self.is_main = is_main

    def line(self, text: str) -> None:
        """Print one line without tearing a progress bar."""
        if self.is_main:
            print_line(text)

    def progress(self, total: int, what: str, *, done: int = 0, is_part: bool = False) -> Progress:
        """Return the progress of something with `total` parts, of which `done` are done; rank 0 shows it.

        `is_part`: within a step that has a progress of its own. Then only a terminal shows it, and after a second.
        """
        return Progress(total, what, done=done, is_part=is_part, is_main=self.is_main)


class RunLog(Console):
    """Writer of a training's folder. `resume_step` steps are done; an interrupted run's later lines are dropped."""

    def __init__(
        self,
        folder: Path,
        config: object,
        *,
        is_main: bool,
        charts: Charts | None = None,
        resume_step: int = 0,
        keep_dumps: int = 0,
        trackers: Sequence[str] = ("tensorboard",),
    ):
        super().__init__(is_main=is_main)
        self.folder = folder
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        record_settings(folder, config, resume_step)
        self.dumps = DumpWriter(folder / "trajectories", keep=keep_dumps, say=self.line)
        self.metrics = MetricsFile(folder / "metrics.jsonl", resume_step)
        self.trackers = Trackers(trackers, TrackedRun(folder, config, charts or {}, resume_step), say=self.line)

    def scalars(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Write a line of metrics.jsonl, with a later one where there is no room, and hand all on to the trackers."""
        if not self.is_main:
            return
        if self.dumps.num_lost:
            values = {**values, "log/lost_dumps": self.dumps.num_lost}
        num_waiting = len(self.metrics.waiting_steps)
        reason = self.metrics.write({"step": step} | {k: round(v, 8) for k, v in values.items()})
        if reason and not num_waiting:
            self.line(f"warning: {self.metrics.path}: cannot write step {step} ({reason}); its rows wait for room")
        elif num_waiting and not reason:
            self.line(f"{self.metrics.path}: the {num_waiting} rows that waited are written")
        self.trackers.scalars(step, values, histograms or {})

    def trajectories(self, step: int, groups: list[Group], kind: str = "step") -> None:
        """Begin to write full trajectories (dumps.py). The first of the first prompts also go to the trackers."""
        if not self.is_main:
            return
        self.dumps.write(step, groups, kind)
        for i, group in enumerate(groups[:NUM_TRANSCRIPTS]):
            t = group.trajectories[0]
            head = f"reward {t.reward} {t.reward_parts} stop {t.stop_reason} answers {group.prompt.answers}"
            text = f"{group.prompt.messages[-1]['content']}\n\n{t.text}"
            self.trackers.text(step, f"{kind}/{i}", f"{head}\n\n```\n{text}\n```")

    def finish(self) -> None:
        """Close all files, and say where the run can be looked at."""
        for where in self.trackers.places() if self.is_main else ():
            self.line(where)
        self.close()

    def close(self) -> None:
        """Write what waits, and close all files."""
        if self.is_main:
            self.trackers.close()
            self.dumps.close()
            if reason := self.metrics.write():
                steps = ", ".join(map(str, self.metrics.waiting_steps))
                self.line(f"warning: {self.metrics.path}: lacks the rows of steps {steps} ({reason})")


class Progress(tqdm):
    """A progress bar on a terminal; in a log file a line for each 25th part of the way, and one a minute."""

    def __init__(self, total: int, what: str, *, done: int, is_part: bool, is_main: bool):
        shows_bar = is_main and sys.stderr.isatty()
        super().__init__(
            desc=what,
            total=total,
            initial=done,
            unit="",
            leave=not is_part,
            delay=float(is_part),
            disable=not shows_bar,
            dynamic_ncols=True,
        )
        self.is_main = is_main
        self.prints_lines = not is_part and not (shows_bar and sys.stdout.isatty())
        self.what, self.start, self.line_at = what, done, done
        self.started = self.line_time = time.monotonic()

    def at(self, done: int, text: str = "", *, keep: bool = False) -> None:
        """Show that `done` parts are done, and `text` about the newest. `keep`: print a line on any output."""
        self.set_postfix_str(text, refresh=False)
        self.update(done - self.n)
        now = time.monotonic()
        is_due = done > self.line_at and (
            self.line_at == self.start
            or done == self.total
            or done * LINES_PER_RUN // self.total > self.line_at * LINES_PER_RUN // self.total
            or now - self.line_time >= LINE_EVERY_S
        )
        if self.is_main and (keep or (self.prints_lines and is_due)):
            left_s = (now - self.started) / max(done - self.start, 1) * (self.total - done)
            parts = [f"{self.what} {done}/{self.total}", text, f"{tqdm.format_interval(left_s)} left"]
            print_line("  ".join(part for part in parts if part))
            self.line_at, self.line_time = done, now


def print_line(text: str) -> None:
    """Print to stdout, above the progress bars that a terminal shows. A full disk below it ends no run."""
    try:
        tqdm.write(printable(text), file=sys.stdout)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
