"""Alarms: warn if a metric leaves its band, since a collapse often begins like this.

The band is around the median of the metric's last steps, and so follows slow changes. A single step outside may be
chance. At the second in a row a line warns, and under run.stop_on_collapse the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from statistics import median
from typing import NamedTuple

from arpo.config.sections import RunConfig
from arpo.errors import UserError
from arpo.log.metrics_file import rows_until
from arpo.log.run_log import Console
from arpo.ranks import Ranks

WINDOW_STEPS = 10
"""The median is taken over this many last steps."""
MIN_STEPS = 5
"""With fewer steps there is no band."""
IN_A_ROW = 2
"""This many steps outside the band in a row raise an alarm."""
MOSTLY_SOLVED = 0.5
LARGE_MISMATCH = 1e-3
"""A `mismatch/kl` (nats) above this number is worth a correction. Kernels of bfloat16 often differ by more."""


def share_executed(values: Mapping[str, float]) -> float | None:
    """Return the share of calls that ran. Malformed calls and calls over a limit do not run."""
    num_executed = values.get("tools/all/calls", 0)
    num_calls = num_executed + values.get("tools/all/not_run", 0)
    return num_executed / num_calls if num_calls else None


def reward_spread(values: Mapping[str, float]) -> float | None:
    """Return the standard deviation of a group's rewards, while less than half of the trajectories are right.

    A policy that answers every prompt with one template loses this spread, not its entropy (RAGEN-2, arXiv 2604.06268).
    So does a policy that is right everywhere, which is no alarm.
    """
    if values.get("reward/solved_share", 0.0) >= MOSTLY_SOLVED:
        return None
    return values.get("group/reward_std")


class Band(NamedTuple):
    """The band of a number: from `low` to `high` times its median."""

    name: str
    value_of: Callable[[Mapping[str, float]], float | None]
    """Metrics of a step -> the number; None = this step has none."""
    low: float
    high: float


BANDS = (
    Band("entropy", lambda values: values.get("loss/entropy"), low=1 / 3, high=3.0),
    Band("gradient norm", lambda values: values.get("optim/grad_norm"), low=0.0, high=2.5),
    Band("response length", lambda values: values.get("response/tokens"), low=1 / 2, high=2.0),
    Band("share of calls that ran", share_executed, low=0.7, high=inf),
    Band("spread of a group's rewards", reward_spread, low=1 / 3, high=inf),
)
READ = (
    "loss/entropy",
    "optim/grad_norm",
    "response/tokens",
    "tools/all/calls",
    "tools/all/not_run",
    "reward/solved_share",
    "group/reward_std",
    "group/not_trained_on",
)
"""The metrics that `Alarms.add` reads."""


class Alarms:
    """Watches the metrics of a run. They are the same on all ranks."""

    def __init__(self, run: RunConfig, log: Console, ranks: Ranks, done_steps: int, *, is_corrected: bool):
        """Read the metrics of the first `done_steps` steps from metrics.jsonl. Collective.

        is_corrected: the loss corrects for vLLM's probabilities (loss.rollout_correction).
        """
        self.run = run
        self.advises_correction = not is_corrected
        self.log = log
        self.values: dict[str, list[float]] = {band.name: [] for band in BANDS}
        self.num_outside = dict.fromkeys(self.values, 0)
        """Number of newest steps in a row outside the band, by its name."""
        rows = ranks.from_rank_0(rows_until(run.folder / "metrics.jsonl", done_steps, names=READ))
        for step, row in sorted(rows.items()):
            self.add(step, row)

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Log the alarms of a step. Raises UserError under run.stop_on_collapse."""
        mismatch = values.get("mismatch/kl", 0.0)
        if self.advises_correction and mismatch > LARGE_MISMATCH:
            self.advises_correction = False  # once is enough
            self.log.line(
                f"step {step}: mismatch/kl is {mismatch:.2g} (above {LARGE_MISMATCH:g}): vLLM sampled with other "
                "probabilities than the trainer computes; --loss.rollout_correction tis weighs the tokens accordingly"
            )
        for alarm in self.add(step, values):
            last_good = f"step_{step - IN_A_ROW:06d}"
            folders = sorted(self.run.folder.glob("checkpoints/step_??????"))
            good_folders = [folder for folder in folders if folder.name <= last_good]
            if good_folders:
                message = f"{alarm}; {good_folders[-1]} is from before"
            else:
                message = f"{alarm}; no checkpoint from before is left"
            if self.run.stop_on_collapse:
                fix = "put newer checkpoints away, lower optim.lr say, and go on with --run.resume_changed True"
                raise UserError(f"step {step}: {message}; {fix}")
            self.log.line(f"step {step}: alarm: {message}")

    def add(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Add the metrics of a step. Return a text for each metric that has been outside its band for IN_A_ROW
        steps."""
        # A step without training says more about the tools than about the policy.
        if values.get("group/not_trained_on"):
            return []
        alarms = []
        for name, value_of, low, high in BANDS:
            value = value_of(values)
            if value is None or not step:
                continue
            window = self.values[name][-WINDOW_STEPS:]
            middle = median(window) if len(window) >= MIN_STEPS else value
            # If the median is 0, inf * 0 is NaN, and no value is above NaN.
            is_outside = value < low * middle or value > high * middle
            self.num_outside[name] = self.num_outside[name] + 1 if is_outside else 0
            self.values[name].append(value)
            if self.num_outside[name] == IN_A_ROW:
                alarms.append(
                    f"the {name} is {value:.3g}, and its median over the {len(window)} steps before {middle:.3g}: "
                    "the policy may be collapsing"
                )
        return alarms
