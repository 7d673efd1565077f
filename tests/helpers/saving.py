"""A run's saver with a small policy, on real ranks."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from helpers.records import logged

from arpo.checkpoint import Saver
from arpo.config.sections import ModelConfig, OptimConfig, RunConfig
from arpo.model import load_policy
from arpo.model.optim import build_optimizer


def begin(ranks, model: str, folder: str, **run) -> tuple[Saver, int]:
    """A saver with a policy, and the step at which it goes on. run: options of RunConfig."""
    policy = load_policy(ModelConfig(model, compute_dtype="float32"), ranks.mesh, device=torch.device("cpu"))
    saver = Saver(RunConfig(dir=folder, name="run", **run), ranks, source=model)
    return saver, saver.resume(policy, build_optimizer(policy, OptimConfig()))


def begin_again(ranks, model: str, folder: str) -> tuple[int, list[str]]:
    """The step at which a new start goes on, and what this rank says."""
    with logged() as lines:
        return begin(ranks, model, folder)[1], lines


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """The files of parameters and optimizer state. They are equal where these are, bit for bit."""
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")}


def change(saver: Saver) -> None:
    """As a step would."""
    with torch.no_grad():
        for p in saver.policy.parameters():
            p.add_(1.0)


def watch_files(fits: Callable[[str, tuple], bool], *, kill_at: int = 0) -> list[str]:
    """The names of this process's file operations that fit, from now on. It is killed just before the kill_at-th."""
    found: list[str] = []

    def watch(name: str, args: tuple) -> None:
        if fits(name, args):
            found.append(name)
            if len(found) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return found
