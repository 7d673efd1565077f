"""The decision whether tools and rewards worked well enough for a step to be trained on."""

from __future__ import annotations

from collections.abc import Iterable

from arpo.trajectory import Group, StopReason

MAX_FAILED_SHARE, MAX_UNREWARDED_SHARE, MAX_MISSED_SHARE = 0.05, 0.5, 0.2
"""A batch is not trained on with a larger share of trajectories that failed, of trajectories to which a function of the
user's gave no reward, or of searches that found no recorded result."""
MAX_BAD_BATCHES = 3
"""Number of such batches in a row that ends the run."""
NOT_RECORDED = "not in the recorded results"


class ToolHealth:
    """Watch over the batches of a run. Every rank sees all groups, so all ranks decide alike.

    A trajectory that ended in a failure of one of our services is left out of the loss. Without many of them a batch
    would be left with the questions that need no tool, and the policy would learn to do without tools. It would learn
    the same from a search that answers from recorded results only and finds none: that is an error which the model
    reads, and its trajectory stays in the loss.
    A batch in which many trajectories have no reward would teach those answers only that are easy to assess.
    """

    def __init__(self) -> None:
        self.num_bad_batches = 0
        """Bad batches in a row."""
        self.failed_share = self.missed_share = 0.0
        """Of the last batch: trajectories that ended in a failure of ours, searches for which nothing is recorded."""
        self.warning = ""
        """What the console should say of the last batch; empty for nothing. Few misses are said once in a run."""
        self._reason = ""  # what makes the last batch a bad one
        self._told_of_misses = False
        self._first_bad = 0

    def may_train(self, groups: list[Group], first: int = 0) -> bool:
        """Return whether no share is too large. first: prompts that were drawn before these (see `go_on_from`)."""
        trajectories = [t for group in groups for t in group.trajectories]
        searches = [call for t in trajectories for call in t.own_tool_calls if call.tag == "search" and call.executed]
        self.failed_share = _share(t.stop_reason == StopReason.ERROR for t in trajectories)
        self.missed_share = _share(call.error_kind == "not_recorded" for call in searches)
        unrewarded_share = _share(t.is_left_out and t.stop_reason != StopReason.ERROR for t in trajectories)
        missed = f"{self.missed_share:.1%} of the searches are {NOT_RECORDED}"
        self._reason = ""
        if self.failed_share > MAX_FAILED_SHARE:
            self._reason = f"tools failed in {self.failed_share:.0%} of the trajectories"
        elif unrewarded_share > MAX_UNREWARDED_SHARE:
            self._reason = f"{unrewarded_share:.0%} of the trajectories have no reward"
        elif self.missed_share > MAX_MISSED_SHARE:
            self._reason = missed
        self.num_bad_batches = self.num_bad_batches + 1 if self._reason else 0
        if self.num_bad_batches <= 1:
            self._first_bad = first
        self.warning = f"warning: this batch is not trained on: {self._reason}" if self._reason else ""
        if self.missed_share and not self._told_of_misses and not self._reason:
            self.warning = f"warning: {missed}; the model reads an error in their place, and is trained on it"
        self._told_of_misses |= self.missed_share > 0
        return not self._reason

    @property
    def must_stop(self) -> bool:
        return self.num_bad_batches >= MAX_BAD_BATCHES

    def go_on_from(self, num_drawn: int) -> int:
        """Return where in the data the next step begins: after all that was drawn or, where the run must stop, at the
        prompts of the first of the bad batches. Nothing was learnt of those, and they come again once the tools do."""
        return self._first_bad if self.must_stop else num_drawn

    def __str__(self) -> str:
        """The one line that ends the run."""
        fix = "see the warnings above, then start the same command again"
        if self._reason.endswith(NOT_RECORDED):
            fix = (
                "start the command again with run.resume_changed True, tools.search.mode record and "
                "tools.search.backend brightdata or serper (each needs a key), http (a retriever) or local (a corpus)"
            )
        return f"{self._reason}, in {self.num_bad_batches} batches in a row; {fix}: it continues from the checkpoint"


def _share(events: Iterable[bool]) -> float:
    """Return the share of true ones; 0 of none."""
    flags = list(events)
    return sum(flags) / max(len(flags), 1)
