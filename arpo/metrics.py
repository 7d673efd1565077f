"""The numbers of a rollout, and the decision whether its tools worked well enough for it to be trained on.

Every rank counts its share of the groups; `Ranks.reduce_metrics` merges the shares. The docs define each name.
"""

from __future__ import annotations

from collections.abc import Iterable

from arpo.trajectory import Group, Metrics, StopReason, Trajectory

MAX_FAILED_SHARE = 0.05
"""A batch with a larger share of failed trajectories is not trained on."""
MAX_MISSED_SHARE = 0.2
"""A batch with a larger share of searches that found no recorded result is not trained on."""
MAX_BAD_BATCHES = 3
"""Number of such batches in a row that ends the run."""


def rollout_metrics(groups: list[Group]) -> Metrics:
    """Rewards, lengths, entropies, branching and tool calls of all trajectories."""
    m = Metrics()
    m.sum("tools/all/calls", 0)  # a number also in a step without calls
    for group in groups:
        rewards = [t.reward for t in group.trajectories if t.is_judged]
        m.mean("group/mixed_share", float(len(set(rewards)) > 1))
        m.mean("group/effective_size", sum(t.stop_reason != StopReason.ERROR for t in group.trajectories))
        m.mean("branching/branches_per_prompt", sum(t.parent_id is not None for t in group.trajectories))
        for trajectory in group.trajectories:
            _trajectory(m, trajectory)
            _tools(m, trajectory)
    return m


def _trajectory(m: Metrics, t: Trajectory) -> None:
    if t.is_judged:
        m.mean("reward/mean", t.reward)
        m.mean("reward/solved_share", float(t.reward > 0))
        m.sum("response/solved", t.reward > 0)
        for part, value in t.reward_parts.items():
            m.mean(f"reward/{part}", value)
        m.sum(f"reward_reason/{t.reward_reason or 'ok'}", 1)
    m.mean("response/tokens", len(t.token_ids))
    m.mean("response/sampled_tokens", t.num_sampled_tokens)
    for reason in StopReason:
        m.mean(f"response/stop_{reason}", float(t.stop_reason == reason))
    own_turns = [turn for turn in t.turns if not turn.inherited]
    for turn in own_turns:
        if turn.entropy is not None:
            m.mean("entropy/root" if turn is t.turns[0] else "entropy/after_tool", turn.entropy)
        if turn.decision:
            if turn.decision.probability is not None:  # a retrospective selector has none
                m.mean("branching/probability", turn.decision.probability)
            m.sum(f"branching/{turn.decision.outcome}", 1)
    m.sum("tokens/sampled", sum(turn.end - turn.start for turn in own_turns))


def _tools(m: Metrics, t: Trajectory) -> None:
    """Add the tool calls, each with the trajectory that made it, and not with its branches."""
    calls, own = t.tool_calls, t.own_tool_calls
    m.mean("tools/calls_per_trajectory", len(calls))
    m.sum("tools/inherited", len(calls) - len(own))
    for call in own:
        m.ratio("tools/all/calls_per_correct", "tools/all/calls", "response/solved")  # of right and wrong answers
        if call.cost:
            m.ratio("tools/all/cost_per_correct", "tools/all/cost", "response/solved")
        tool = f"tools/{call.tag}"
        for name in ("tools/all", tool):
            if not call.executed:
                m.sum(f"{name}/not_run", 1)
                continue
            m.sum(f"{name}/calls", 1)
            m.sum(f"{name}/cached", call.cached)
            m.sum(f"{name}/failed", not call.ok)
            if call.cost:
                m.sum(f"{name}/cost", call.cost)
        if call.executed:
            if not call.ok:
                m.sum(f"{tool}/failed_{call.error_kind or 'unnamed'}", 1)
            m.sum(f"{tool}/bytes_in", len(call.argument.encode("utf-8", "replace")))
            m.sum(f"{tool}/bytes_out", len(call.result.encode("utf-8", "replace")))
            m.percentiles(f"{tool}/seconds", call.seconds)


