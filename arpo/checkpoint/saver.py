"""Saving the state of a training, with a Hugging Face folder beside it, and continuing from it.

A save that fails ends nothing while a later one can make up for it. Under run.async_save a thread writes a copy, one
save at a time; it talks to the other ranks' threads over a process group of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from arpo.checkpoint.best import keep_best
from arpo.checkpoint.checkpoints import Checkpoints, NotWritten
from arpo.checkpoint.export import point_to, whole_weights, write_export
from arpo.checkpoint.snapshot import Snapshot, snapshot
from arpo.config.sections import RunConfig
from arpo.errors import UserError
from arpo.model import Policy
from arpo.model.critic import TrainedCritic
from arpo.model.optim import num_not_finite
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
        if run.save_hf_every and self.link.is_dir() and not self.link.is_symlink():
            raise UserError(f"{self.link}: a folder, where the link to the newest export will stand; move it away")
        self.pending: tuple[int, Future[None]] | None = None
        """The step whose save is under way, and what ends with it."""
        self.staged: Snapshot | None = None
        """The copy that was last written by the thread; the next one takes its memory."""
        if run.async_save:
            self.ranks = replace(ranks, control=dist.new_group(timeout=ranks.timeout, backend="gloo"))
            # A new thread begins on the first GPU, and would make a context there.
            use_device = partial(torch.cuda.set_device, ranks.device) if ranks.device.type == "cuda" else None
            # A process that ends, for whatever reason, waits for this thread.
            self.thread = ThreadPoolExecutor(1, "arpo-save", initializer=use_device)
        self.checkpoints = Checkpoints(
            run.folder / "checkpoints", self.ranks, keep=run.keep_checkpoints, link=self.link
        )
        self.saved_step = self.num_failed = 0

    def resume(self, policy: Policy, optimizer: torch.optim.Optimizer, critic: TrainedCritic | None = None) -> int:
        """Load the newest intact checkpoint and return its step, 0 if there is none. `save` will save these objects.

        If the run was killed in the export of that checkpoint, it is exported now: RUN/hf would stay on older weights,
        for good if no step is left to run. Raises UserError.
        """
        self.policy, self.optimizer, self.critic = policy, optimizer, critic
        self.saved_step = self.checkpoints.resume(policy, optimizer, critic)
        self.progress, self.rank_files = self.checkpoints.progress, self.checkpoints.rank_files  # of that step
        if self.saved_step and self.run.save_hf_every:
            self._renew_export(self.checkpoints.folder_of(self.saved_step) / "hf")
        self._keep_best()
        return self.saved_step

    def save_if_due(self, step: int, rollouts: Stateful | None = None, *, is_final: bool) -> None:
        """Save after the last step, and every run.save_every steps, with the state of the rollouts if there are any."""
        if is_final or (self.run.save_every and step % self.run.save_every == 0):
            state, rank_state = (rollouts.state(), rollouts.rank_state()) if rollouts else (None, None)
            self.save(step, state, rank_state, is_final=is_final)

    def save(self, step: int, progress: dict | None = None, rank_file: bytes | None = None, *, is_final: bool) -> None:
        """Write the checkpoint and, with every run.save_hf_every-th and the last one, the export.

        Where that fails, rank 0 warns. Raises NotWritten where it fails too often, or `is_final`: no later save comes;
        under run.async_save at the save after the one that failed. Raises UserError for weights that are not finite.
        """
        self.wait()
        self._check_finite(step)
        moment, weights, every = snapshot(self.policy, self.optimizer, self.critic), None, self.run.save_hf_every
        if every and (is_final or step // self.run.save_every % every == 0):
            weights = whole_weights(self.policy, self.source)
        if is_final or not self.run.async_save:
            self._write(step, moment, weights, progress, rank_file, is_final)
            return
        self.staged = moment.staged(self.staged)
        if weights:  # gathered on all ranks, kept on rank 0, which writes them
            weights = [(name, tensor.to("cpu", copy=True)) for name, tensor in weights if self.ranks.is_main]
        state = deepcopy(progress)  # whose parts live on in the sampler
        self.pending = step, self.thread.submit(self._write, step, self.staged, weights, state, rank_file, is_final)

    def _check_finite(self, step: int) -> None:
        models = [self.policy, *([self.critic.model] if self.critic else [])]
        if any(self.ranks.all_reduce_sum(sum(map(num_not_finite, models)))):
            there = f"continue at step {self.saved_step}, the newest checkpoint," if self.saved_step else "begin again"
            raise UserError(
                f"step {step}: weights are NaN or infinite, so nothing is saved; {there} with a lower "
                "optim.lr (and run.resume_changed True)"
            )

    def wait(self) -> None:
        """Wait for the save that is under way, if there is one. Raises NotWritten where it was one failure too many."""
        if self.pending:
            (step, write), self.pending = self.pending, None
            if not write.done():
                logger.info("waiting for the save of step %d", step)
            write.result()

    def _write(
        self,
        step: int,
        moment: Snapshot,
        weights: Iterable[tuple[str, torch.Tensor]] | None,
        progress: dict | None,
        rank_file: bytes | None,
        is_final: bool,
    ) -> None:
        missing = "checkpoint"
        try:
            folder = self.checkpoints.write(step, moment, progress=progress, rank_file=rank_file)
            self.saved_step, missing = step, "Hugging Face folder"
            if weights is not None:
                group = self.ranks.control
                write_export(weights, folder / "hf", source=self.source, link=self.link, group=group)
            missing = "part in the choice of the best"
            self._keep_best()
            self.num_failed = 0
            if self.run.async_save:
                logger.info("step %d is saved", step)
        except NotWritten as error:
            self.num_failed += 1
            there = f"the newest checkpoint is of step {self.saved_step}" if self.saved_step else "there is none yet"
            said = f"step {step} has no {missing}: {error}; {there}"
            if is_final or self.num_failed > MAX_FAILED_SAVES:
                raise NotWritten(f"{said}; make space, and the same command continues from there") from error
            if self.ranks.is_main:
                logger.warning("warning: %s; make space, the next save comes in run.save_every steps", said)

    def _keep_best(self) -> None:
        if self.run.keep_best and self.run.save_hf_every:
            run, step, folders = self.run.folder, self.saved_step, self.checkpoints
            if said := folders.together(
                run / "best", lambda: keep_best(run, folders.all(), step) if self.ranks.is_main else ""
            ):
                logger.info(said)

    def _renew_export(self, folder: Path) -> None:
        is_there, is_linked = self.ranks.from_rank_0((folder.exists(), self.link.resolve() == folder.resolve()))
        if is_there and is_linked:
            return
        logger.info("%s is renewed: the run ended before its last checkpoint was exported", self.link)
        if not is_there:
            write_export(whole_weights(self.policy, self.source), folder, source=self.source, link=self.link)
        elif self.ranks.is_main:
            point_to(folder, self.link)
