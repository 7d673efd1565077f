"""Statistics of evaluations: means with their intervals, and pass@k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Z95 = 1.959964
"""Standard errors to either side of a mean that hold 95 % of a normal distribution."""


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is correct): 1 - C(n - c, k) / C(n, k)  (arXiv 2107.03374).

    Raises ValueError unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples. (4, 1, 2) -> 0.5
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples is not defined")
    if num_samples - num_correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))


def bootstrap_means(values: Sequence[float], *, seed: int | Sequence[int] = 0) -> np.ndarray:
    """Return (2000,) means of samples drawn from the values with replacement."""
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    # 20 blocks of 100 samples: one block of 2,000 would take 20 times the memory.
    return np.concatenate([data[rng.integers(len(data), size=(100, len(data)))].mean(1) for _ in range(20)])


def interval_of(means: np.ndarray) -> tuple[float, float]:
    """Return the bounds of the middle 95 % of resampled means: a percentile bootstrap interval."""
    tail = (1.0 - 0.95) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1.0 - tail))


def wilson_interval(share: float, num_observations: float, quantile: float = Z95) -> tuple[float, float]:
    """Wilson's interval of a share of independent observations. It never leaves [0, 1], and has a width at 0 and 1 too.

    quantile: standard errors to either side; Student's t, if the spread is estimated from few values.
    10 of 10 are right -> (0.722, 1.0)
    """
    t2 = quantile**2
    centre = (share + t2 / (2 * num_observations)) / (1 + t2 / num_observations)
    variance = share * (1 - share) / num_observations + t2 / (4 * num_observations**2)
    half = quantile * variance**0.5 / (1 + t2 / num_observations)
    return max(centre - half, 0.0), min(centre + half, 1.0)  # rounding errors could leave it by 1e-16
