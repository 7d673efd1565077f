"""Importance weights for what the rollout policy (vLLM) and the trainer compute differently from the same weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from arpo.trajectory import Metrics

Correction = Literal["tis", "mis"]
MAX_LOG_WEIGHT = 20.0


def rollout_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    kind: Correction,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """w = exp(old_logprobs - rollout_logprobs) -> weights (B, T) without gradient, 0 where mask is 0; and metrics.

    - tis, truncated importance sampling: min(w, high).
    - mis, masked importance sampling: w within [low, high], 0 outside. Such a token still counts in the denominator
      of the mean, so that the other tokens' weights do not depend on it.

    w = 0.4, 1, 3 -> tis 0.4, 1, 2; mis 0, 1, 0.
    """
    keep = mask.bool()
    with torch.no_grad():
        difference = torch.where(keep, old_logprobs - rollout_logprobs, 0.0)
        weights = difference.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
        outside = (weights > high) if kind == "tis" else (weights > high) | (weights < low)
        weights = weights.clamp(max=high) if kind == "tis" else torch.where(outside, 0.0, weights)
        metrics = Metrics()
        if num_tokens := int(keep.sum()):
            name = "truncated_share" if kind == "tis" else "masked_share"
            metrics.mean(name, int((outside & keep).sum()) / num_tokens, num_tokens)
        return weights * keep, metrics
