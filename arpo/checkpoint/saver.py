"""Save the state of a training with a Hugging Face folder, and resume from it.

A failed save does not end the run if later saves can replace it. Under run.async_save a thread writes a copy, one save
at a time. The thread talks to the threads of the other ranks over a separate process group.
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
from arpo.checkpoint.export import full_weights, point_to, write_export
from arpo.checkpoint.snapshot import Snapshot, snapshot
from arpo.config.sections import RunConfig
from arpo.errors import UserError
from arpo.model import Policy
from arpo.model.critic import TrainedCritic
from arpo.model.optim import num_not_finite
from arpo.ranks import Ranks

logger = logging.getLogger(__name__)
MAX_FAILED_SAVES = 3
"""This many saves in a row may fail. The next failure ends the run."""


class Stateful(Protocol):
    """An object with state besides the models, like `Rollouts`."""

    def state(self) -> dict: ...  # the same on all ranks, in JSON types
    def rank_state(self) -> bytes | None: ...  # this rank's state; None if no rank has any


class Saver:
    """Checkpoints and exports of one run. All methods are collective."""

    def __init__(self, run: RunConfig, ranks: Ranks, *, source: str):
        """source: the model folder with the config and tokenizer of exports."""
        self.run = run
        self.ranks = ranks
        self.source = source
        self.link = run.folder / "hf"
        links = {self.link: run.save_hf_every, run.folder / "best": run.save_hf_every and run.keep_best}
        for link, is_used in links.items():
            if is_used and link.is_dir() and not link.is_symlink():
                raise UserError(f"{link}: a folder, where the link to an export will stand; move it away")
        self.pending: tuple[int, Future[None]] | None = None
        """Step and future of the save in progress."""
        self.host_copy: Snapshot | None = None
        """The last copy for the thread. The next copy reuses its memory."""
        if run.async_save:
            self.ranks = replace(ranks, control=dist.new_group(timeout=ranks.timeout, backend="gloo"))
            # A new thread starts on the first GPU, and would create a context there.
            use_device = partial(torch.cuda.set_device, ranks.device) if ranks.device.type == "cuda" else None
            # Python waits for this thread at the exit of the process, even after an error.
            self.thread = ThreadPoolExecutor(1, "arpo-save", initializer=use_device)
        self.checkpoints = Checkpoints(
            run.folder / "checkpoints", self.ranks, keep=run.keep_checkpoints, link=self.link
        )
        self.saved_step = 0
        self.num_failed = 0

    def resume(self, policy: Policy, optimizer: torch.optim.Optimizer, critic: TrainedCritic | None = None) -> int:
        """Load the newest intact checkpoint and return its step (0 = no checkpoint). `save` will save these objects.

        If the run was killed during the export of this checkpoint, the export is done now. Otherwise RUN/hf would keep
        older weights, forever if no step is left. Raises UserError.
        """
        self.policy = policy
        self.optimizer = optimizer
        self.critic = critic
        self.saved_step = self.checkpoints.resume(policy, optimizer, critic)
        self.progress = self.checkpoints.progress
        self.rank_files = self.checkpoints.rank_files
        if self.saved_step and self.run.save_hf_every:
            self._renew_export(self.checkpoints.folder_of(self.saved_step) / "hf")
        self._keep_best()
        return self.saved_step

    def save_if_due(self, step: int, rollouts: Stateful | None = None, *, is_final: bool) -> None:
        """Save after the last step, and every run.save_every steps, with the state of the rollouts if given."""
        if is_final or (self.run.save_every and step % self.run.save_every == 0):
            progress = rollouts.state() if rollouts else None
            rank_file = rollouts.rank_state() if rollouts else None
            self.save(step, progress, rank_file, is_final=is_final)

    def save(self, step: int, progress: dict | None = None, rank_file: bytes | None = None, *, is_final: bool) -> None:
        """Write the checkpoint. Every run.save_hf_every-th checkpoint, and the last checkpoint, has an export too.

        If the save fails, rank 0 warns. Raises NotWritten after too many failures in a row, and if `is_final`, since no
        later save follows. Under run.async_save the next save raises this error. Raises UserError for non-finite
        weights.
        """
        self.wait()
        self._check_finite(step)
        state = snapshot(self.policy, self.optimizer, self.critic)
        weights = None
        every = self.run.save_hf_every
        if every and (is_final or step // self.run.save_every % every == 0):
            weights = full_weights(self.policy, self.source)
        write = partial(self._write, step, progress=progress, rank_file=rank_file, is_final=is_final)
        if is_final or not self.run.async_save:
            write(state, weights)
            return
        self.host_copy = state.copy_to_host(self.host_copy)
        if weights:
            # All ranks gather them, and only rank 0 keeps them.
            weights = [(name, tensor.to("cpu", copy=True)) for name, tensor in weights if self.ranks.is_main]
        # The sampler may change `progress` while the thread writes.
        future = self.thread.submit(write, self.host_copy, weights, progress=deepcopy(progress))
        self.pending = (step, future)

    def _check_finite(self, step: int) -> None:
        num_bad = num_not_finite(self.policy)
        if self.critic:
            num_bad += num_not_finite(self.critic.model)
        [num_bad_on_all_ranks] = self.ranks.all_reduce_sum(num_bad)
        if num_bad_on_all_ranks:
            advice = f"continue at step {self.saved_step}, the newest checkpoint," if self.saved_step else "begin again"
            raise UserError(
                f"step {step}: weights are NaN or infinite, so nothing is saved; {advice} with a lower "
                "optim.lr (and run.resume_changed True)"
            )

    def wait(self) -> None:
        """Wait for the save in progress. Raises NotWritten if this save failed after too many failures in a row."""
        if self.pending:
            step, future = self.pending
            self.pending = None
            if not future.done():
                logger.info("waiting for the save of step %d", step)
            future.result()

    def _write(
        self,
        step: int,
        state: Snapshot,
        weights: Iterable[tuple[str, torch.Tensor]] | None,
        *,
        progress: dict | None,
        rank_file: bytes | None,
        is_final: bool,
    ) -> None:
        missing = "checkpoint"
        try:
            folder = self.checkpoints.write(step, state, progress=progress, rank_file=rank_file)
            self.saved_step = step
            missing = "Hugging Face folder"
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
            newest = f"the newest checkpoint is of step {self.saved_step}" if self.saved_step else "there is none yet"
            message = f"step {step} has no {missing}: {error}; {newest}"
            if is_final or self.num_failed > MAX_FAILED_SAVES:
                raise NotWritten(f"{message}; make space, and the same command continues from there") from error
            if self.ranks.is_main:
                logger.warning("warning: %s; make space, the next save comes in run.save_every steps", message)

    def _keep_best(self) -> None:
        if not (self.run.keep_best and self.run.save_hf_every):
            return
        run = self.run.folder

        def keep_on_rank_0() -> str:
            return keep_best(run, self.checkpoints.all(), self.saved_step) if self.ranks.is_main else ""

        message = self.checkpoints.write_together(run / "best", keep_on_rank_0)
        if message:
            logger.info(message)

    def _renew_export(self, folder: Path) -> None:
        """Write the export if the folder is missing, or set the link to it if the link is missing."""
        exists, is_linked = self.ranks.from_rank_0((folder.exists(), self.link.resolve() == folder.resolve()))
        if exists and is_linked:
            return
        logger.info("%s is renewed: it did not point to an export of the newest checkpoint", self.link)
        if not exists:
            write_export(full_weights(self.policy, self.source), folder, source=self.source, link=self.link)
        elif self.ranks.is_main:
            point_to(folder, self.link)
