"""What a rollout came to, in numbers. Each name is defined in the README's metric table.

Every rank counts its share of the groups; merged over ranks (`Ranks.reduce_metrics`) they are numbers of all of them.
"""

from __future__ import annotations

from arpo.tools.ledger import ledger
from arpo.trajectory import Group, Metrics, StopReason, Trajectory


def rollout_metrics(groups: list[Group]) -> Metrics:
    """Rewards, lengths, tool calls and their ledger, entropies and branching of all trajectories."""
    m = Metrics()
    for group in groups:
        rewards = [t.reward for t in group.trajectories if t.reward is not None]
        m.mean("group/mixed_share", float(len(set(rewards)) > 1))
        m.mean("group/effective_size", sum(t.stop_reason != StopReason.ERROR for t in group.trajectories))
        m.mean("branching/branches_per_prompt", sum(t.parent_id is not None for t in group.trajectories))
        for trajectory in group.trajectories:
            _trajectory(m, trajectory)
    m.merge(ledger(groups))
    return m


def _trajectory(m: Metrics, t: Trajectory) -> None:
    if t.reward is not None:
        m.mean("reward/mean", t.reward)
        m.mean("reward/solved_share", float(t.reward > 0))
        for part, value in t.reward_parts.items():
            m.mean(f"reward/{part}", value)
        m.sum(f"reward_reason/{t.reward_reason or 'ok'}", 1)
    m.mean("response/tokens", len(t.token_ids))
    m.mean("response/sampled_tokens", t.num_sampled_tokens)
    for reason in StopReason:
        m.mean(f"response/stop_{reason}", float(t.stop_reason == reason))
    calls, own = t.tool_calls, t.own_tool_calls
    m.mean("tools/calls_per_trajectory", len(calls))
    m.sum("tools/executed", sum(c.executed for c in own))
    m.sum("tools/inherited", len(calls) - len(own))
    for call in own:
        if call.executed:
            m.mean("tools/failed_share", float(not call.ok))
            m.mean("tools/cached_share", float(call.cached))
            m.mean("tools/seconds", call.seconds)
            m.max("tools/seconds_max", call.seconds)
        else:
            m.sum("tools/malformed_or_over_limit", 1)
    own_turns = [turn for turn in t.turns if not turn.inherited]
    for turn in own_turns:
        if turn.entropy is not None:
            m.mean("entropy/root" if turn is t.turns[0] else "entropy/after_tool", turn.entropy)
        if turn.decision:
            m.mean("branching/probability", turn.decision.probability)
            m.sum(f"branching/{turn.decision.outcome}", 1)
    m.sum("tokens/sampled", sum(turn.end - turn.start for turn in own_turns))
