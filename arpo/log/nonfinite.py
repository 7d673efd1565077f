"""Error message and dump for a mini-batch with a non-finite loss or gradient."""

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
    """A non-finite gradient norm, with the losses of this rank's micro-batches if known."""

    def __init__(self, message: str, losses: Sequence[torch.Tensor]):
        super().__init__(message)
        self.losses = [float(loss) for loss in losses]


@contextlib.contextmanager
def reported_if_not_finite(
    name: str, micros: Sequence[MicroBatch], run_dir: Path, ranks: Ranks, also: Callable[[], None] | None = None
) -> Iterator[None]:
    """Turn a FloatingPointError in the block into a UserError that ends the run, and dump the micro-batches.

    The block is the update of these micro-batches. The dump goes to RUN/nonfinite, from the ranks with a non-finite
    loss, or from all ranks if all losses are finite. torch.load reads the dump: a dict of tensors per micro-batch.
    All ranks raise the same error. name: "step 3, mini-batch 2". also: called first, to dump more.
    """
    try:
        yield
        return
    except FloatingPointError as caught:
        error = caught
    if also:
        also()
    has_bad_loss = not all(map(math.isfinite, getattr(error, "losses", [])))
    bad_ranks = [rank for rank, is_bad in enumerate(ranks.all_gather_objects(has_bad_loss)) if is_bad]
    writers = bad_ranks or range(ranks.world_size)
    path = run_dir / "nonfinite" / f"{name.replace(', ', '_').replace(' ', '_')}_rank_{ranks.rank}.pt"
    problem = ""
    if ranks.rank in writers:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                torch.save([tensors_of(micro) for micro in micros], file)
        except (OSError, RuntimeError) as failure:  # a full disk must not hide the first error
            problem = f"could not be written: {' '.join(str(failure).split())[:200]}"
    dumps = [f"{path} {problem}".strip() for path, problem in ranks.all_gather_objects((str(path), problem))]
    if bad_ranks:
        cause = f"the loss of rank {', '.join(map(str, bad_ranks))} is not finite"
    elif isinstance(error, NonFinite):
        cause = "every loss is finite"
    else:
        cause = "in the update of the critic"
    raise UserError(
        f"{name}: {error}, {cause}; the mini-batch is in {', '.join(dumps[rank] for rank in writers)}. The newest "
        "checkpoint is from before it: continue there with a lower optim.lr (and run.resume_changed True)"
    ) from error


def tensors_of(micro: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the micro-batch's tensors by field name."""
    return {name: value.detach().cpu() for name, value in vars(micro).items() if isinstance(value, torch.Tensor)}
