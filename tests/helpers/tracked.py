"""Runs with trackers, without a training."""

from dataclasses import dataclass, field
from pathlib import Path

from arpo.config.sections import RunConfig
from arpo.log import RunLog


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)


def log_of(folder: Path, *trackers: str, resume_step: int = 0) -> RunLog:
    return RunLog(folder, Config(), is_main=True, trackers=trackers, resume_step=resume_step)


def logged_twice(folder: Path, tracker: str) -> None:
    """Steps 1 to 3; then a continuation from step 2, as after a kill."""
    log = log_of(folder, tracker)
    for step in (1, 2, 3):
        log.scalars(step, {"reward/mean": step / 4}, {"histogram/reward": [0.0, 1.0, float("nan")]})
    log.finish()
    log = log_of(folder, tracker, resume_step=2)
    log.scalars(3, {"reward/mean": 0.875})
    log.finish()
