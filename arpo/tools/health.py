"""Whether a batch may teach, judged by its tools.

A trajectory that one of our services failed is left out of the loss. A few of them do no harm; many would leave a batch
of those questions that need no tool, and a policy that learns to do without.
"""

from __future__ import annotations

from arpo.trajectory import Group, StopReason

MAX_FAILED_SHARE = 0.05
"""A batch with a larger share of failed trajectories is not trained on."""
MAX_BAD_BATCHES = 3
"""As many in a row end the run."""


class ToolHealth:
    """Watches the batches of a run; every rank sees all groups, and so all ranks decide alike."""

    def __init__(self) -> None:
        self.num_bad_batches = 0
        """In a row, up to now."""
        self.failed_share = 0.0
        """Share of the last batch's trajectories that ended in a failure of ours."""

    def may_train(self, groups: list[Group]) -> bool:
        """False where too many trajectories of the batch ended in an infrastructure failure."""
        reasons = [t.stop_reason for group in groups for t in group.trajectories]
        self.failed_share = reasons.count(StopReason.ERROR) / max(len(reasons), 1)
        self.num_bad_batches = self.num_bad_batches + 1 if self.failed_share > MAX_FAILED_SHARE else 0
        return self.num_bad_batches == 0

    @property
    def must_stop(self) -> bool:
        return self.num_bad_batches >= MAX_BAD_BATCHES

    def __str__(self) -> str:
        """The one line that ends the run."""
        return (
            f"tools failed in {self.failed_share:.0%} of the trajectories, in {self.num_bad_batches} batches in a row; "
            "see the warnings above, then start the same command again: it continues from the checkpoint"
        )
