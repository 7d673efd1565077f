"""The critic (advantage.kind=gae): a model with a value head, under FSDP2, with a separate optimizer.

The value of response token t is the expected reward to go before this token. So the value is computed from the hidden
state that predicts the token (`predict_from` in batch.py), and `gae` may compare the value with all later rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from arpo.batch import MicroBatch
from arpo.config.sections import ModelConfig, OptimConfig
from arpo.losses import aggregate, token_means
from arpo.metrics import Metrics
from arpo.model.loading import build_on_meta, read_weights
from arpo.model.optim import build_optimizer, clip_grad_norm, set_learning_rate
from arpo.model.policy import accumulating, attention_implementation, hidden_states, shard
from arpo.ranks import Ranks


class Critic(nn.Module):
    """A model with a value head. The head starts at 0, so an untrained critic changes no advantage."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(backbone.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, micro: MicroBatch) -> Tensor:
        """Return the values of the loss tokens, (B, T) float32, 0 where the loss mask is 0."""
        positions, _ = micro.head_inputs()
        hidden = hidden_states(self.backbone, micro)[positions]  # (L, D)
        values = self.value_head(hidden)  # (L, 1)
        return micro.to_rows(values[:, 0])


def load_critic(cfg: ModelConfig, mesh: DeviceMesh, *, device: torch.device, max_model_len: int = 0) -> Critic:
    """Load the backbone of `cfg.path`, with an untrained head. Collective. Raises UserError like `load_policy`."""
    hf = build_on_meta(cfg.path, attention_implementation(cfg, device), max_model_len=max_model_len)
    critic = Critic(hf.base_model).train()
    # The head computes in float32, whatever the compute dtype: bfloat16 has no value between 1 and 1.0078.
    exact = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=True)
    fully_shard(critic.value_head.to(device), mesh=mesh, mp_policy=exact)
    shard(critic, critic.backbone, cfg, mesh, device)
    read_weights({f"{hf.base_model_prefix}.{name}": p for name, p in critic.backbone.named_parameters()}, cfg.path)
    return critic


def fill_values(critic: Critic, micros: list[MicroBatch]) -> None:
    """Fill `old_values` with the critic's values before the update."""
    for micro in micros:
        with torch.no_grad():
            micro.old_values = critic(micro)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_value: float = 0.5, denominator: float
) -> tuple[Tensor, Metrics]:
    """Return (loss, metrics): the mean over tokens of 0.5 * max((v - R)^2, (clip(v, old +- clip_value) - R)^2).

    The loss is these rows' share of the global mean; `denominator` is the global number of loss tokens.
    values 2, old_values 1, returns 0, clip_value 0.5 -> max(4, 2.25) / 2 = 2. Metrics: sum `loss`; means over loss
    tokens of `clip_fraction` (the clipped term is larger, so there is no gradient), `value` and `return`.
    """
    keep = mask.bool()
    values = torch.where(keep, values, 0.0)
    clipped = old_values + (values - old_values).clamp(-clip_value, clip_value)
    plain_error = (values - returns).square()
    clipped_error = (clipped - returns).square()
    loss = 0.5 * aggregate(torch.maximum(plain_error, clipped_error), keep, "token_mean", denominator)
    # The second condition is needed because within the range `clipped` may still differ from `values` by a rounding.
    is_clipped = ((clipped_error > plain_error) & ((values - old_values).abs() > clip_value)).detach()
    metrics = token_means({"clip_fraction": is_clipped, "value": values, "return": returns}, keep)
    metrics.sum("loss", loss, weight=keep.sum())
    return loss, metrics


@dataclass(frozen=True)
class TrainedCritic:
    """A critic with its optimizer."""

    model: Critic
    optimizer: torch.optim.Optimizer
    cfg: OptimConfig
    num_updates: int
    """Number of optimizer steps in the run, for the learning-rate schedule."""

    @classmethod
    def load(
        cls, model: ModelConfig, cfg: OptimConfig, num_updates: int, ranks: Ranks, *, max_model_len: int = 0
    ) -> TrainedCritic:
        """Load the critic with `load_critic`, and build its optimizer. Collective."""
        critic = load_critic(model, ranks.mesh, device=ranks.device, max_model_len=max_model_len)
        return cls(critic, build_optimizer(critic, cfg), cfg, num_updates)

    def update(self, micros: list[MicroBatch], update: int, ranks: Ranks) -> Metrics:
        """Take optimizer step `update` (from 0) of the run on a global mini-batch. `micros` are this rank's.

        Raises FloatingPointError, on all ranks alike, if the gradient is not finite.
        """
        set_learning_rate(self.optimizer, update, self.num_updates, self.cfg)
        metrics = Metrics()
        [num_tokens] = ranks.all_reduce_sum(sum(micro.num_loss_tokens for micro in micros))
        for micro in accumulating(self.model, micros):
            loss, loss_metrics = value_loss(
                self.model(micro), micro.old_values, micro.returns, micro.loss_mask, denominator=num_tokens
            )
            (loss * ranks.world_size).backward()  # FSDP2 averages gradients over ranks
            metrics.merge(loss_metrics, prefix="critic/")
        metrics.mean("critic/grad_norm", clip_grad_norm(self.model, self.cfg.max_grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics
