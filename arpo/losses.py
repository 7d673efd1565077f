"""The policy loss (PPO/GRPO, AEPO, GSPO, CISPO, REINFORCE) with KL and entropy terms; the value loss. Pure functions.

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

Kind = Literal["ppo", "gspo", "cispo", "reinforce"]
KINDS: tuple[Kind, ...] = ("ppo", "gspo", "cispo", "reinforce")
Aggregation = Literal["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean"]
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean")
KLEstimator = Literal["k1", "abs", "k2", "k3"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "abs", "k2", "k3")
Correction = Literal["tis", "mis"]
MAX_K3 = 10.0
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
    kind: Kind = "ppo",
    balanced_clipping_tokens: Literal["all", "high_entropy"] = "all",
    ref_logprobs: Tensor | None = None,
    kl_coefficient: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    entropy_coefficient: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """Policy loss + kl_coefficient * KL - entropy_coefficient * entropy. Returns (scalar loss, metrics).

    With r = exp(logprobs - old_logprobs), per token and for advantage A:

        ppo        l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high));   where A < 0: l = min(l, -A dual_clip)
        gspo       the same without dual clip, with the sequence's ratio in place of r (`sequence_ratio`)
        cispo      l = -A clip(r, 1 - clip_low, 1 + clip_high) logprobs, the clipped ratio detached
        reinforce  l = -A logprobs

    - `entropy_balanced_clipping` (ppo, gspo; AEPO, arXiv 2510.14545): above 1 + clip_high, clip(r) becomes
      (1 + clip_high) r / stop_gradient(r): the same value, but its gradient lives on, with the bounded size
      (1 + clip_high). `balanced_clipping_tokens` "high_entropy": only where the entropy is above the mean.
    - `entropy_balanced_advantage`: A becomes A * max(1 + weight * z, 0), z = (entropy - mean) / std, detached.
    - Both need `entropy` (nats), and (mean, std) over the mini-batch as `entropy_statistics` (None = of these rows).
    - `rollout_weights`: detached importance weights of the rollout policy, multiplied to each token's policy loss.
    - `denominators`: one number, the global count of what is averaged: loss tokens for token_mean, sequences with loss
      tokens for the sequence means (`loss_denominator`, summed over micro-batches and ranks). None = these rows.

    Metrics are to be merged over micro-batches and ranks: the sum `policy` (this share of the policy loss, without KL
    and entropy terms); means over loss tokens of `clip_fraction` (held at the upper bound), `clip_fraction_low` (at the
    lower), `dual_clip_fraction`, `approx_kl` (k3 estimate of KL(old || new)), `entropy`, `kl` (to the reference); and
    the maximum `ratio_max`. Log them as `metrics.merge(m, "loss/")`.

    >>> one = torch.ones(1, 1)
    >>> policy_loss(1.5 * one, 0 * one, one, one)[0].item()          # r = 4.48 is clipped to 1.2
    -1.2000000476837158
    """
    assert logprobs.shape == old_logprobs.shape == mask.shape, (logprobs.shape, old_logprobs.shape, mask.shape)
    keep = mask.bool()
    high_entropy_only = entropy_balanced_clipping and balanced_clipping_tokens == "high_entropy"
    if entropy is None and (entropy_balanced_advantage or high_entropy_only or entropy_coefficient):
        raise ValueError("these options need the tokens' entropies; pass entropy=")
    if entropy is not None and entropy_statistics is None and (entropy_balanced_advantage or high_entropy_only):
        entropy_statistics = statistics_of(token_moments(entropy, keep))
    advantages = advantages.expand_as(logprobs)
    if entropy_balanced_advantage:
        advantages = balance_advantages(advantages, entropy, entropy_advantage_weight, entropy_statistics)
    balanced = keep if entropy_balanced_clipping else None
    if high_entropy_only:
        balanced = entropy.detach() > entropy_statistics[0]

    log_ratio = torch.where(keep, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = sequence_ratio(log_ratio, keep) if kind == "gspo" else log_ratio.exp()
    clip = (1 - clip_low, 1 + clip_high)
    token_loss, held = token_losses(kind, logprobs, ratio, advantages, clip, dual_clip, balanced)
    if rollout_weights is not None:
        token_loss = token_loss * rollout_weights.detach()
    loss = policy_part = aggregate(token_loss, keep, aggregation, denominators)

    per_token = held | {"approx_kl": log_ratio.detach().exp() - 1 - log_ratio.detach()}
    if entropy is not None:
        per_token["entropy"] = entropy.detach()
    if ref_logprobs is not None:
        kl = token_kl(torch.where(keep, logprobs, 0.0), torch.where(keep, ref_logprobs, 0.0), kl_estimator)
        loss = loss + kl_coefficient * aggregate(kl, keep, aggregation, denominators)
        per_token["kl"] = kl.detach()
    if entropy_coefficient:
        loss = loss - entropy_coefficient * aggregate(entropy, keep, aggregation, denominators)
    return loss, loss_metrics(policy_part.detach(), per_token, ratio.detach(), keep)


def token_losses(
    kind: Kind,
    logprobs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    clip: tuple[float, float],
    dual_clip: float | None,
    balanced: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The formulas of `policy_loss`, (B, T), and which tokens a bound holds; `balanced`: the upper one has gradient."""
    low, high = clip
    above, below, dual_clipped = ratio > high, ratio < low, torch.zeros_like(ratio, dtype=torch.bool)
    clipped_ratio = ratio.clamp(low, high)
    if kind in ("ppo", "gspo"):
        if balanced is not None:
            clipped_ratio = torch.where(above & balanced, high * ratio / ratio.detach(), clipped_ratio)
        token_loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
        above, below = above & (advantages > 0), below & (advantages < 0)
        if kind == "ppo" and dual_clip is not None:
            bound = -advantages * dual_clip
            dual_clipped = (advantages < 0) & (token_loss.detach() > bound)
            token_loss = torch.where(dual_clipped, bound, token_loss)
    elif kind == "cispo":
        token_loss = -advantages * clipped_ratio.detach() * logprobs
    elif kind == "reinforce":
        token_loss = -advantages * logprobs
        above = below = dual_clipped
    else:
        raise ValueError(f"loss.kind={kind!r} is unknown; use one of {', '.join(KINDS)}")
    return token_loss, {"clip_fraction": above, "clip_fraction_low": below, "dual_clip_fraction": dual_clipped}


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """GSPO (arXiv 2507.18071): exp(mean log ratio over the sequence's loss tokens), the same value at every token, but
    with the gradient of that token's own logprob, so that tokens of one sequence may have different advantages.

    Ratios 2 and 0.5 -> 1 at both tokens; d value / d logp is 1 at its own token and 0 at the other.
    """
    detached = torch.where(mask, log_ratio, 0.0).detach()
    mean = detached.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)  # (B, 1)
    return (mean + (log_ratio - log_ratio.detach())).exp()


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) for each token. (B, T), (B, T) -> (B, T) nats, differentiable in `logprobs`.

    With d = logprobs - ref_logprobs (http://joschu.net/blog/kl-approx.html). In the loss it is the *gradient* that
    counts, in expectation over tokens that the policy samples:

        estimator  value             expected value  d value / d logprobs  expected gradient is that of
        k1         d                 KL              1                     nothing: it is 0, whatever the reference
        abs        |d|               above KL        sign(d)               the total variation distance (times 2)
        k2         d^2 / 2           biased          d                     KL(policy || reference)
        k3         exp(-d) + d - 1   KL              1 - exp(-d)           KL(reference || policy)

    So k1 belongs into the reward. k3's log ratio is bounded by 20 and its value by 10, as in the released code; where a
    bound holds, the gradient is 0.

    logprobs -1, ref_logprobs -2: k1 and abs 1, k2 0.5, k3 0.368.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    if estimator == "k3":
        log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (log_ratio.exp() - 1 - log_ratio).clamp(-MAX_K3, MAX_K3)
    raise ValueError(f"loss.kl_estimator={estimator!r} is unknown; use one of {', '.join(KL_ESTIMATORS)}")


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    kind: Correction,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """Importance weights for what vLLM and the trainer compute differently from the same weights, and metrics.

    w = exp(old_logprobs - rollout_logprobs), (B, T) without gradient, 0 where mask is 0.

    - tis, truncated importance sampling: min(w, high).
    - mis, masked importance sampling: w within [low, high], 0 outside. Such a token still counts in the denominator
      of the mean, so that the other tokens' weights do not depend on it.

    w = 0.4, 1, 3 -> tis 0.4, 1, 2; mis 0, 1, 0.
    """
    keep = mask.bool()
    with torch.no_grad():
        difference = torch.where(keep, old_logprobs - rollout_logprobs, 0.0)
        weights = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside = (weights > high) if kind == "tis" else (weights > high) | (weights < low)
        weights = weights.clamp(max=high) if kind == "tis" else torch.where(outside, 0.0, weights)
        metrics = Metrics()
        if num_tokens := int(keep.sum()):
            name = "truncated_share" if kind == "tis" else "masked_share"
            metrics.mean(name, int((outside & keep).sum()) / num_tokens, num_tokens)
        return weights * keep, metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_value: float, denominators: float
) -> tuple[Tensor, Metrics]:
    """The critic's share of the global token mean of 0.5 * max((v - R)^2, (clip(v, old +- clip_value) - R)^2).

    values 2, old_values 1, returns 0, clip_value 0.5 -> max(4, 2.25) / 2 = 2. Metrics: sum `loss`; means over loss
    tokens of `clip_fraction` (the clipped term is the larger one: no gradient), `value`, `return`.
    """
    keep = mask.bool()
    values = torch.where(keep, values, 0.0)
    clipped = old_values + (values - old_values).clamp(-clip_value, clip_value)
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = 0.5 * aggregate(torch.maximum(plain_error, clipped_error), keep, "token_mean", denominators)
    held = (clipped_error > plain_error).detach()
    metrics = Metrics()
    if num_tokens := int(keep.sum()):
        metrics.sum("loss", loss.item())
        for name, per_token in {"clip_fraction": held, "value": values.detach(), "return": returns}.items():
            metrics.mean(name, float(per_token[keep].float().mean()), num_tokens)
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