def console_text(values: dict[str, float]) -> str:
    """Return the text that the console shows for a training step, from the metrics of all ranks."""
    parts = [
        f"reward {values['reward/mean']:+.3f}" if "reward/mean" in values else "every trajectory failed through us",
        *([f"valid {values['valid/accuracy']:.3f}"] if "valid/accuracy" in values else []),
        *([f"solved {values['reward/solved_share']:.2f}"] if "reward/solved_share" in values else []),
        f"calls {values['tools/calls_per_trajectory']:.2f} (ran {values['tools/all/calls']:.0f})",
        f"branches {values['branching/branches_per_prompt']:.1f}",
        f"tokens {values['response/tokens']:.0f}",
        f"entropy {values['loss/entropy']:.2f}  kl {values['mismatch/kl']:.1e}"
        if "loss/entropy" in values
        else "no policy update",
        f"{values['time/step']:.1f} s (rollout {values['time/rollout']:.1f}, update {values['time/update']:.1f})",
    ]
    return "  ".join(parts)


class ToolHealth:
    """Watch over the batches of a run. Every rank sees all groups, so all ranks decide alike.

    A trajectory that ended in a failure of one of our services is left out of the loss. Without many of them a batch
    would be left with the questions that need no tool, and the policy would learn to do without tools. It would learn
    the same from a search that answers from recorded results only and finds none: that is an error which the model
    reads, and its trajectory stays in the loss.
    """

    def __init__(self) -> None:
        self.num_bad_batches = 0
        """Bad batches in a row."""
        self.failed_share = 0.0
        """Share of the last batch's trajectories that ended in a failure of ours."""
        self.missed_share = 0.0
        """Share of the last batch's searches for which nothing is recorded. Inherited ones do not count twice."""
        self.warning = ""
        """What the console should say of the last batch; empty for nothing. Few misses are said once in a run."""
        self._told_of_misses = False

    def may_train(self, groups: list[Group]) -> bool:
        """Return False where too many trajectories failed through us, or too many searches found nothing recorded."""
        trajectories = [t for group in groups for t in group.trajectories]
        searches = [call for t in trajectories for call in t.own_tool_calls if call.tag == "search" and call.executed]
        self.failed_share = _share(t.stop_reason == StopReason.ERROR for t in trajectories)
        self.missed_share = _share(call.error_kind == "not_recorded" for call in searches)
        is_bad = self.failed_share > MAX_FAILED_SHARE or self.missed_share > MAX_MISSED_SHARE
        self.num_bad_batches = self.num_bad_batches + 1 if is_bad else 0
        self.warning = f"warning: this batch is not trained on: {self._reason}" if is_bad else ""
        if self.missed_share and not is_bad and not self._told_of_misses:
            self.warning = f"warning: {self._misses}; the model reads an error in their place, and is trained on it"
        self._told_of_misses |= self.missed_share > 0
        return not is_bad

    @property
    def must_stop(self) -> bool:
        return self.num_bad_batches >= MAX_BAD_BATCHES

    @property
    def _misses(self) -> str:
        return f"{self.missed_share:.1%} of the searches are not in the recorded results"

    @property
    def _reason(self) -> str:
        """What makes the last batch a bad one."""
        failures = f"tools failed in {self.failed_share:.0%} of the trajectories"
        return failures if self.failed_share > MAX_FAILED_SHARE else self._misses

    def __str__(self) -> str:
        """The one line that ends the run."""
        fix = "see the warnings above, then start the same command again"
        if self.failed_share <= MAX_FAILED_SHARE:
            fix = (
                "start the command again with run.resume_changed True, tools.search.mode record and "
                "tools.search.backend brightdata or serper (each needs a key), http (a retriever) or local (a corpus)"
            )
        return f"{self._reason}, in {self.num_bad_batches} batches in a row; {fix}: it continues from the checkpoint"


def _share(events: Iterable[bool]) -> float:
    """Return the share of true ones; 0 of none."""
    flags = list(events)
    return sum(flags) / max(len(flags), 1)
