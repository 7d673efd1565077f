"""Checkpoints that survive a kill at any moment.

    checkpoints/step_000100/{manifest.json, .metadata, __0_0.distcp, ..., random_states.pt, hf/}   checkpoints/latest

Written to a temporary folder, listed with sizes and checksums in a manifest, renamed, and only then pointed to; the
distributed checkpoint format (DCP) itself notices neither a half-written folder nor flipped bytes (measured).
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from arpo.checkpoint.manifest import (
    files_of,
    find_problem,
    measure,
    read_manifest,
    step_of,
    sync,
    write_manifest,
    write_synced,
)
from arpo.errors import UserError
from arpo.model import Policy
from arpo.model.critic import Critic
from arpo.model.policy import reshard_all
from arpo.ranks.random_state import RandomState

logger = logging.getLogger(__name__)
RANDOM_STATES = "random_states.pt"
BYTES_PER_PARAMETER = 12  # float32 weight and AdamW's two moments


class Checkpoints:
    """The checkpoint folder of one run. All methods are collective: every rank calls them, and decides alike."""

    def __init__(self, folder: Path, *, keep: int = 2):
        """keep: how many of the newest stay; below 2 there would be no fallback for a broken one."""
        if keep < 2:
            raise UserError(f"run.keep_checkpoints={keep} must be at least 2, so that a broken one has a fallback")
        self.folder, self.keep = folder, keep

    def save(
        self,
        step: int,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        critic: Critic | None = None,
        critic_optimizer: torch.optim.Optimizer | None = None,
    ) -> Path:
        """Models, optimizers, step and every rank's random state; returns the final folder.

        Raises UserError where the disk is too full or cannot be written; the checkpoints before stay as they are.
        """
        final = self.folder / f"step_{step:06d}"
        temporary = final.with_suffix(".tmp")
        parameters = [
            p for model in (policy, critic) if model is not None for p in model.parameters() if p.requires_grad
        ]
        self._require_space(BYTES_PER_PARAMETER * sum(p.numel() for p in parameters))
        random_states = _gather(_random_state())
        if dist.get_rank() == 0:
            for stale in self.folder.glob("step_*.tmp"):
                shutil.rmtree(stale)
            temporary.mkdir(parents=True)
            torch.save(random_states, temporary / RANDOM_STATES)
        dist.barrier()
        with errors_of_all_ranks(f"{temporary}: cannot write the checkpoint"):
            dcp.save(_state(policy, optimizer, critic, critic_optimizer), checkpoint_id=temporary)
        names = _from_rank_0(files_of(temporary))
        measured = _gather(measure(temporary, names[_my_share()]))
        if dist.get_rank() == 0:
            write_manifest(temporary, step, {name: entry for part in measured for name, entry in part.items()})
            temporary.rename(final)
            sync(self.folder)
            write_synced(self.folder / "latest.tmp", final.name + "\n")
            (self.folder / "latest.tmp").rename(self.folder / "latest")
            for old in [*self._all()[self.keep :], *self.folder.glob("step_*.broken")]:
                shutil.rmtree(old)
        dist.barrier()
        return final

    def resume(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        critic: Critic | None = None,
        critic_optimizer: torch.optim.Optimizer | None = None,
        *,
        allow: bool = True,
    ) -> int:
        """Load the newest intact checkpoint; returns its step, 0 where there is none. Works across world sizes.

        The optimizer's settings (weight decay, betas) stay those of the config. Raises UserError when there are
        checkpoints but `allow` is False, none of them is intact, or it belongs to another model.
        """
        folder = self._newest_intact(allow)
        if folder is None:
            return 0
        with errors_of_all_ranks(f"{folder}: cannot be loaded; are model.path and model.lora_rank those of the run?"):
            dcp.load(_state(policy, optimizer, critic, critic_optimizer), checkpoint_id=folder)  # in place
        random_states = torch.load(folder / RANDOM_STATES, weights_only=True)
        if dist.get_rank() < len(random_states):  # a rank that the saving run did not have keeps its seed
            _restore_random_state(random_states[dist.get_rank()])
        return step_of(folder)

    def _newest_intact(self, allow: bool) -> Path | None:
        """Rank 0 looks, all ranks check their share of the files; newer ones that are broken are set aside."""
        broken = []
        for name, files in _from_rank_0([(folder.name, read_manifest(folder)) for folder in self._all()]):
            folder = self.folder / name
            if not allow:
                raise UserError(f"{folder}: run.resume is False but this run exists; choose another run.name")
            if problem := next(filter(None, _gather(find_problem(folder, files, _my_share()))), None):
                broken.append((folder, problem))
                continue
            if dist.get_rank() == 0:
                for newer, why in broken:
                    logger.warning("%s is skipped: %s", newer, why)
                    _replace_folder(newer, newer.with_suffix(".broken"))
            return folder
        if broken:  # not from step 0 again, in silence
            folder, problem = broken[0]
            raise UserError(f"{folder}: {problem}, and no other checkpoint is intact; move {self.folder} away")
        return None

    def _all(self) -> list[Path]:
        """Final folders, newest first."""
        return sorted((p for p in self.folder.glob("step_*") if not p.suffix), key=step_of, reverse=True)

    def _require_space(self, num_bytes: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        free = _from_rank_0(shutil.disk_usage(self.folder).free)
        if free < num_bytes:
            raise UserError(
                f"{self.folder}: a checkpoint needs {num_bytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; "
                "make space and start again, the run continues from its last checkpoint"
            )


def verify(folder: Path) -> str | None:
    """Check every file of the manifest by size and checksum. Return None if all is well, else what is wrong.

    Not collective: one process reads everything."""
    return find_problem(folder, read_manifest(folder))


def _replace_folder(new: Path, old: Path) -> None:
    if old.exists():
        shutil.rmtree(old)
    new.rename(old)


def _state(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    critic: Critic | None,
    critic_optimizer: torch.optim.Optimizer | None,
) -> dict:
    """The live tensors (shards): names -> parameters (of the policy: HF names), and -> AdamW's moments and counts."""
    state = {
        "model": {name: p.detach() for name, p in policy.trained_parameters().items()},
        "optimizer": _optimizer_state(policy, optimizer),
    }
    if critic is not None:
        reshard_all(critic)
        state["critic"] = {name: p.detach() for name, p in critic.named_parameters()}
        state["critic_optimizer"] = _optimizer_state(critic, critic_optimizer)
    return state


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    unused = not optimizer.state
    state = get_optimizer_state_dict(model, optimizer)["state"]
    if unused:  # what torch fills in to have something to save counts as a step; a policy may wait for its critic
        for entry in optimizer.state.values():
            entry["step"].zero_()
    return state


def _random_state() -> dict:
    """Return all random states in types that torch.load reads with weights_only."""
    state = RandomState.current()
    numpy = state.numpy | {
        "state": state.numpy["state"] | {"key": torch.from_numpy(state.numpy["state"]["key"].astype(np.int64))}
    }
    return {"python": state.python, "numpy": numpy, "cpu": state.cpu, "cuda": state.cuda}


def _restore_random_state(state: dict) -> None:
    key = state["numpy"]["state"]["key"].numpy().astype(np.uint32)
    numpy = state["numpy"] | {"state": state["numpy"]["state"] | {"key": key}}
    RandomState(state["python"], numpy, state["cpu"], state["cuda"] if torch.cuda.is_available() else None).restore()


@contextlib.contextmanager
def errors_of_all_ranks(what: str) -> Iterator[None]:
    """DCP raises the failures of all ranks on all ranks; the first one says enough."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise UserError(f"{what} (rank {rank}: {' '.join(str(reason).split())[:300]})") from error


def _my_share() -> slice:
    """Which files this rank reads."""
    return slice(dist.get_rank(), None, dist.get_world_size())


def _gather(value):
    """Every rank's value, by rank, on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _from_rank_0(value):
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]