def balance_advantages(advantages: Tensor, entropy: Tensor, weight: float, statistics: tuple[float, float]) -> Tensor:
    """AEPO's entropy-aware advantage: A * max(1 + weight * (H - mean) / std, 0), everything about H detached.

    weight 0.2 and a token one standard deviation above the mean: A -> 1.2 A. The floor keeps A's sign.
    """
    mean, std = statistics
    z = (entropy.detach() - mean) / (std + 1e-8)
    return advantages * (1 + weight * z).clamp(min=0)


def token_moments(entropy: Tensor, mask: Tensor) -> Tensor:
    """(3,) float64 on the CPU: count, sum and sum of squares over loss tokens; add them up over rows and ranks."""
    values = entropy.detach()[mask.bool()].double()
    return torch.stack([torch.tensor(float(values.numel())), values.sum().cpu(), values.square().sum().cpu()])


def statistics_of(moments: Tensor) -> tuple[float, float]:
    """Moments -> (mean, unbiased standard deviation); a single token has deviation 1. Entropies 1, 3 -> (2, 1.414)."""
    count, total, squares = moments.tolist()
    if count < 2:
        return (total if count else 0.0), 1.0
    mean = total / count
    return mean, max((squares - count * mean * mean) / (count - 1), 0.0) ** 0.5


def loss_metrics(policy: Tensor, per_token: dict[str, Tensor], ratio: Tensor, mask: Tensor) -> Metrics:
    """One transfer from the device for all numbers."""
    sums = [torch.where(mask, values.float(), 0.0).sum() for values in per_token.values()]
    count, policy_share, ratio_max, *sums = torch.stack([mask.sum().float(), policy, ratio.amax(), *sums]).tolist()
    metrics = Metrics()
    if count:
        metrics.sum("policy", policy_share)
        metrics.max("ratio_max", ratio_max)
    for name, total in zip(per_token, sums, strict=True):
        metrics.mean(name, total / max(count, 1.0), weight=count)
    return metrics
