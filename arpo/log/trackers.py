"""Trackers show the numbers of a run elsewhere than in metrics.jsonl: in TensorBoard, say.

A tracker is one function, in a file of yours (run.trackers FILE.py:NAME) or with one line in TRACKERS. One that cannot
be imported is an error before a model is loaded; whatever goes wrong later is one warning, and the tracker is off: a
run never ends for its sake.
"""

from __future__ import annotations

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
    """A receiver of the numbers of rank 0. It may raise anything."""

    where: str
    """Line that says where the run can be looked at."""

    def scalars(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """A run, as a tracker is told of it when it begins."""

    folder: Path
    config: object
    charts: Charts
    resume_step: int
    """Number of steps that are done; 0 = a new run."""


# ---- the trackers


class TensorBoard:
    """RUN/tb. What a killed run wrote after its checkpoint is dropped."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _hook_of_threads
        purge_step = run.resume_step + 1 if run.resume_step else 0  # also what it did before step 1
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
    """Show the error of a thread, but not of TensorBoard's: its next call raises it here, where it is one line."""
    if not type(failure.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(failure)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
}
"""Values of `run.trackers`. Each imports its package itself."""


# ---- all of a run's trackers


class Trackers:
    """The trackers of a run. One that raises is told of in a warning, and gets no more; the run goes on."""

    def __init__(self, names: Sequence[str], run: TrackedRun, *, say: Callable[[str], None]):
        self._say = say
        self._running: dict[str, Tracker] = {}
        for name in names:
            try:
                self._running[name] = find("run.trackers", name, TRACKERS)(run)
            except Exception as error:
                self._tell(name, error)

    def _tell(self, name: str, error: Exception) -> None:
        self._say(f"warning: run.trackers: {name} failed ({brief(error)}); it is off, and the run goes on")

    def _each(self, action: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._running.items()):
            try:
                action(tracker)
            except Exception as error:
                del self._running[name]
                self._tell(name, error)

    def scalars(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Hand on the numbers of a step, and the finite values of its histograms."""
        finite = {name: [number for number in numbers if math.isfinite(number)] for name, numbers in histograms.items()}
        drawn = {name: numbers for name, numbers in finite.items() if numbers}
        self._each(lambda tracker: tracker.scalars(step, values, drawn))

    def text(self, step: int, name: str, text: str) -> None:
        """Hand on a Markdown text."""
        self._each(lambda tracker: tracker.text(step, name, text))

    def places(self) -> list[str]:
        """Return a line for each tracker that still works, which says where the run can be looked at."""
        return [tracker.where for tracker in self._running.values()]

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())
