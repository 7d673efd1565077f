"""Alarms: a number of a step that has left the band of those before it, which is how a collapse begins.

The band of a number is around the median of its last steps, so a run that changes slowly takes it along. One step
beyond it is chance; at the second in a row a line says so, and under run.stop_on_collapse the run ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from statistics import median
from typing import NamedTuple

from arpo.config.sections import RunConfig
from arpo.errors import UserError
from arpo.log.metrics_file import rows_until
from arpo.log.run_log import Console
from arpo.ranks import Ranks

NUM_STEPS, LEAST_STEPS = 10, 5
"""Steps that the median is taken over, and those without which there is none."""
IN_A_ROW = 2
"""Steps beyond the band that make an alarm."""
NUM_RUN, NUM_NOT_RUN = "tools/all/calls", "tools/all/not_run"


class Band(NamedTuple):
    """How far a number may go from its median: `low` and `high` times that."""

    name: str
    tag: str
    low: float
    high: float


BANDS = (
    Band("entropy", "loss/entropy", 1 / 3, 3.0),
    Band("gradient norm", "optim/grad_norm", 0.0, 2.5),
    Band("response length", "response/tokens", 1 / 2, 2.0),
    Band("share of calls that ran", "", 0.7, inf),  # malformed ones and those over a limit do not
)


class Alarms:
    """Watches the numbers of a run, which are the same on all ranks."""

    def __init__(self, run: RunConfig, log: Console, ranks: Ranks, done_steps: int):
        """Know the steps that are done from metrics.jsonl. Collective."""
        self.run, self.log = run, log
        self.values: dict[str, list[float]] = {band.name: [] for band in BANDS}
        self.num_beyond = dict.fromkeys(self.values, 0)
        names = [tag for _, tag, _, _ in BANDS if tag] + [NUM_RUN, NUM_NOT_RUN]
        before = ranks.from_rank_0(rows_until(run.folder / "metrics.jsonl", done_steps, names=names))
        for step, row in sorted(before.items()):
            self.add(step, row)

    def look(self, step: int, values: Mapping[str, float]) -> None:
        """Say what is wrong with the numbers of a step. Raises UserError under run.stop_on_collapse."""
        for alarm in self.add(step, values):
            saved = sorted(self.run.folder.glob("checkpoints/step_??????"))
            good = [str(folder) for folder in saved if folder.name <= f"step_{step - IN_A_ROW:06d}"][-1:]
            said = f"{alarm}; {good[0]} is from before" if good else f"{alarm}; no checkpoint from before is left"
            if self.run.stop_on_collapse:
                fix = "put newer checkpoints away, lower optim.lr say, and go on with --run.resume_changed True"
                raise UserError(f"step {step}: {said}; {fix}")
            self.log.line(f"step {step}: alarm: {said}")

    def add(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Take the numbers of a step, and return what is wrong: a text for each number that has just left its band."""
        alarms = []
        for name, tag, low, high in BANDS:
            value = values.get(tag) if tag else _share_run(values)
            if value is None or not step:
                continue
            before = self.values[name][-NUM_STEPS:]
            middle = median(before) if len(before) >= LEAST_STEPS else value
            is_beyond = value < low * middle or value > high * middle  # inf * 0 is no number: nothing is beyond that
            self.num_beyond[name] = (self.num_beyond[name] + 1) * is_beyond
            self.values[name].append(value)
            if self.num_beyond[name] == IN_A_ROW:
                alarms.append(
                    f"the {name} is {value:.3g}, and its median over the {len(before)} steps before {middle:.3g}: "
                    "the policy may be collapsing"
                )
        return alarms


def _share_run(values: Mapping[str, float]) -> float | None:
    num_run, num_not_run = values.get(NUM_RUN, 0), values.get(NUM_NOT_RUN, 0)
    return num_run / (num_run + num_not_run) if num_run + num_not_run else None
