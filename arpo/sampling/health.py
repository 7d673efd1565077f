"""The decision whether tools and rewards worked well enough for a step to be trained on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from arpo.errors import Outage, UserError
from arpo.trajectory import Group, StopReason

MAX_FAILED_SHARE = 0.05
"""Largest share of failed trajectories in a good batch."""
MAX_UNREWARDED_SHARE = 0.5
"""Largest share of trajectories without a reward from the user's function in a good batch."""
MAX_MISSED_SHARE = 0.2
"""Largest share of searches without a recorded result in a good batch."""
MAX_BAD_BATCHES = 3
"""This many bad batches in a row end the run."""
NOT_RECORDED = "not in the recorded results"


@dataclass(frozen=True)
class Verdict:
    """The judgement of a batch."""

    bad_because: str = ""
    """Reason not to train on the batch; "" for a good batch."""
    warning: str = ""
    """Line for the console; "" if there is nothing to say."""

    @property
    def may_train(self) -> bool:
        return not self.bad_because


class ToolHealth:
    """Watches the batches of a run. Every rank sees all groups, so all ranks decide alike.

    A trajectory with an infrastructure error is left out of the loss. With many such errors mostly questions without a
    tool would be left, and the policy would learn to do without tools. A search in recorded results that finds nothing
    has the same effect. The model reads an error, the trajectory stays in the loss, and the policy learns not to
    search. If many trajectories had no reward, the policy would be trained only on answers that are easy to assess.
    """

    def __init__(self) -> None:
        self.num_bad_batches = 0
        """Bad batches in a row."""
        self.verdict = Verdict()
        """Judgement of the newest batch."""
        self._told_of_misses = False  # few misses are said once in a run
        self._first_bad = 0  # prompts that were drawn before the first of the bad batches

    def judge(self, groups: list[Group], num_drawn_before: int = 0) -> Verdict:
        """Judge a batch. num_drawn_before: prompts that the run had drawn before it (see `num_drawn_on_resume`)."""
        trajectories = [t for group in groups for t in group.trajectories]
        searches = [call for t in trajectories for call in t.own_tool_calls if call.tag == "search" and call.executed]
        failed_share = _share(t.stop_reason == StopReason.ERROR for t in trajectories)
        missed_share = _share(call.error_kind == "not_recorded" for call in searches)
        unrewarded_share = _share(t.is_left_out and t.stop_reason != StopReason.ERROR for t in trajectories)
        missed = f"{missed_share:.1%} of the searches are {NOT_RECORDED}"

        bad_because = ""
        if failed_share > MAX_FAILED_SHARE:
            bad_because = f"tools failed in {failed_share:.0%} of the trajectories"
        elif unrewarded_share > MAX_UNREWARDED_SHARE:
            bad_because = f"{unrewarded_share:.0%} of the trajectories have no reward"
        elif missed_share > MAX_MISSED_SHARE:
            bad_because = missed
        self.num_bad_batches = self.num_bad_batches + 1 if bad_because else 0
        if self.num_bad_batches <= 1:
            self._first_bad = num_drawn_before

        warning = ""
        if bad_because:
            warning = f"warning: this batch is not trained on: {bad_because}"
        elif missed_share and not self._told_of_misses:
            warning = f"warning: {missed}; the model reads an error in their place, and is trained on it"
        self._told_of_misses |= missed_share > 0
        self.verdict = Verdict(bad_because, warning)
        return self.verdict

    @property
    def must_stop(self) -> bool:
        return self.num_bad_batches >= MAX_BAD_BATCHES

    def num_drawn_on_resume(self, num_drawn: int) -> int:
        """Return the place in the data where a resumed run continues: normally after all `num_drawn` prompts.

        A run that must stop goes back to the first of the bad batches: nothing was learnt from their prompts.
        """
        return self._first_bad if self.must_stop else num_drawn

    def stop_error(self) -> UserError:
        """Return the error that ends the run. An Outage, unless only other settings can help."""
        reason = self.verdict.bad_because
        kind = Outage
        fix = "see the warnings above, then start the same command again"
        if reason.endswith(NOT_RECORDED):
            kind = UserError
            fix = (
                "start the command again with run.resume_changed True, tools.search.mode record and "
                "tools.search.backend brightdata or serper (each needs a key), http (a retriever) or local (a corpus)"
            )
        return kind(f"{reason}, in {self.num_bad_batches} batches in a row; {fix}: it continues from the checkpoint")


def _share(events: Iterable[bool]) -> float:
    """Return the share of True; 0 if there are no events."""
    flags = list(events)
    return sum(flags) / max(len(flags), 1)
