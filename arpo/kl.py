"""Per-token estimates of KL(policy || reference) from the logprobs of sampled tokens. Pure functions.

With d = logprobs - ref_logprobs (http://joschu.net/blog/kl-approx.html). In the loss it is the *gradient* that counts,
in expectation over tokens that the policy samples:

    estimator  value             expected value  d value / d logprobs  expected gradient is that of
    k1         d                 KL              1                     nothing: it is 0, whatever the reference
    abs        |d|               above KL        sign(d)               the total variation distance (times 2)
    k2         d^2 / 2           biased          d                     KL(policy || reference)
    k3         exp(-d) + d - 1   KL              1 - exp(-d)           KL(reference || policy)

So k1 belongs into the reward. k3's log ratio is bounded by 20 and its value by 10, as in the released code; where a
bound holds, the gradient is 0.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KLEstimator = Literal["k1", "abs", "k2", "k3"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = ("k1", "abs", "k2", "k3")
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """(B, T), (B, T) -> (B, T) nats. Differentiable in `logprobs`.

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
