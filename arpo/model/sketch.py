"""A small fixed sample of each trajectory's gradient, taken on the way through the head.

The parameter is a matrix M in front of the head, hidden -> (1 + M) hidden, at M = 0. The gradient of a token's log p by
M is the outer product of d log p / d hidden and the hidden state, (D, D). A fixed random projection of both sides leaves
SKETCH_RANK x SKETCH_RANK numbers, whose squares and products have the expectation of the whole gradient's. The sum over a
trajectory's tokens is exact for this parameter, whatever the layout, also where trajectories share tokens. No further
pass over the model is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arpo.batch import MicroBatch

SKETCH_RANK = 16


class GradientSketch:
    """Collects the sketches of the rows of an update. A policy that has one (policy.sketch) fills it as it trains."""

    def __init__(self, hidden_size: int, device: torch.device | str):
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (2, hidden_size, SKETCH_RANK), generator=generator) * 2.0 - 1.0
        self.directions, self.inputs = (signs / SKETCH_RANK**0.5).to(device)
        """(D, R) each: the projections of d log p / d hidden, and of the hidden state."""
        self.tokens: tuple[Tensor, Tensor] | None = None
        """(B, T, R) each, of the micro-batch that was forwarded last: projected scores and hidden states."""
        self.rows: list[tuple[tuple[int, ...], Tensor]] = []
        """Of each micro-batch: its row ids, and (2, B, R * R) the sums over each row's loss tokens of the gradient of
        log p, once weighted with the token's advantage and once as it is."""

    def take_tokens(self, micro: MicroBatch, hidden: Tensor, scores: Tensor) -> None:
        """Remember what the head has computed: hidden states (L, D) and scores (L, R) at its inputs."""
        with torch.no_grad():
            self.tokens = micro.to_rows(scores), micro.to_rows(hidden.float() @ self.inputs)

    def take_rows(self, micro: MicroBatch) -> None:
        """Add the rows of the micro-batch whose tokens were taken last; it has advantages."""
        scores, inputs = self.tokens
        self.tokens = None
        if micro.row_ids:
            weighted = scores * micro.advantages[..., None]
            sums = [torch.einsum("bti,btj->bij", values, inputs).flatten(1) for values in (weighted, scores)]
            self.rows.append((micro.row_ids, torch.stack(sums)))

    def collected(self) -> dict[int, Tensor]:
        """Return (2, R * R) of each row id, on the CPU, and forget them."""
        rows, self.rows = self.rows, []
        return {
            row_id: sums for row_ids, parts in rows for row_id, sums in zip(row_ids, parts.cpu().unbind(1), strict=True)
        }
