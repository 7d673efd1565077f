"""Trackio as a tracker: `--run.trackers tensorboard extras/trackio_tracker.py:Trackio` (`pip install -e '.[trackio]'`).

Trackio writes to a local folder (TRACKIO_DIR), or to the Space or server named in Trackio's environment variables. The
project is TRACKIO_PROJECT, by default arpo-torch. TensorBoard and the viewer show the texts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import trackio

from arpo.config.facts import leaves
from arpo.log.trackers import TrackedRun
from extras.tracked_ids import id_of


class Trackio:
    """A run of Trackio. A continued training continues the same run."""

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
