"""The message and the dump about a mini-batch whose loss or gradient is not a finite number."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from arpo.batch import MicroBatch
from arpo.errors import UserError
from arpo.ranks import Ranks


class NonFinite(FloatingPointError):
    """A gradient norm that is not finite, with the losses of this rank's micro-batches, where they are known."""

    def __init__(self, message: str, losses: Sequence[torch.Tensor]):
        super().__init__(message)
        self.losses = [float(loss) for loss in losses]


@contextlib.contextmanager
def reported_if_not_finite(
    name: str, micros: Sequence[MicroBatch], run_dir: Path, ranks: Ranks, also: Callable[[], None] | None = None
) -> Iterator[None]:
    """Turn a FloatingPointError of the update of these micro-batches into the UserError that ends the run, the same on
    all ranks, after writing the micro-batches to RUN/nonfinite; `also` is called before, to dump more.

    `name` is "step 3, mini-batch 2". Ranks whose loss is not finite write theirs; where all losses are finite, or not
    known, all ranks do. torch.load reads a file: for each micro-batch a dict of tensors.
    """
    try:
        yield
        return
    except FloatingPointError as caught:
        error = caught
    if also:
        also()
    is_bad = not all(map(math.isfinite, getattr(error, "losses", [])))
    guilty = [rank for rank, bad in enumerate(ranks.all_gather_objects(is_bad)) if bad]
    writers = guilty or range(ranks.world_size)
    file = run_dir / "nonfinite" / f"{name.replace(', ', '_').replace(' ', '_')}_rank_{ranks.rank}.pt"
    problem = ""
    if ranks.rank in writers:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as opened:
                torch.save([tensors_of(micro) for micro in micros], opened)
        except (OSError, RuntimeError) as failure:  # a full disk must not hide what happened
            problem = f"could not be written: {' '.join(str(failure).split())[:200]}"
    kept = [f"{path} {why}".strip() for path, why in ranks.all_gather_objects((str(file), problem))]
    whose = "every loss is finite" if isinstance(error, NonFinite) else "in the update of the critic"
    if guilty:
        whose = f"the loss of rank {', '.join(map(str, guilty))} is not finite"
    raise UserError(
        f"{name}: {error}, {whose}; the mini-batch is in {', '.join(kept[rank] for rank in writers)}. The newest "
        "checkpoint is from before it: continue there with a lower optim.lr (and run.resume_changed True)"
    ) from error


def tensors_of(micro: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the micro-batch's tensors by field name."""
    return {name: value.detach().cpu() for name, value in vars(micro).items() if isinstance(value, torch.Tensor)}
