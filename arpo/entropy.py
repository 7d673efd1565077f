"""The entropy of a turn in nats, and what of it a branching rule without a scale looks at. Pure.

The released code (arXiv 2507.19849, 2510.14545) measures a SUM over 20 tokens / ln V; ours is the mean per token in
nats. `PER_NAT` (options.py) is the factor between them, by which the released weights were converted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from arpo.options import PER_NAT, BranchingConfig

TOP_K, UPSTREAM_TOKENS = 10, 20
"""Likeliest tokens and first tokens of a turn, from which the released code measures a turn's entropy."""


def exact_turn_entropy(entropies: Sequence[float], num_tokens: int) -> float:
    """Return the mean over the first k tokens of the full next-token entropy, nats. [1.0, 0.0, 9.0], k 2 -> 0.5"""
    head = entropies[:num_tokens]
    return sum(head) / len(head) if head else 0.0


def upstream_turn_entropy(top_logprobs: Sequence[Sequence[float]], vocab_size: int) -> float:
    """Return the released measure, a SUM over at most 20 tokens of -p ln p over the top 10, / ln V; in our units.

    It is divided by PER_NAT: a turn of 20 tokens has its mean in nats (with the vocabulary of Qwen2.5), a shorter one
    less, and `branching.weight` acts on it as the released 0.2 acts on the released measure.
    """
    rows = top_logprobs[:UPSTREAM_TOKENS]
    return sum(-math.exp(lp) * lp for row in rows for lp in row[:TOP_K]) / math.log(vocab_size) / PER_NAT


def turn_entropy(
    entropies: Sequence[float], top_logprobs: Sequence[Sequence[float]], cfg: BranchingConfig, vocab_size: int
) -> float:
    """Return the entropy of a turn in nats as `cfg.compat` measures it, from its first tokens."""
    if cfg.compat == "upstream":
        return upstream_turn_entropy(top_logprobs, vocab_size)
    return exact_turn_entropy(entropies, cfg.entropy_tokens)


def tokens_to_measure(cfg: BranchingConfig) -> tuple[int, int]:
    """Return how many first tokens of a turn the engine reports entropies of, and how many top logprobs of each."""
    num_tokens = UPSTREAM_TOKENS if cfg.compat == "upstream" else cfg.entropy_tokens
    return num_tokens, 0 if cfg.compat == "paper" else TOP_K


def signal_of(entropy: float, root_entropy: float, cfg: BranchingConfig) -> float:
    """Return the signal that `cfg.signal` names: H or H - H_root (nats)."""
    return entropy if cfg.signal == "entropy" else entropy - root_entropy
