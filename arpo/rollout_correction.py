"""Importance weights that correct for the difference between vLLM's probabilities and the trainer's.

A new correction is a pair of functions: the first combines the log weights of a row's tokens, the second bounds the
weights. Put the pair into your own file (loss.rollout_correction=FILE.py:NAME), or add a line to ROLLOUT_CORRECTIONS.
All functions are pure. Legend as in losses.py: B trajectories (rows), T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arpo.config.returned import call_named, checked_instance, checked_names, checked_tensor
from arpo.kl import MAX_LOG_RATIO
from arpo.losses import mean_over_sequence, token_means
from arpo.metrics import Metrics
from arpo.options import LossConfig

RESERVED_METRICS = ("abs", "kl")
"""Other numbers under mismatch/. No metric of a correction may have one of these names."""


def rollout_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cfg: LossConfig
) -> tuple[Tensor, Metrics]:
    """Return the importance weights of the tokens, (B, T) without gradient, 0 where the mask is 0; and metrics.

    w = exp(old_logprobs - rollout_logprobs) for each token, or one w for all tokens of a sequence. The functions of
    cfg.rollout_correction combine the log weights and bound w.

    Bounds [0.5, 2], a row of w = 0.4, 1, 3 -> tis 0.4, 1, 2; mis 0, 1, 0; sequence_tis and sequence_mis the product,
    1.2; geometric_tis and geometric_mis its third root, 1.06.
    """
    keep = mask.bool()
    with torch.no_grad():
        log_weights = torch.where(keep, old_logprobs - rollout_logprobs, 0.0)
        weights, changed = corrected(log_weights, keep, cfg)
        return weights * keep, token_means(changed, keep)


def corrected(log_weights: Tensor, keep: Tensor, cfg: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weights to use, and metric name -> bool or 0/1 mask of the changed tokens, (B, T) each.

    Raises UserError if a custom correction returns other types or shapes.
    """
    name = cfg.rollout_correction
    option = f"loss.rollout_correction={name}"
    shape = tuple(log_weights.shape)
    combined = call_named("loss.rollout_correction", name, ROLLOUT_CORRECTIONS, log_weights, keep, pair=0)
    checked_tensor(combined, f"{option}: the combined log weights", shape, (shape[0], 1))
    weights = combined.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(log_weights)

    bounded = call_named("loss.rollout_correction", name, ROLLOUT_CORRECTIONS, weights, cfg, pair=1)
    weights, changed = checked_instance(bounded, f"{option}: the bounded weights", tuple, length=2)
    checked_instance(changed, f"{option}: the changed tokens", dict)
    for key, tokens in changed.items():
        checked_tensor(tokens, f"{option}: the changed tokens {key!r}", shape)
    checked_names(changed, f"{option}: the changed tokens", RESERVED_METRICS)
    checked_tensor(weights, f"{option}: the weights", shape)
    return weights, changed


def each_token(log_weights: Tensor, mask: Tensor) -> Tensor:
    """Return the log weights unchanged: each token has its own weight."""
    return log_weights


def sum_over_sequence(log_weights: Tensor, mask: Tensor) -> Tensor:
    """Return the log of the product of each row's weights, (B, 1).

    Unlike the others it is unbiased before it is bounded, but its variance grows with the length of the row.
    """
    return log_weights.sum(-1, keepdim=True)


def truncated(weights: Tensor, cfg: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance sampling: min(w, correction_high)."""
    return weights.clamp(max=cfg.correction_high), {"truncated_share": weights > cfg.correction_high}


def masked(weights: Tensor, cfg: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Masked importance sampling: w within [correction_low, correction_high], 0 outside.

    A token with weight 0 still counts in the denominator of the loss's mean, so other tokens do not depend on it.
    """
    outside = (weights > cfg.correction_high) | (weights < cfg.correction_low)
    return torch.where(outside, 0.0, weights), {"masked_share": outside}


Combine = Callable[[Tensor, Tensor], Tensor]
"""(log w of the tokens (B, T), 0 off the mask; mask (B, T)) -> log w to use, (B, T) or (B, 1)."""
Bound = Callable[[Tensor, LossConfig], tuple[Tensor, dict[str, Tensor]]]
"""Weights (B, T) -> (weights to use (B, T), metric name -> (B, T) bool or 0/1, 1 at tokens with a changed weight)."""
ROLLOUT_CORRECTIONS: dict[str, tuple[Combine, Bound]] = {
    "tis": (each_token, truncated),
    "mis": (each_token, masked),
    "sequence_tis": (sum_over_sequence, truncated),
    "sequence_mis": (sum_over_sequence, masked),
    "geometric_tis": (mean_over_sequence, truncated),
    "geometric_mis": (mean_over_sequence, masked),
}
NEED_WHOLE_ROWS = {"sequence_tis", "sequence_mis", "geometric_tis", "geometric_mis"}
"""Corrections over all tokens of a row. All tokens of a row must be on the same rank, so model.context_parallel must be
1. Custom corrections count as members of this set."""
