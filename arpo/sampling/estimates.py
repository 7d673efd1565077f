"""Estimates over a window of a run's steps, and their 95 % intervals. Pure."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

MIN_WINDOW_STEPS = 10
"""Least number of steps in a window."""
MIN_WINDOW_GROUPS = 80
"""Least number of groups in a window."""


class Interval(NamedTuple):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def metrics(self, name: str) -> dict[str, float]:
        """Return the metrics NAME, NAME_low and NAME_high."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def jackknife(
    samples: Sequence[float] | Sequence[tuple[float, ...]], function: Callable[[np.ndarray], float]
) -> Interval:
    """Return function(mean of the samples) with its 95 % interval.

    `function` must return a positive number: the interval is symmetric on a logarithmic scale. Its width comes from
    leaving out one sample at a time.
    """
    values = np.asarray(samples, dtype=float)
    count = len(values)
    centre = function(values.mean(0))
    without_one = np.log([function(np.delete(values, i, axis=0).mean(0)) for i in range(count)])
    degrees = count - 1
    # Student's quantile, right to 1 % from seven degrees of freedom on
    t = 1.96 + 2.372 / degrees + 2.822 / degrees**2
    half_width = t * math.sqrt(degrees * without_one.var())
    return Interval(centre, centre * math.exp(-half_width), centre * math.exp(half_width))


def array_to_text(array: np.ndarray) -> str:
    """Return the bytes of a float64 array as text for a JSON file. `text_to_array` is the way back."""
    return base64.b64encode(np.ascontiguousarray(array, dtype="<f8").tobytes()).decode()


def text_to_array(text: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array of a text. One dimension of the shape may be -1. Raises ValueError if the size does not fit."""
    return np.frombuffer(base64.b64decode(text), dtype="<f8").reshape(shape)
