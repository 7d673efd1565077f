"""Weights & Biases as a tracker (`pip install -e '.[wandb]'`): `--run.trackers extras/wandb_tracker.py:Wandb`.

WANDB_MODE=offline writes to RUN/wandb alone. The project is WANDB_PROJECT, else arpo-torch. The key is wandb's
business: it is in none of our files.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from wandb import Histogram, Html, Settings, init  # a mere folder, like the one that wandb makes, has none of them

from arpo.config.facts import leaves
from arpo.log.trackers import TrackedRun
from extras.tracked_ids import id_of

LOGIN_TIMEOUT_S = 30.0


class Wandb:
    """A run of Weights & Biases, which a continued run goes on in."""

    def __init__(self, run: TrackedRun):
        # its console capture would tear progress bars; and no prompt for a key may hold a run up
        settings = Settings(console="off", login_timeout=LOGIN_TIMEOUT_S)
        self._run = init(
            project=os.environ.get("WANDB_PROJECT") or "arpo-torch", name=run.folder.name, id=id_of(run, "wandb"),
            resume="allow", dir=str(run.folder), config=leaves(run.config), settings=settings,
        )  # fmt: skip
        # its own step must never fall, but a run that was killed does steps again; so ours is a number like the others
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.where = f"wandb: {self._run.url}" if self._run.url else f"wandb sync {Path(self._run.dir).parent}"

    def scalars(self, step: int, values: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        drawn = {name: Histogram(numbers) for name, numbers in histograms.items()}
        self._run.log({**values, **drawn, "step": step})

    def text(self, step: int, name: str, text: str) -> None:
        pre = f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'  # what a model wrote is shown, not obeyed
        self._run.log({name: Html(pre, inject=False), "step": step})

    def close(self) -> None:
        self._run.finish()
