"""A run's saver with a small policy, on real ranks."""

import torch

from arpo.checkpoint import Saver
from arpo.config.sections import ModelConfig, OptimConfig, RunConfig
from arpo.model import load_policy
from arpo.model.optim import build_optimizer


def begin(ranks, model: str, folder: str, **run) -> tuple[Saver, int]:
    """A saver with a policy, and the step at which it goes on. run: options of RunConfig."""
    policy = load_policy(ModelConfig(model, compute_dtype="float32"), ranks.mesh, device=torch.device("cpu"))
    saver = Saver(RunConfig(dir=folder, name="run", **run), ranks, source=model)
    return saver, saver.resume(policy, build_optimizer(policy, OptimConfig()))


def change(saver: Saver) -> None:
    """As a step would."""
    with torch.no_grad():
        for p in saver.policy.parameters():
            p.add_(1.0)
