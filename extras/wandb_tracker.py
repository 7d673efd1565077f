"""Weights & Biases as a tracker (`pip install -e '.[wandb]'`): `--run.trackers extras/wandb_tracker.py:Wandb`.

WANDB_MODE=offline writes to RUN/wandb alone. The project is WANDB_PROJECT, by default arpo-torch. Only wandb handles
the key: no file of a run has the key.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from wandb import Histogram, Html, Settings, init  # fails for a mere folder `wandb`, like a run's

from arpo.config.facts import leaves
from arpo.log.trackers import TrackedRun
from extras.tracked_ids import id_of

LOGIN_TIMEOUT_S = 30.0


class Wandb:
    """A run of Weights & Biases. A continued training continues the same run."""

    def __init__(self, run: TrackedRun):
        # its console capture would tear progress bars; and no prompt for a key may hold a run up
        settings = Settings(console="off", login_timeout=LOGIN_TIMEOUT_S)
        self._run = init(
            project=os.environ.get("WANDB_PROJECT") or "arpo-torch", name=run.folder.name, id=id_of(run, "wandb"),
            resume="allow", dir=str(run.folder), config=leaves(run.config), settings=settings,
        )  # fmt: skip
        # wandb's step must never decrease, but a killed run repeats steps. So our step is an ordinary value.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.where = f"wandb: {self._run.url}" if self._run.url else f"wandb sync {Path(self._run.dir).parent}"

    def scalars(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        drawn = {name: Histogram(numbers) for name, numbers in histograms.items()}
        self._run.log({**values, **drawn, "step": step})

    def text(self, step: int, name: str, text: str) -> None:
        pre = f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'  # escaped: the model's text is never HTML
        self._run.log({name: Html(pre, inject=False), "step": step})

    def close(self) -> None:
        self._run.finish()
