"""A rank's part of a checkpoint: shards of models and optimizer moments, and random states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from arpo.model import Policy
from arpo.model.critic import TrainedCritic
from arpo.model.optim import local
from arpo.model.pinned import pinned_like
from arpo.model.policy import reshard_all
from arpo.ranks import RandomState


class Snapshot(NamedTuple):
    """The state of a training at one moment."""

    tensors: dict[str, Any]
    """Nested: parameters by name (HF names for the policy), AdamW's moments and counts."""
    random_state: dict[str, Any]
    """The fields of a `RandomState`."""

    def copy_to_host(self, reuse: Snapshot | None) -> Snapshot:
        """Return a copy in host memory, for writing while training goes on. reuse: an old copy to overwrite."""
        copy = _copy_tree(self.tensors, reuse.tensors if reuse else None)
        _wait_for_gpu()
        return Snapshot(copy, self.random_state)


def snapshot(policy: Policy, optimizer: torch.optim.Optimizer, critic: TrainedCritic | None = None) -> Snapshot:
    """Return the live tensors (not copied) and the current random states."""
    return Snapshot(live_tensors(policy, optimizer, critic), vars(RandomState.current()))


def live_tensors(policy: Policy, optimizer: torch.optim.Optimizer, critic: TrainedCritic | None) -> dict[str, Any]:
    """Return the tensors to save, or to load in place. See `Snapshot.tensors`."""
    _wait_for_gpu()  # under optim.offload a copy of moments to the host may be in progress
    tensors = {
        "model": {name: p.detach() for name, p in policy.trained_parameters().items()},
        "optimizer": _moments(policy, optimizer),
    }
    if critic:
        reshard_all(critic.model)
        tensors["critic"] = {name: p.detach() for name, p in critic.model.named_parameters()}
        tensors["critic_optimizer"] = _moments(critic.model, critic.optimizer)
    return tensors


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer)["state"]


def _copy_tree(tree: Any, into: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copy_tree(value, into[key] if into else None) for key, value in tree.items()}
    if into is None:
        into = pinned_like(tree) if torch.cuda.is_available() else torch.empty_like(tree, device="cpu")
    local(into).copy_(local(tree), non_blocking=True)
    return into


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
