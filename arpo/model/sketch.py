"""A small fixed sketch of each trajectory's gradient, computed with the head.

The parameter is a matrix M in front of the head, hidden -> (1 + M) hidden, at M = 0. The gradient of a token's log p
with respect to M is the outer product of d log p / d hidden and the hidden state, (D, D). A fixed random projection of
both sides gives SKETCH_RANK x SKETCH_RANK numbers. Inner products of sketches have the expectation of the inner
products of the full gradients. The sum over a trajectory's tokens is exact for this parameter in any layout, also if
trajectories share tokens. No further pass over the model is needed.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from torch import Tensor

from arpo.batch import MicroBatch
from arpo.model.head import matmul

SKETCH_RANK = 16
"""With 16 x 16 numbers a squared norm is off by a tenth, by the same factor in signal and noise."""


class GradientSketch:
    """Collects the sketches of an update's rows. Set as policy.sketch, it is filled during training."""

    def __init__(self, hidden_size: int, device: torch.device | str):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (2, hidden_size, SKETCH_RANK), generator=generator) * 2.0 - 1.0
        self.directions, self.inputs = (signs / SKETCH_RANK**0.5).to(device)
        """Projections of d log p / d hidden and of the hidden state, (D, R) each. +-1/4, which is exact in bfloat16."""
        self.tokens: tuple[Tensor, Tensor] | None = None
        """Projected scores and hidden states of the last micro-batch, (B, T, R) each."""
        self.rows: list[tuple[tuple[int, ...], Tensor]] = []
        """(row ids, sketches) of each micro-batch. The sketches (2, B, R * R) are sums over a row's loss tokens of the
        gradient of log p: [0] weighted with the token's advantage, [1] unweighted."""

    def take_tokens(self, micro: MicroBatch, hidden: Tensor, scores: Tensor) -> None:
        """Store the head's inputs, hidden states (L, D), and scores (L, R) of the micro-batch for `take_rows`."""
        with torch.no_grad():
            inputs = matmul(hidden, self.inputs.to(hidden.dtype))  # (L, R)
            self.tokens = micro.to_rows(scores), micro.to_rows(inputs)

    def take_rows(self, micro: MicroBatch) -> None:
        """Add the sketches of the last micro-batch's rows, now that it has advantages."""
        scores, inputs = self.tokens
        self.tokens = None
        weighted = scores * micro.advantages[..., None]
        sums = [torch.einsum("bti,btj->bij", values, inputs).flatten(1) for values in (weighted, scores)]
        self.rows.append((micro.row_ids, torch.stack(sums)))

    def collected(self, num_micros: list[int]) -> list[dict[int, np.ndarray]]:
        """Return row id -> (2, R * R) for each mini-batch, and delete all sketches.

        `num_micros` = number of micro-batches of each mini-batch. Without an update the dicts are empty. Sketches of a
        second pass over the mini-batches (update.num_epochs) are left out.
        """
        micro_batches = iter(self.rows)
        self.rows = []
        minibatches = []
        for num in num_micros:
            by_row: dict[int, np.ndarray] = {}
            for row_ids, sums in islice(micro_batches, num):
                # strict=False: an empty micro-batch has one row, but no row id.
                by_row |= zip(row_ids, sums.cpu().numpy().swapaxes(0, 1), strict=False)
            minibatches.append(by_row)
        return minibatches
