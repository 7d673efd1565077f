"""Checkpoints that survive a kill at any moment.

    checkpoints/step_000100/{manifest.json, .metadata, __0_0.distcp, ..., random_states.pt, progress.json, hf/}
    checkpoints/latest

A checkpoint is written to a temporary folder, and a manifest lists its files with sizes and checksums. Then the folder
is renamed, and only then `latest` names the folder. The distributed checkpoint format (DCP) itself detects neither
unfinished folders nor flipped bytes (measured).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import pickle
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import arpo.checkpoint.manifest as manifest
from arpo.checkpoint.safe_reader import SafeReader
from arpo.checkpoint.snapshot import Snapshot, live_tensors
from arpo.checkpoint.writer import MeasuredWriter
from arpo.config.bounded import read_json
from arpo.errors import UserError
from arpo.model import Policy
from arpo.model.critic import TrainedCritic
from arpo.ranks import RandomState, Ranks

T = TypeVar("T")
logger = logging.getLogger(__name__)
RANDOM_STATES = "random_states.pt"
PROGRESS = "progress.json"
RANK_FILE = "carried_{rank:05d}.json.gz"


class NotWritten(UserError):
    """The disk is full or cannot be written. All ranks raise it. Older checkpoints stay unchanged."""


class Checkpoints:
    """The checkpoint folder of one run. All methods are collective."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int = 2, link: Path | None = None):
        """keep: keep this many newest checkpoints, at least 2, since the newest one may be damaged. link: a symbolic
        link into a checkpoint; this checkpoint stays too."""
        self.folder = folder
        self.ranks = ranks
        self.keep = keep
        self.link = link
        self.progress: dict = {}
        """`progress` of the resumed checkpoint (see `write`). Empty if there was none."""
        self.rank_files: list[Path] = []
        """Files with each rank's `rank_file` of the resumed checkpoint, by rank. Empty if there were none."""

    def write(
        self, step: int, state: Snapshot, *, progress: dict | None = None, rank_file: bytes | None = None
    ) -> Path:
        """Write models, optimizers, step and random states of all ranks. Return the folder.

        progress: other state of the run in JSON types, the same on all ranks. rank_file: other state of this rank.
        Raises NotWritten; then older checkpoints stay unchanged.
        """
        final = self.folder_of(step)
        temporary = final.with_suffix(".tmp")
        random_states = self.ranks.all_gather_objects(state.random_state)
        writer = MeasuredWriter(temporary)
        try:
            self.write_together(temporary, lambda: self._begin(writer, random_states, progress or {}))
            with errors_of_all_ranks(f"{temporary}: cannot write the checkpoint", NotWritten):
                dcp.save(state.tensors, storage_writer=writer, process_group=self.ranks.control)
            if rank_file is not None:
                name = RANK_FILE.format(rank=self.ranks.rank)
                self.write_together(temporary, lambda: writer.write(name, rank_file))
            # Each rank lists its own files: on a network disk rank 0 may not see them for a minute.
            files = dict(ChainMap(*self.ranks.all_gather_objects(writer.files)))
            self.write_together(temporary, lambda: self._publish(temporary, final, step, files))
        except NotWritten:
            if self.ranks.is_main:
                # Free the space for the next try.
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _begin(self, writer: MeasuredWriter, random_states: list[dict], progress: dict) -> None:
        if not self.ranks.is_main:
            return
        for stale in filter(manifest.may_be_removed, self.folder.glob("step_*.tmp")):
            shutil.rmtree(stale)
        writer.path.mkdir(parents=True)
        # Into memory first, since torch.save to a full disk raises no OSError.
        buffer = io.BytesIO()
        torch.save(random_states, buffer)
        writer.write(RANDOM_STATES, buffer.getbuffer())
        writer.write(PROGRESS, json.dumps(progress).encode())

    def _publish(self, temporary: Path, final: Path, step: int, files: manifest.Files) -> None:
        if not self.ranks.is_main:
            return
        manifest.write(temporary, step, files)
        temporary.rename(final)
        manifest.sync(self.folder)
        manifest.write_synced(self.folder / "latest.tmp", final.name + "\n")
        (self.folder / "latest.tmp").rename(self.folder / "latest")
        linked = self.link and self.link.resolve().parent.name
        for old in [*self.all()[self.keep :], *self.folder.glob("step_*.broken")]:
            if old.name != linked and manifest.may_be_removed(old):
                shutil.rmtree(old)

    def write_together(self, folder: Path, write: Callable[[], T]) -> T:
        """Call `write` on each rank and return this rank's value. If one rank fails, all ranks raise NotWritten."""

        def attempt() -> T:
            try:
                return write()
            except OSError as error:
                reason = f"rank {self.ranks.rank}: {error.strerror or error}"
                raise NotWritten(f"{folder}: cannot write the checkpoint ({reason})") from error

        return self.ranks.call_together(attempt)

    def resume(self, policy: Policy, optimizer: torch.optim.Optimizer, critic: TrainedCritic | None = None) -> int:
        """Load the newest intact checkpoint and return its step. Return 0 without a checkpoint.

        The world size may change. The optimizer's settings (weight decay, betas) come from the config, not from the
        checkpoint. Raises UserError if there are checkpoints but none is intact, or if the newest intact one is of
        another model, or has weights or state of the optimizer that would not be loaded.
        """
        folder = self._newest_intact()
        if folder is None:
            return 0
        with errors_of_all_ranks(f"{folder}: cannot be loaded; are model.path and model.lora_rank those of the run?"):
            tensors = live_tensors(policy, optimizer, critic)
            dcp.load(tensors, storage_reader=SafeReader(folder))  # in place
        check_all_is_loaded(folder, tensors)
        try:
            random_states = torch.load(folder / RANDOM_STATES, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError):  # the checksum is right, so `write` did not make this file
            raise UserError(f"{folder / RANDOM_STATES}: cannot be read; it holds more than random states") from None
        if self.ranks.rank < len(random_states):  # ranks beyond the saved world size keep their seeds
            RandomState(**random_states[self.ranks.rank]).restore()
        try:
            self.progress = read_json(folder / PROGRESS)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / PROGRESS}: cannot be read ({error}); take an older checkpoint") from None
        self.rank_files = sorted(folder.glob(RANK_FILE.replace("{rank:05d}", "*")))
        return manifest.step_of(folder)

    def _newest_intact(self) -> Path | None:
        """Return the newest intact folder, and rename newer, broken ones. Rank 0 lists the folders, and each rank
        checks a share of the files."""
        broken: list[tuple[Path, str]] = []
        share = slice(self.ranks.rank, None, self.ranks.world_size)
        for name, files in self.ranks.from_rank_0([(folder.name, manifest.read(folder)) for folder in self.all()]):
            folder = self.folder / name
            problems = self.ranks.all_gather_objects(manifest.find_problem(folder, files, share))
            if any(problems):
                broken.append((folder, next(filter(None, problems))))
                continue
            if self.ranks.is_main:
                for newer, problem in broken:
                    logger.warning("%s is skipped: %s", newer, problem)
                    shutil.rmtree(newer.with_suffix(".broken"), ignore_errors=True)
                    newer.rename(newer.with_suffix(".broken"))
            return folder
        if broken:
            # Starting again from step 0 would silently throw the run away.
            folder, problem = broken[0]
            raise UserError(f"{folder}: {problem}, and no other checkpoint is intact; move {self.folder} away")
        return None

    def folder_of(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def all(self) -> list[Path]:
        """Return the folders of finished checkpoints, newest first. Leave out folders of other names."""
        folders = [folder for folder in self.folder.glob("step_*") if manifest.step_of(folder) >= 0]
        return sorted(folders, key=manifest.step_of, reverse=True)


def verify(folder: Path) -> str | None:
    """Check size and checksum of every file in the manifest, without other ranks. Return the problem, or None."""
    return manifest.find_problem(folder, manifest.read(folder))


def check_all_is_loaded(folder: Path, tensors: dict[str, Any]) -> None:
    """Raise UserError if the checkpoint has weights, or state of the optimizer, that `tensors` lacks: DCP skips them.

    Then frozen weights would be those of model.path again, and an optimizer would begin without its momentum.
    """
    known = {f"model.{weight}" for weight in tensors["model"]}
    for weight, state in tensors["optimizer"].items():
        known |= {f"optimizer.{weight}.{name}" for name in state}
    saved = SafeReader(folder).read_metadata().state_dict_metadata
    left = [name for name in sorted(saved) if name.startswith(("model.", "optimizer.")) and name not in known]
    if left:
        raise UserError(
            f"{folder}: {left[0]} would not be loaded. Freeze weights from the start of a run on; and if the optimizer "
            "is another one, name its state in MOMENTS (arpo/model/optim.py)"
        )


@contextlib.contextmanager
def errors_of_all_ranks(what: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn DCP's error, which has the failures of all ranks, into an error of `kind` with the first failure."""
    try:
        yield
    except CheckpointException as error:
        if not all(isinstance(reason, Exception) for reason, _ in error.failures.values()):
            raise KeyboardInterrupt from error  # torch also collects a KeyboardInterrupt as a failure
        rank = min(error.failures)
        reason, _ = error.failures[rank]
        raise kind(f"{what} (rank {rank}: {' '.join(str(reason).split())[:300]})") from error
