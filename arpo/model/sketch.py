"""A small fixed sample of each trajectory's gradient, taken on the way through the head.

The parameter is a matrix M in front of the head, hidden -> (1 + M) hidden, at M = 0. The gradient of a token's log p
by M is the outer product of d log p / d hidden and the hidden state, (D, D). A fixed random projection of both sides
leaves SKETCH_RANK x SKETCH_RANK numbers; their products have the expectation of the whole gradient's. The sum over a
trajectory's tokens is exact for this parameter, whatever the layout, also where trajectories share tokens. No further
pass over the model is needed.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch
from torch import Tensor

from arpo.batch import MicroBatch
from arpo.model.head import matmul

SKETCH_RANK = 16  # 256 numbers: a square is off by a tenth, the same in signal and noise


class GradientSketch:
    """Collects the sketches of the rows of an update. A policy that has one (policy.sketch) fills it as it trains."""

    def __init__(self, hidden_size: int, device: torch.device | str):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (2, hidden_size, SKETCH_RANK), generator=generator) * 2.0 - 1.0
        self.directions, self.inputs = (signs / SKETCH_RANK**0.5).to(device)
        """(D, R) each: the projections of d log p / d hidden, and of the hidden state. +-1/4, which bfloat16 has."""
        self.tokens: tuple[Tensor, Tensor] | None = None
        """(B, T, R) each, of the micro-batch that was forwarded last: projected scores and hidden states."""
        self.rows: list[tuple[tuple[int, ...], Tensor]] = []
        """Of each micro-batch: its row ids, and (2, B, R * R) the sums over each row's loss tokens of the gradient of
        log p, once weighted with the token's advantage and once as it is."""

    def take_tokens(self, micro: MicroBatch, hidden: Tensor, scores: Tensor) -> None:
        """Remember what the head has computed: hidden states (L, D) and scores (L, R) at its inputs."""
        with torch.no_grad():
            self.tokens = micro.to_rows(scores), micro.to_rows(matmul(hidden, self.inputs.to(hidden.dtype)))

    def take_rows(self, micro: MicroBatch) -> None:
        """Add the rows of the micro-batch whose tokens were taken last; it has advantages."""
        scores, inputs = self.tokens
        self.tokens = None
        weighted = scores * micro.advantages[..., None]
        sums = [torch.einsum("bti,btj->bij", values, inputs).flatten(1) for values in (weighted, scores)]
        self.rows.append((micro.row_ids, torch.stack(sums)))

    def collected(self, num_micros: list[int]) -> list[dict[int, np.ndarray]]:
        """Return row id -> (2, R * R) of each mini-batch, which has so many micro-batches, and forget all.

        Empty ones where no update was made. What a second pass over the mini-batches has added is left out.
        """
        rows = iter(self.rows)
        self.rows = []
        return [
            {
                row_id: sums
                for row_ids, parts in islice(rows, number)
                for row_id, sums in zip(row_ids, parts.cpu().numpy().swapaxes(0, 1), strict=False)
            }
            for number in num_micros
        ]
