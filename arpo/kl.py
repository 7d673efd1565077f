"""Estimators of the KL between the policy and its reference, from the log-probabilities of sampled tokens. Pure.

A new estimator is one function, difference -> KL. Put the function into your own file
(loss.kl_estimator=FILE.py:NAME), or add one line to KL_ESTIMATORS.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arpo.config.returned import call_named, checked_tensor

MAX_LOG_RATIO = 20.0
"""Bound of a log ratio: exp(20) is far outside every clip range, and still finite in float32."""
MAX_K3 = 10.0
"""Upper bound of k3's value, as in the released code."""


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) for each token. (B, T), (B, T) -> (B, T) nats, differentiable in `logprobs`.

    With d = logprobs - ref_logprobs (http://joschu.net/blog/kl-approx.html). In the loss only the *gradient* counts, in
    expectation over the policy's samples:

        estimator  value             expected value  d value / d logprobs  expected gradient is that of
        k1         d                 KL              1                     nothing: 0, whatever the reference
        abs        |d|               above KL        sign(d)               the total variation distance (times 2)
        k2         d^2 / 2           biased          d                     KL(policy || reference)
        k3         exp(-d) + d - 1   KL              1 - exp(-d)           KL(reference || policy)

    So k1 belongs in the reward. k3 has two bounds, as in the released code: d lies between -20 and 20, and the value
    is at most 10 (reached at d = -2.61). Outside of the bounds the gradient is 0.

    logprobs -1, ref_logprobs -2: k1 and abs 1, k2 0.5, k3 0.368.
    """
    difference = logprobs - ref_logprobs
    kl = call_named("loss.kl_estimator", estimator, KL_ESTIMATORS, difference)
    return checked_tensor(kl, f"loss.kl_estimator={estimator}: the KL", tuple(difference.shape))


def k3(difference: Tensor) -> Tensor:
    """exp(-d) + d - 1, bounded as `token_kl` says."""
    log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1, because exp(x) - 1 - x loses all digits of a small x: its result may even be negative.
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=MAX_K3)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "abs": torch.abs,
    "k2": lambda difference: 0.5 * difference.square(),
    "k3": k3,
}
