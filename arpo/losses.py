"""The policy loss: clipped policy gradient, with AEPO's entropy-balanced clipping and advantage. Pure functions.

Legend: B trajectories (rows), T response tokens. All tensors are (B, T); mask 1 = the policy sampled this token.
In training a mini-batch is cut into micro-batches over ranks. Each computes its share of one global loss, because sums
are divided by a *global* count (`denominators`); so shares add up, however the rows are cut:

    global_tokens = dist.all_reduce_sum(sum(loss_denominator(m.loss_mask, aggregation) for m in micro_batches))
    loss, metrics = policy_loss(..., denominators=global_tokens)
    (loss * world_size).backward()          # FSDP2 averages gradients over ranks
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from arpo.trajectory import Metrics

Aggregation = Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"]
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean")
MAX_LOG_RATIO = 20.0  # exp(20) is far outside every clip range, and still finite in float32


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    entropy: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    entropy_balanced_clipping: bool = False,
    entropy_balanced_advantage: bool = False,
    entropy_advantage_weight: float = 0.2,
    aggregation: Aggregation = "token_mean",
    rollout_weights: Tensor | None = None,
    denominators: float | None = None,
    entropy_statistics: tuple[float, float] | None = None,
) -> tuple[Tensor, Metrics]:
    """The clipped loss of PPO/GRPO with dual clip, or of AEPO (arXiv 2510.14545). Returns (scalar loss, metrics).

    With r = exp(logprobs - old_logprobs), per token and for advantage A:

        l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));   where A < 0: l = min(l, -A dual_clip)

    - `entropy_balanced_clipping`: above 1 + clip_high, clip(r) becomes (1 + clip_high) r / stop_gradient(r): the same
      value, but its gradient lives on, with the bounded size (1 + clip_high).
    - `entropy_balanced_advantage`: A becomes A * max(1 + weight * z, 0), z = (entropy - mean) / std, detached; needs
      `entropy` (nats) and takes (mean, std) over the whole mini-batch as `entropy_statistics` (None = these rows).
    - `rollout_weights`: detached importance weights of the rollout policy, multiplied to each token's loss.
    - `denominators`: one number, the global count of what is averaged: loss tokens for token_mean, sequences with loss
      tokens for the sequence means (`loss_denominator`, summed over micro-batches and ranks). None = these rows.

    Metrics are sums with counts, to be merged over micro-batches and ranks: means over loss tokens of `clip_fraction`
    (held at the upper bound, A > 0), `clip_fraction_low` (held at the lower, A < 0), `dual_clip_fraction`, `approx_kl`
    (k3 estimate of KL(old || new)), `entropy`; and the maximum `ratio_max`. Log them as `metrics.merge(m, "loss/")`.

    >>> one = torch.ones(1, 1)
    >>> policy_loss(1.5 * one, 0 * one, one, one)[0].item()          # r = 4.48 is clipped to 1.2
    -1.2000000476837158
    """
    assert logprobs.shape == old_logprobs.shape == mask.shape, (logprobs.shape, old_logprobs.shape, mask.shape)
    keep = mask.bool()
    log_ratio = torch.where(keep, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = advantages.expand_as(logprobs)
    if entropy_balanced_advantage:
        if entropy is None:
            raise ValueError("entropy_balanced_advantage needs the tokens' entropies; pass entropy=")
        advantages = balance_advantages(advantages, entropy, keep, entropy_advantage_weight, entropy_statistics)

    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    if entropy_balanced_clipping:
        clipped_ratio = torch.where(ratio > 1 + clip_high, (1 + clip_high) * ratio / ratio.detach(), clipped_ratio)
    token_loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    dual_clipped = torch.zeros_like(keep)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        dual_clipped = (advantages < 0) & (token_loss.detach() > bound)
        token_loss = torch.where(dual_clipped, bound, token_loss)
    if rollout_weights is not None:
        token_loss = token_loss * rollout_weights.detach()

    loss = aggregate(token_loss, keep, aggregation, denominators)
    with torch.no_grad():
        per_token = {
            "clip_fraction": (advantages > 0) & (ratio > 1 + clip_high),
            "clip_fraction_low": (advantages < 0) & (ratio < 1 - clip_low),
            "dual_clip_fraction": dual_clipped,
            "approx_kl": ratio - 1 - log_ratio,
        }
        if entropy is not None:
            per_token["entropy"] = entropy
        metrics = loss_metrics(per_token, ratio, keep)
    return loss, metrics


def aggregate(token_loss: Tensor, mask: Tensor, aggregation: Aggregation, denominators: float | None) -> Tensor:
    """Token losses (B, T) -> scalar, divided by `denominators` (None = the count of these rows, at least 1)."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"loss.aggregation={aggregation!r} is unknown; use one of {', '.join(AGGREGATIONS)}")
    # where, not a product: 0 * inf would poison the sum, and the gradient of a masked token must be exactly 0
    token_loss = torch.where(mask.bool(), token_loss, 0.0)
    sums = token_loss.sum(-1)  # (B,)
    if aggregation == "sequence_mean_token_mean":
        sums = sums / mask.sum(-1).clamp(min=1)
    if denominators is None:
        denominators = max(loss_denominator(mask, aggregation), 1.0)
    return sums.sum() / denominators


def loss_denominator(mask: Tensor, aggregation: Aggregation) -> float:
    """What these rows contribute to the global count: loss tokens, or sequences that have any.

    mask [[1, 1], [0, 0]] -> 2.0 for token_mean, 1.0 for the sequence means.
    """
    return float((mask.sum() if aggregation == "token_mean" else (mask.sum(-1) > 0).sum()).item())


def balance_advantages(
    advantages: Tensor, entropy: Tensor, mask: Tensor, weight: float, statistics: tuple[float, float] | None
) -> Tensor:
    """AEPO's entropy-aware advantage: A * max(1 + weight * (H - mean) / std, 0), everything about H detached.

    weight 0.2 and a token one standard deviation above the mean: A -> 1.2 A. The floor keeps A's sign.
    """
    mean, std = statistics if statistics is not None else entropy_statistics_of(entropy_moments(entropy, mask))
    z = (entropy.detach() - mean) / (std + 1e-8)
    return advantages * (1 + weight * z).clamp(min=0)


def entropy_moments(entropy: Tensor, mask: Tensor) -> Tensor:
    """(3,) float64 on the CPU: count, sum and sum of squares over loss tokens; add them up over rows and ranks."""
    values = entropy.detach()[mask.bool()].double()
    return torch.stack([torch.tensor(float(values.numel())), values.sum().cpu(), values.square().sum().cpu()])


def entropy_statistics_of(moments: Tensor) -> tuple[float, float]:
    """Moments -> (mean, unbiased standard deviation); a single token has deviation 1. Entropies 1, 3 -> (2, 1.414)."""
    count, total, squares = moments.tolist()
    if count < 2:
        return (total if count else 0.0), 1.0
    mean = total / count
    return mean, max((squares - count * mean * mean) / (count - 1), 0.0) ** 0.5


def loss_metrics(per_token: dict[str, Tensor], ratio: Tensor, mask: Tensor) -> Metrics:
    """One transfer from the device for all numbers."""
    sums = [torch.where(mask, values.float(), 0.0).sum() for values in per_token.values()]
    count, ratio_max, *sums = torch.stack([mask.sum().float(), ratio.amax(), *sums]).tolist()
    metrics = Metrics()
    if count:
        metrics.max("ratio_max", ratio_max)
    for name, total in zip(per_token, sums, strict=True):
        metrics.mean(name, total / max(count, 1.0), weight=count)
    return metrics
