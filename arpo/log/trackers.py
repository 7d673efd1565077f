"""Trackers show the metrics of a run in other programs, like TensorBoard. (metrics.jsonl has them in any case.)

A tracker is a function, in a custom file (run.trackers FILE.py:NAME) or with a line in TRACKERS. A failed import is an
error before the model is loaded. A later failure gives a warning and turns the tracker off, but never ends the run.
"""

from __future__ import annotations

import inspect
import math
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from arpo.config.facts import leaves
from arpo.config.named import brief, find
from arpo.log.charts import Charts


class Tracker(Protocol):
    """A receiver of rank 0's metrics. A tracker may raise any exception."""

    where: str
    """A line for the user: the place to look at the run."""

    def scalars(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """Facts about a run, for its trackers."""

    folder: Path
    config: object
    charts: Charts
    resume_step: int
    """Number of finished steps; 0 = a new run."""


# ---- the trackers


class TensorBoard:
    """Writes to RUN/tb. Events of a killed run after its last checkpoint are dropped."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _hook_of_threads
        purge_step = run.resume_step + 1 if run.resume_step else 0  # 0 also drops the events before step 1
        self.where = f"tensorboard --logdir {shlex.quote(str(run.folder / 'tb'))}"
        self._board = SummaryWriter(str(run.folder / "tb"), purge_step=purge_step)
        rows = [f"| {key} | {value} |" for key, value in leaves(run.config).items()]
        self._board.add_text("config", "\n".join(["| field | value |", "|---|---|", *rows]), 0)
        if run.charts:
            charts = {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in run.charts.items()}
            self._board.add_custom_scalars({"overview": charts})

    def scalars(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        import numpy as np

        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        for name, numbers in histograms.items():
            self._board.add_histogram(name, np.array(numbers), step)
        self._board.flush()

    def text(self, step: int, name: str, text: str) -> None:
        self._board.add_text(name, text, step)

    def close(self) -> None:
        self._board.close()


def _hook_of_threads(failure: threading.ExceptHookArgs) -> None:
    """Print a thread's error, except for TensorBoard's threads. TensorBoard's next call raises the error of its thread,
    and `Trackers` prints the error as a line."""
    if not type(failure.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failure)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
}
"""Values of `run.trackers`. Each tracker imports the needed package itself."""


# ---- all of a run's trackers


def _complete(tracker: Tracker) -> Tracker:
    """Return the tracker. Raises TypeError if it lacks a member, or has a coroutine, which nobody would await."""
    for name in ("scalars", "text", "close", "where"):
        if not hasattr(tracker, name):
            raise TypeError(f"it has no {name!r}")
        if inspect.iscoroutinefunction(getattr(tracker, name)):
            raise TypeError(f"its {name!r} is a coroutine; write `def {name}`")
    return tracker


class Trackers:
    """The trackers of a run. If one raises, a warning is printed, the tracker is turned off, and the run goes on."""

    def __init__(self, names: Sequence[str], run: TrackedRun, *, say: Callable[[str], None]):
        self._say = say
        self._running: dict[str, Tracker] = {}
        for name in names:
            try:
                self._running[name] = _complete(find("run.trackers", name, TRACKERS)(run))
            except Exception as error:
                self._warn(name, error)

    def _warn(self, name: str, error: Exception) -> None:
        self._say(f"warning: run.trackers: {name} failed ({brief(error)}); it is off, and the run goes on")

    def _each(self, action: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._running.items()):
            try:
                action(tracker)
            except Exception as error:
                del self._running[name]
                self._warn(name, error)

    def scalars(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Pass on the metrics of a step, and the finite values of its histograms."""
        finite: dict[str, list[float]] = {}
        for name, numbers in histograms.items():
            finite_numbers = [number for number in numbers if math.isfinite(number)]
            if finite_numbers:
                finite[name] = finite_numbers
        self._each(lambda tracker: tracker.scalars(step, values, finite))

    def text(self, step: int, name: str, text: str) -> None:
        """Pass on a Markdown text."""
        self._each(lambda tracker: tracker.text(step, name, text))

    def where_lines(self) -> list[str]:
        """Return the line `where` of each running tracker."""
        return [tracker.where for tracker in self._running.values()]

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
