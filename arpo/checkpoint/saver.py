"""Saving the state of a training, with a Hugging Face folder beside it, and continuing from it.

A save that fails ends nothing while a later one can make up for it: the run says so, and goes on from memory.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import torch

from arpo.checkpoint.best import keep_best
from arpo.checkpoint.checkpoints import Checkpoints, NotWritten
from arpo.checkpoint.export import export_hf, point_to
from arpo.config.sections import RunConfig
from arpo.errors import UserError
from arpo.model import Policy
from arpo.model.critic import TrainedCritic
from arpo.ranks import Ranks

logger = logging.getLogger(__name__)
MAX_FAILED_SAVES = 3
"""Saves in a row that may fail; the next one that does ends the run."""


class Stateful(Protocol):
    """Says what a run needs besides its models to go on; `Rollouts` is one."""

    def state(self) -> dict: ...  # the same on all ranks, as JSON can hold it
    def rank_state(self) -> bytes | None: ...  # this rank's own; None where no rank has any


class Saver:
    """Checkpoints and exports of one run. All methods are collective."""

    def __init__(self, run: RunConfig, ranks: Ranks, *, source: str):
        """source: the model folder from which an export has all but its weights."""
        self.run, self.ranks, self.source = run, ranks, source
        self.link = run.folder / "hf"
        if run.save_hf and self.link.is_dir() and not self.link.is_symlink():
            raise UserError(f"{self.link}: a folder, where the link to the newest export will stand; move it away")
        self.checkpoints = Checkpoints(run.folder / "checkpoints", ranks, keep=run.keep_checkpoints)
        self.saved_step = self.num_failed = 0

    @property
    def progress(self) -> dict:
        """The `progress` that was saved with the checkpoint which `resume` has loaded; empty where there was none."""
        return self.checkpoints.progress

    def resume(self, policy: Policy, optimizer: torch.optim.Optimizer, critic: TrainedCritic | None = None) -> int:
        """Load the newest intact checkpoint and return its step, 0 if there is none. `save` will save these objects.

        If the run was killed in the export of that checkpoint, it is exported now: RUN/hf would stay on older weights,
        for good if no step is left to run. Raises UserError.
        """
        self.policy, self.optimizer, self.critic = policy, optimizer, critic
        self.saved_step = self.checkpoints.resume(policy, optimizer, critic)
        if self.saved_step and self.run.save_hf:
            self._renew_export(self.checkpoints.folder_of(self.saved_step) / "hf")
        self._keep_best()
        return self.saved_step

    @property
    def rank_files(self) -> list[Path]:
        """The files, by rank, that were saved as `rank_file` with that checkpoint; empty where there were none."""
        return self.checkpoints.rank_files

    def save_if_due(self, step: int, rollouts: Stateful | None = None, *, is_final: bool) -> None:
        """Save after the last step, and every run.save_every steps, with the state of the rollouts if there are any."""
        if is_final or (self.run.save_every and step % self.run.save_every == 0):
            state, rank_state = (rollouts.state(), rollouts.rank_state()) if rollouts else (None, None)
            self.save(step, state, rank_state, is_final=is_final)

    def save(self, step: int, progress: dict | None = None, rank_file: bytes | None = None, *, is_final: bool) -> None:
        """Write the checkpoint and, under run.save_hf, the export.

        Where that fails, rank 0 warns. Raises NotWritten where it fails too often, or `is_final`: no later save comes.
        """
        missing = "checkpoint"
        try:
            folder = self.checkpoints.save(
                step, self.policy, self.optimizer, self.critic, progress=progress, rank_file=rank_file
            )
            self.saved_step, missing = step, "Hugging Face folder"
            if self.run.save_hf:
                export_hf(self.policy, folder / "hf", source=self.source, link=self.link)
            missing = "part in the choice of the best"
            self._keep_best()
            self.num_failed = 0
        except NotWritten as error:
            self.num_failed += 1
            there = f"the newest checkpoint is of step {self.saved_step}" if self.saved_step else "there is none yet"
            said = f"step {step} has no {missing}: {error}; {there}"
            if is_final or self.num_failed > MAX_FAILED_SAVES:
                raise NotWritten(f"{said}; make space, and the same command continues from there") from error
            if self.ranks.is_main:
                logger.warning("warning: %s; make space, the next save comes in run.save_every steps", said)

    def _keep_best(self) -> None:
        if self.run.keep_best and self.run.save_hf:
            run, step, folders = self.run.folder, self.saved_step, self.checkpoints
            said = folders.together(
                run / "best", lambda: keep_best(run, folders.all(), step) if self.ranks.is_main else ""
            )
            if said[0] and self.ranks.is_main:
                logger.info(said[0])

    def _renew_export(self, folder: Path) -> None:
        is_there, is_linked = self.ranks.from_rank_0((folder.exists(), self.link.resolve() == folder.resolve()))
        if is_there and is_linked:
            return
        logger.info("%s is renewed: the run ended before its last checkpoint was exported", self.link)
        if not is_there:
            export_hf(self.policy, folder, source=self.source, link=self.link)
        elif self.ranks.is_main:
            point_to(folder, self.link)
