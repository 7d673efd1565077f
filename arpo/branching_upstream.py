"""Branching as the released code of ARPO and AEPO does it, where that differs from the papers (branching.py).

`branching.entropy_mode=topk | upstream` measures entropies from the likeliest tokens only, as somebody must who samples
through an API; `branching.compat=upstream` is AEPO's gate. (`branching.timing=upstream` is a line of the rollout.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

TOP_K = 10
MAX_TOKENS = 20


def topk_entropy(logprobs: Sequence[float]) -> float:
    """Entropy (nats) of one token's renormalised top-K logprobs; too small where the tail is heavy. [-1, -1] -> ln 2"""
    total = math.log(sum(math.exp(lp) for lp in logprobs))
    return -sum(math.exp(lp - total) * (lp - total) for lp in logprobs)


def upstream_turn_entropy(top_logprobs: Sequence[Sequence[float]], vocab_size: int) -> float:
    """The released code's measure: a SUM over at most 20 tokens of -p ln p over the top 10, / ln V. May exceed 1."""
    rows = top_logprobs[:MAX_TOKENS]
    return sum(-math.exp(lp) * lp for row in rows for lp in row[:TOP_K]) / math.log(vocab_size)


def upstream_branch_probability(delta_entropy: float, *, weight: float, consecutive: int, penalty: float) -> float:
    """AEPO as released: it branches iff clip((u + weight * dH) * f, 0, 1) >= 0.5, u uniform, f = 1 - penalty * l.

    Hence P = clip(1 - 0.5 / f + weight * dH, 0, 1): (dH 0, l 5, penalty 0.05) -> 0.333.
    """
    damping = max(0.0, 1.0 - penalty * consecutive)
    if damping == 0.0:
        return 0.0
    return min(max(1.0 - 0.5 / damping + weight * delta_entropy, 0.0), 1.0)
