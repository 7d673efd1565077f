"""The log of a run: console lines, metrics.jsonl, trackers (TensorBoard), trajectory dumps.

    runs/NAME/config.yaml  metrics.jsonl  tb/  trajectories/step_000100.jsonl.gz

An evaluation has only a `Console`. Only rank 0 writes. On other ranks every method does nothing.
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
"""The trackers show the first trajectory of this many prompts."""
# Without a terminal, progress is printed as lines: about this many per run, and one a minute.
LINES_PER_RUN = 25
LINE_EVERY_S = 60.0


class Console:
    """The console of a script. Rank 0 prints lines and progress. Other ranks print nothing."""

    def __init__(self, *, is_main: bool):
        self.is_main = is_main

    def line(self, text: str) -> None:
        """Print one line without tearing a progress bar."""
        if self.is_main:
            print_line(text)

    def progress(self, total: int, label: str, *, done: int = 0, is_part: bool = False) -> Progress:
        """Return a progress of `total` parts, with `done` parts done.

        is_part: True for a progress within a step. Only a terminal shows it, and only after a second.
        """
        return Progress(total, label, done=done, is_part=is_part, is_main=self.is_main)


class RunLog(Console):
    """Writes into a training's folder. `resume_step` steps are done; later lines of an interrupted run are dropped."""

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
        self.dumps.drop_after(resume_step)
        self.metrics = MetricsFile(folder / "metrics.jsonl", resume_step)
        self.trackers = Trackers(trackers, TrackedRun(folder, config, charts or {}, resume_step), say=self.line)

    def scalars(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Write a line of metrics.jsonl, and pass everything to the trackers. On a full disk the line waits."""
        if not self.is_main:
            return
        if self.dumps.num_lost:
            values = {**values, "log/lost_dumps": self.dumps.num_lost}
        num_waiting = len(self.metrics.waiting_steps)
        # Nine significant digits, not decimals: mismatch/kl may be 1e-9.
        rounded = {k: v if isinstance(v, int) else float(f"{v:.9g}") for k, v in values.items()}
        reason = self.metrics.write({"step": step} | rounded)
        if reason and not num_waiting:
            self.line(f"warning: {self.metrics.path}: cannot write step {step} ({reason}); its rows wait for room")
        elif num_waiting and not reason:
            self.line(f"{self.metrics.path}: the {num_waiting} rows that waited are written")
        self.trackers.scalars(step, values, histograms or {})

    def trajectories(self, step: int, groups: list[Group], kind: str = "step") -> None:
        """Start to write the trajectories (dumps.py). Trackers get the first trajectory of the first prompts."""
        if not self.is_main:
            return
        self.dumps.write(step, groups, kind)
        for i, group in enumerate(groups[:NUM_TRANSCRIPTS]):
            t = group.trajectories[0]
            head = f"reward {t.reward} {t.reward_parts} stop {t.stop_reason} answers {group.prompt.answers}"
            text = f"{group.prompt.messages[-1]['content']}\n\n{t.text}"
            self.trackers.text(step, f"{kind}/{i}", f"{head}\n\n```\n{text}\n```")

    def finish(self) -> None:
        """Print where to look at the run, and close all files."""
        if self.is_main:
            for line in self.trackers.where_lines():
                self.line(line)
        self.close()

    def close(self) -> None:
        """Write waiting rows, and close all files."""
        if self.is_main:
            self.trackers.close()
            self.dumps.close()
            reason = self.metrics.write()
            if reason:
                steps = ", ".join(map(str, self.metrics.waiting_steps))
                self.line(f"warning: {self.metrics.path}: lacks the rows of steps {steps} ({reason})")


class Progress(tqdm):
    """A progress bar on a terminal. In a log file: a line for each 25th part of the way, and at least one a minute."""

    def __init__(self, total: int, label: str, *, done: int, is_part: bool, is_main: bool):
        shows_bar = is_main and sys.stderr.isatty()
        super().__init__(
            desc=label,
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
        self.label = label
        self.first_done = done
        self.started_s = time.monotonic()
        self.done_at_last_line = done
        self.last_line_s = self.started_s

    def at(self, done: int, text: str = "", *, keep: bool = False) -> None:
        """Show that `done` parts are done, with a text about the newest one. keep: print a line in any case."""
        self.set_postfix_str(text, refresh=False)
        self.update(done - self.n)
        now_s = time.monotonic()
        is_due = done > self.done_at_last_line and (
            self.done_at_last_line == self.first_done
            or done == self.total
            or done * LINES_PER_RUN // self.total > self.done_at_last_line * LINES_PER_RUN // self.total
            or now_s - self.last_line_s >= LINE_EVERY_S
        )
        if self.is_main and (keep or (self.prints_lines and is_due)):
            left_s = (now_s - self.started_s) / max(done - self.first_done, 1) * (self.total - done)
            parts = [f"{self.label} {done}/{self.total}", text, f"{tqdm.format_interval(left_s)} left"]
            print_line("  ".join(part for part in parts if part))
            self.done_at_last_line = done
            self.last_line_s = now_s


def print_line(text: str) -> None:
    """Print to stdout, above any progress bar on a terminal. A full disk under stdout does not end the run."""
    try:
        tqdm.write(printable(text), file=sys.stdout)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
