"""Pass@k, confidence intervals; `summary` makes a report's numbers of scored groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is correct): 1 - C(n - c, k) / C(n, k)  (arXiv 2107.03374).

    Raises ValueError unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples. (4, 1, 2) -> 0.5
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples is not defined")
    if num_samples - num_correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))


def bootstrap_interval(
    values: Sequence[float], *, level: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean. A single value gives (value, value)."""
    return interval_of(bootstrap_means(values, num_resamples=num_resamples, seed=seed), level=level)


def bootstrap_means(values: Sequence[float], *, num_resamples: int = 2000, seed: int | Sequence[int] = 0) -> np.ndarray:
    """(num_resamples,) means of samples drawn from the values with replacement; num_resamples in hundreds."""
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        raise ValueError("a bootstrap interval needs at least one value")
    rng = np.random.default_rng(seed)
    return np.concatenate(
        [data[rng.integers(len(data), size=(100, len(data)))].mean(1) for _ in range(num_resamples // 100)]
    )


def interval_of(means: np.ndarray, *, level: float = 0.95) -> tuple[float, float]:
    """The middle `level` of resampled means."""
    tail = (1.0 - level) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1.0 - tail))
