"""Checkpoints that survive a kill at any moment.

    checkpoints/step_000100/{manifest.json, .metadata, __0_0.distcp, ..., random_states.pt, progress.json, hf/}
    checkpoints/latest

Written to a temporary folder, listed with sizes and checksums in a manifest, renamed, and only then pointed to; the
distributed checkpoint format (DCP) itself notices neither a half-written folder nor flipped bytes (measured).
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
    """The disk is full or cannot be written. Raised on all ranks alike; what was there before stays as it is."""


class Checkpoints:
    """The checkpoint folder of one run. All methods are collective: every rank calls them."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int = 2, link: Path | None = None):
        """keep: number of newest checkpoints that stay when another one is saved, >= 2: a broken one has a fallback.
        link: a symbolic link into a checkpoint that stays too."""
        self.folder, self.ranks, self.keep, self.link = folder, ranks, keep, link
        self.progress: dict = {}
        """The `progress` given to `write`, as `resume` has found it; empty where there was none."""
        self.rank_files: list[Path] = []
        """The `rank_file`s given to `write`, by rank, as `resume` has found them; empty where there were none."""

    def write(
        self, step: int, moment: Snapshot, *, progress: dict | None = None, rank_file: bytes | None = None
    ) -> Path:
        """Write models, optimizers, step and random states, as all ranks held them at one moment. Return the folder.

        `progress`, the same on all ranks, is what else the next step depends on, as JSON can hold it; `rank_file` is
        what each rank has of its own. Raises NotWritten; older checkpoints then stay as they are.
        """
        final = self.folder_of(step)
        temporary = final.with_suffix(".tmp")
        random_states = self.ranks.all_gather_objects(moment.random_state)
        writer = MeasuredWriter(temporary)
        try:
            self.together(temporary, self._begin, writer, random_states, progress or {})
            with errors_of_all_ranks(f"{temporary}: cannot write the checkpoint", NotWritten):
                dcp.save(moment.tensors, storage_writer=writer, process_group=self.ranks.control)
            if rank_file is not None:
                self.together(temporary, writer.write, RANK_FILE.format(rank=self.ranks.rank), rank_file)
            # Each rank names its own: on a network's disk another may not see them for a minute.
            files = self.ranks.all_gather_objects(writer.files)
            self.together(temporary, self._publish, temporary, final, step, dict(ChainMap(*files)))
        except NotWritten:
            if self.ranks.is_main:  # the space is for the next try
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return final

    def _begin(self, writer: MeasuredWriter, random_states: list[dict], progress: dict) -> None:
        if not self.ranks.is_main:
            return
        for stale in self.folder.glob("step_*.tmp"):
            shutil.rmtree(stale)
        writer.path.mkdir(parents=True)
        states = io.BytesIO()  # torch.save to a full disk raises no OSError
        torch.save(random_states, states)
        writer.write(RANDOM_STATES, states.getbuffer())
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
            if old.name != linked:
                shutil.rmtree(old)

    def together(self, folder: Path, write: Callable[..., T], *args: Any) -> T:
        """Call `write` on each rank and return its value there. Raises NotWritten on all where one of them cannot."""

        def attempt() -> T:
            try:
                return write(*args)
            except OSError as error:
                reason = f"rank {self.ranks.rank}: {error.strerror or error}"
                raise NotWritten(f"{folder}: cannot write the checkpoint ({reason})") from error

        return self.ranks.together(attempt)

    def resume(self, policy: Policy, optimizer: torch.optim.Optimizer, critic: TrainedCritic | None = None) -> int:
        """Load the newest intact checkpoint and return its step, or 0 if there is none. The world size may change.

        The optimizer's settings (weight decay, betas) stay those of the config. Raises UserError when there are
        checkpoints, but none of them is intact, or the newest intact one is of another model.
        """
        folder = self._newest_intact()
        if folder is None:
            return 0
        with errors_of_all_ranks(f"{folder}: cannot be loaded; are model.path and model.lora_rank those of the run?"):
            dcp.load(live_tensors(policy, optimizer, critic), storage_reader=SafeReader(folder))  # in place
        try:
            random_states = torch.load(folder / RANDOM_STATES, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError):  # its checksum fits: it was not written by `write`
            raise UserError(f"{folder / RANDOM_STATES}: cannot be read; it holds more than random states") from None
        if self.ranks.rank < len(random_states):  # a rank that the saving run did not have keeps its seed
            RandomState(**random_states[self.ranks.rank]).restore()
        try:
            self.progress = read_json(folder / PROGRESS)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / PROGRESS}: cannot be read ({error}); take an older checkpoint") from None
        self.rank_files = sorted(folder.glob(RANK_FILE.replace("{rank:05d}", "*")))
        return manifest.step_of(folder)

    def _newest_intact(self) -> Path | None:
        """Rank 0 lists the folders, and each rank checks its share of the files. Newer, broken ones are set aside."""
        broken, mine = [], slice(self.ranks.rank, None, self.ranks.world_size)
        for name, files in self.ranks.from_rank_0([(folder.name, manifest.read(folder)) for folder in self.all()]):
            folder = self.folder / name
            problems = self.ranks.all_gather_objects(manifest.find_problem(folder, files, mine))
            if any(problems):
                broken.append((folder, next(filter(None, problems))))
                continue
            for newer, why in broken if self.ranks.is_main else ():
                logger.warning("%s is skipped: %s", newer, why)
                shutil.rmtree(newer.with_suffix(".broken"), ignore_errors=True)
                newer.rename(newer.with_suffix(".broken"))
            return folder
        if broken:  # not from step 0 again, in silence
            folder, problem = broken[0]
            raise UserError(f"{folder}: {problem}, and no other checkpoint is intact; move {self.folder} away")
        return None

    def folder_of(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    def all(self) -> list[Path]:
        """Return the folders of finished checkpoints, newest first."""
        return sorted((p for p in self.folder.glob("step_*") if not p.suffix), key=manifest.step_of, reverse=True)


def verify(folder: Path) -> str | None:
    """Check every file of the manifest by size and checksum, in this process alone. Return what is wrong, or None."""
    return manifest.find_problem(folder, manifest.read(folder))


@contextlib.contextmanager
def errors_of_all_ranks(what: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn DCP's error, which lists the failures of all ranks on all ranks, into one of `kind` with the first one."""
    try:
        yield
    except CheckpointException as error:
        if not all(isinstance(reason, Exception) for reason, _ in error.failures.values()):
            raise KeyboardInterrupt from error  # which torch takes for a failure like any other
        rank = min(error.failures)
        reason = error.failures[rank][0]
        raise kind(f"{what} (rank {rank}: {' '.join(str(reason).split())[:300]})") from error
