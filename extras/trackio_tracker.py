"""Trackio as a tracker: `--run.trackers tensorboard extras/trackio_tracker.py:Trackio` (`pip install -e '.[trackio]'`).

It is local, in its own folder (TRACKIO_DIR), or on the Space or server that its environment names. The project is
TRACKIO_PROJECT, else arpo-torch. Texts are left to TensorBoard and the viewer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import trackio

from arpo.config.facts import leaves
from arpo.log.trackers import TrackedRun
from extras.tracked_ids import id_of


class Trackio:
    """A run of Trackio, which a continued run goes on in."""

    def __init__(self, run: TrackedRun):
        project = os.environ.get("TRACKIO_PROJECT") or "arpo-torch"
        self.where = f"trackio show --project {project}"
        self._run = trackio.init(
            project=project,
            name=f"{run.folder.name}-{id_of(run, 'trackio')}",
            resume="allow",
            embed=False,
            config={key: str(value) for key, value in leaves(run.config).items()},
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def scalars(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        drawn = {name: trackio.Histogram(numbers) for name, numbers in histograms.items()}
        self._run.log({**values, **drawn}, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        pass

    def close(self) -> None:
        self._run.finish()
