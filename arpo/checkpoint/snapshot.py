"""What a checkpoint holds of a rank: its shards of models and moments, and its random states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from arpo.model import Policy
from arpo.model.critic import TrainedCritic
from arpo.model.optim import local
from arpo.model.policy import reshard_all
from arpo.ranks import RandomState


class Snapshot(NamedTuple):
    """The state of a training at one moment."""

    tensors: dict[str, Any]
    """Nested: parameters by name (the policy's: HF names), AdamW's moments and counts."""
    random_state: dict[str, Any]
    """The fields of a `RandomState`."""

    def staged(self, earlier: Snapshot | None) -> Snapshot:
        """Return a copy in host memory, to be written while training goes on; in that of an `earlier` one, if any."""
        copy = _copied(self.tensors, earlier.tensors if earlier else None)
        _wait_for_gpu()
        return Snapshot(copy, self.random_state)


def snapshot(policy: Policy, optimizer: torch.optim.Optimizer, critic: TrainedCritic | None = None) -> Snapshot:
    """Return the live tensors, and the random states as they are now."""
    return Snapshot(live_tensors(policy, optimizer, critic), vars(RandomState.current()))


def live_tensors(policy: Policy, optimizer: torch.optim.Optimizer, critic: TrainedCritic | None) -> dict[str, Any]:
    """Return what is saved and loaded in place, see `Snapshot.tensors`."""
    _wait_for_gpu()  # under optim.offload moments may be on their way to the host
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


def _copied(tree: Any, into: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value, into[key] if into else None) for key, value in tree.items()}
    copy = torch.empty_like(tree, device="cpu", pin_memory=torch.cuda.is_available()) if into is None else into
    local(copy).copy_(local(tree), non_blocking=True)
    return copy


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
