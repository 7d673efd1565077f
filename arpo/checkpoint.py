"""Checkpoints that survive a kill at any moment, and export to Hugging Face folders.

    checkpoints/step_000100/{manifest.json, dcp files, rank_0.json, hf/}   checkpoints/latest

Written to a temporary folder, listed with sizes and checksums in a manifest, renamed, and only then pointed to; the
distributed checkpoint format (DCP) itself notices neither a half-written folder nor flipped bytes (measured).
`python -m arpo.checkpoint export RUN/checkpoints/step_000100 MODEL OUT` makes a Hugging Face folder of one.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from arpo.config import UserError
from arpo.model import Policy

logger = logging.getLogger("arpo")
MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoint folder of one run. All methods are collective: every rank calls them."""

    def __init__(self, folder: Path, *, keep: int = 2):
        """keep: how many of the newest stay; below 2 there would be no fallback for a broken one."""
        if keep < 2:
            raise UserError(f"run.keep_checkpoints={keep} must be at least 2, so that a broken one has a fallback")
        self.folder, self.keep = folder, keep
        self.is_main = not dist.is_initialized() or dist.get_rank() == 0

    def save(self, step: int, policy: Policy, optimizer: torch.optim.Optimizer) -> Path:
        """Model, optimizer, step and every rank's random state; returns the final folder. Raises OSError when full."""
        final = self.folder / f"step_{step:06d}"
        temporary = self.folder / f"step_{step:06d}.tmp"
        if self.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        _barrier()
        policy.reshard_all()
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=temporary)
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.save(_random_state(), temporary / f"random_state_{rank}.pt")
        _barrier()
        if self.is_main:
            _write_manifest(temporary, {"step": step, "world_size": dist.get_world_size()})
            shutil.rmtree(final, ignore_errors=True)  # only a broken one can be in the way: resume would have used it
            temporary.rename(final)
            _fsync(self.folder)
            pointer = self.folder / "latest.tmp"
            pointer.write_text(final.name + "\n")
            pointer.rename(self.folder / "latest")
            for old in self._all()[self.keep :]:
                shutil.rmtree(old)
        _barrier()
        return final

    def resume(self, policy: Policy, optimizer: torch.optim.Optimizer, *, allow: bool = True) -> int:
        """Load the newest intact checkpoint; returns its step, 0 where there is none.

        Works across world sizes. Raises UserError when there is one and `allow` is False.
        """
        found: list[str | None] = [None]
        if self.is_main:
            newest = self.newest_intact()
            found = [newest.name if newest else None]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        if found[0] is None:
            return 0
        folder = self.folder / found[0]
        if not allow:
            raise UserError(f"{folder}: this run exists and run.resume is False; choose another run.name or delete it")
        policy.reshard_all()
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        rank_state = folder / f"random_state_{dist.get_rank() if dist.is_initialized() else 0}.pt"
        if rank_state.exists():  # absent for ranks that the saving run did not have
            _restore_random_state(torch.load(rank_state, weights_only=False))
        return json.loads((folder / MANIFEST).read_text())["step"]

    def newest_intact(self) -> Path | None:
        """The newest checkpoint whose sizes and checksums agree with its manifest; every skipped one is logged."""
        for folder in self._all():
            problem = verify(folder)
            if problem is None:
                return folder
            logger.warning("%s is skipped: %s", folder, problem)
        return None

    def _all(self) -> list[Path]:
        """Final folders, newest first."""
        return sorted((p for p in self.folder.glob("step_*") if p.suffix != ".tmp"), reverse=True)


def verify(folder: Path) -> str | None:
    """None if every file of the manifest is there, with its size and checksum; else what is wrong."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return "it has no readable manifest"
    for name, (size, checksum) in files.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _crc32(path) != checksum:
            return f"{name} is corrupt (checksum)"
    return None


def export_hf(policy: Policy, folder: Path, *, source: str, link: Path | None = None) -> None:
    """A folder that transformers and vLLM load: safetensors, config, generation config, tokenizer. Collective.

    Weights have the dtype of the source model. `source` is where the tokenizer comes from; `link` becomes a symbolic
    link to the folder, so that the newest export of a run has a stable name.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf_config = policy.hf.config
    dtype = getattr(torch, str(json.loads((Path(source) / "config.json").read_text()).get("dtype", "float32")))
    state = {}
    for name, parameter in policy.hf_parameters():
        whole = parameter.detach().to(dtype)
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if not dist.is_initialized() or dist.get_rank() == 0:
            state[name] = whole.cpu().clone()
    if state:
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        shell.generation_config = policy.hf.generation_config
        shell.save_pretrained(temporary, state_dict=state)
        AutoTokenizer.from_pretrained(source).save_pretrained(temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        if link:
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(folder, link.parent))
    _barrier()


def _random_state() -> dict:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def _restore_random_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def _write_manifest(folder: Path, head: dict) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        _fsync(path)
        files[str(path.relative_to(folder))] = [path.stat().st_size, _crc32(path)]
    (folder / MANIFEST).write_text(json.dumps(head | {"files": files}, indent=1))
    _fsync(folder / MANIFEST)
    _fsync(folder)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
