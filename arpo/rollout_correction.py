"""Importance weights against the difference between the policy that sampled (vLLM's) and the trainer's own.

A new correction is a pair: a function that combines the weights of tokens, and one that bounds them; in a file of yours
(loss.rollout_correction=FILE.py:NAME) or as one line in ROLLOUT_CORRECTIONS. All functions are pure. Legend as in
losses.py: B trajectories (rows), T response tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arpo.config.returned import ask, instance, tensor
from arpo.losses import MAX_LOG_RATIO, mean_over_sequence
from arpo.metrics import Metrics
from arpo.options import LossConfig


def rollout_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cfg: LossConfig
) -> tuple[Tensor, Metrics]:
    """Return importance weights against the difference of vLLM's and the trainer's logprobs, and metrics.

    w = exp(old_logprobs - rollout_logprobs) of each token, or one for all tokens of a sequence, bounded as
    ROLLOUT_CORRECTIONS[cfg.rollout_correction] says; (B, T) without gradient, 0 where mask is 0.

    Within [0.5, 2], a row of w = 0.4, 1, 3 -> tis 0.4, 1, 2; mis 0, 1, 0; sequence_tis and _mis their product, 1.2;
    geometric_tis and _mis its third root, 1.06.
    """
    keep = mask.bool()
    with torch.no_grad():
        difference = torch.where(keep, old_logprobs - rollout_logprobs, 0.0)
        weights, changed = corrected(difference, keep, cfg)
        metrics, num_tokens = Metrics(), keep.sum().double()
        for name, tokens in changed.items():
            metrics.mean(name, (tokens & keep).sum() / num_tokens.clamp(min=1), num_tokens)
        return weights * keep, metrics


def corrected(difference: Tensor, keep: Tensor, cfg: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weights that the correction makes of log w, and which tokens it changed, (B, T) each. Raises UserError
    where one of the user's returns something else."""
    name, shape = cfg.rollout_correction, tuple(difference.shape)
    what = f"loss.rollout_correction={name}"

    def ask_for(part: int, *arguments: Any) -> Any:
        return ask("loss.rollout_correction", name, ROLLOUT_CORRECTIONS, *arguments, pair=part)

    combined = tensor(ask_for(0, difference, keep), f"{what}: the combined log weights", shape, (shape[0], 1))
    weights = combined.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().expand_as(difference)
    weights, changed = instance(ask_for(1, weights, cfg), f"{what}: the bounded weights", tuple, length=2)
    for key, tokens in instance(changed, f"{what}: the changed tokens", dict).items():
        tensor(tokens, f"{what}: the changed tokens {key!r}", shape)
    return tensor(weights, f"{what}: the weights", shape), changed


def truncated(weights: Tensor, cfg: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance sampling: min(w, correction_high)."""
    return weights.clamp(max=cfg.correction_high), {"truncated_share": weights > cfg.correction_high}


def masked(weights: Tensor, cfg: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Masked importance sampling: w within [correction_low, correction_high], 0 outside. Such a token still counts in
    the denominator of the mean, so that the other tokens' weights do not depend on it."""
    outside = (weights > cfg.correction_high) | (weights < cfg.correction_low)
    return torch.where(outside, 0.0, weights), {"masked_share": outside}


def each_token(log_weights: Tensor, mask: Tensor) -> Tensor:
    """Return the weights as they are: every token has its own."""
    return log_weights


def sum_over_sequence(log_weights: Tensor, mask: Tensor) -> Tensor:
    """Return the log of the product of each row's weights, (B, 1): unbiased until it is bounded, unlike the others, but
    of a variance that grows with the length."""
    return log_weights.sum(-1, keepdim=True)


Combined = Callable[[Tensor, Tensor], Tensor]
"""log w of the tokens (B, T), 0 off the mask, and the mask -> log w to use, (B, T) or (B, 1)."""
Bounded = Callable[[Tensor, LossConfig], tuple[Tensor, dict[str, Tensor]]]
"""Weights (B, T) -> the weights to use, and metric name -> (B, T) bool of the tokens that it changed."""
ROLLOUT_CORRECTIONS: dict[str, tuple[Combined, Bounded]] = {
    "tis": (each_token, truncated),
    "mis": (each_token, masked),
    "sequence_tis": (sum_over_sequence, truncated),
    "sequence_mis": (sum_over_sequence, masked),
    "geometric_tis": (mean_over_sequence, truncated),
    "geometric_mis": (mean_over_sequence, masked),
}
NEED_WHOLE_ROWS = {"sequence_tis", "sequence_mis", "geometric_tis", "geometric_mis"}
"""Those that combine the tokens of a row, and so cannot go with model.context_parallel > 1. (So are a user's.)"""
