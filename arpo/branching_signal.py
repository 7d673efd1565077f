"""The branching signal: do the entropies change the branch decisions, and do they predict anything? Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from arpo.branching import neutral_probability
from arpo.config.named import is_own
from arpo.options import BranchingConfig
from arpo.trajectory import BranchDecision, Group, Trajectory

NUM_FIRST_STEPS = 3
MIN_MOVED = 0.02
"""A warning follows if the entropies move P by less than MIN_MOVED in each of a run's NUM_FIRST_STEPS first steps."""


class BranchingSignal:
    """Computes the signal metrics of each step, and warns if entropy branching turns out to be random."""

    def __init__(self, cfg: BranchingConfig):
        self.cfg = cfg
        self.warning = ""
        """Warning about the newest step, or ""."""
        self._moved: list[float] = []  # `branching/signal` of the steps that had decisions

    def add(self, groups: Sequence[Group]) -> dict[str, float]:
        """Add a step's scored groups of all ranks. Return `signal_metrics`."""
        metrics = signal_metrics(groups, self.cfg)
        self.warning = ""
        if "branching/signal" not in metrics:
            return metrics
        self._moved.append(metrics["branching/signal"])
        most_moved = max(self._moved)
        # a threshold acts on the order of the entropies, and selector=random ignores them on purpose
        is_fine = most_moved >= MIN_MOVED or self.cfg.threshold is not None or self.cfg.selector == "random"
        if len(self._moved) == NUM_FIRST_STEPS and not is_fine:
            self.warning = (
                f"warning: the entropies of {NUM_FIRST_STEPS} steps moved P(branch) by {most_moved:.3f} at "
                "most: this is random branching under another name; raise branching.weight, set "
                "branching.threshold, or take configs/forks.yaml"
            )
        return metrics


def signal_metrics(groups: Sequence[Group], cfg: BranchingConfig) -> dict[str, float]:
    """Return how far the entropies moved P, and how well they predicted failed trajectories (docs/metrics.md).

    A value that cannot be computed, like a correlation without variance, is left out.
    """
    return _decision_metrics(groups, cfg) | _failure_metrics(groups) | _difference_metrics(groups)


def _decision_metrics(groups: Sequence[Group], cfg: BranchingConfig) -> dict[str, float]:
    """Return how far the entropies moved P, and how often the trajectories succeed after each outcome."""
    values: dict[str, float] = {}
    taken = [decision for _, decision in decisions(groups)]
    if taken and not is_own(cfg.selector):  # P of a user's rule without a change of entropy is unknown
        values["branching/signal"] = statistics.fmean(abs(d.probability - neutral_probability(d, cfg)) for d in taken)
    if taken:
        values["branching/probability_std"] = statistics.pstdev(d.probability for d in taken)
        values["branching/delta_entropy_std"] = statistics.pstdev(d.entropy - d.root_entropy for d in taken)
    for outcome in ("branched", "declined"):
        judged = [t for t, d in decisions(groups) if t.is_judged and d.outcome == outcome]
        solved = [float(t.is_solved) for t in judged if t.is_solved is not None]
        if solved:
            values[f"branching/solved_where_{outcome}"] = statistics.fmean(solved)
    return values


def _failure_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return how well the entropy after a tool result predicts that the trajectory fails."""
    values: dict[str, float] = {}
    turns = list(turns_after_results(groups))
    entropies = [entropy for entropy, _, _ in turns]
    deltas = [entropy - root_entropy for entropy, root_entropy, _ in turns]
    failures = [failed for _, _, failed in turns]
    for name, signal in {"predicts_failure": entropies, "predicts_failure_delta": deltas}.items():
        if len(set(signal)) > 1 and len(set(failures)) > 1:
            values[f"branching/{name}"] = statistics.correlation(signal, failures)
    quarter = len(turns) // 4
    if quarter:
        pairs = sorted(zip(entropies, failures, strict=True), key=lambda pair: pair[0])
        by_entropy = [failed for _, failed in pairs]
        values["branching/failed_low_entropy"] = statistics.fmean(by_entropy[:quarter])
        values["branching/failed_high_entropy"] = statistics.fmean(by_entropy[-quarter:])
    return values


def _difference_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return how often a branch's reward differs from its parent's, and how well the entropy predicts this."""
    branches = list(branch_points(groups))
    if not branches:
        return {}
    entropies, differ = zip(*branches, strict=True)
    values = {"branching/branches_differ": statistics.fmean(differ)}
    if len(set(entropies)) > 1 and len(set(differ)) > 1:
        values["branching/predicts_difference"] = statistics.correlation(entropies, differ)
    return values


def branch_points(groups: Sequence[Group]) -> Iterator[tuple[float, float]]:
    """Yield (H, 1.0 or 0.0) of each branch: 1.0 if branch and parent have different rewards.

    H, in nats, is the entropy of the turn after the fork, as the parent sampled it.
    """
    for group in groups:
        by_id = {t.trajectory_id: t for t in group.trajectories if t.is_judged}
        for branch in by_id.values():
            parent = by_id.get(branch.parent_id)
            for turn in parent.turns if parent else ():
                if turn.start == branch.fork_at and turn.entropy is not None:
                    yield turn.entropy, float(branch.reward != parent.reward)


def decisions(groups: Sequence[Group]) -> Iterator[tuple[Trajectory, BranchDecision]]:
    """Yield (trajectory, decision) of all decisions that have a branch probability P.

    Retrospective decisions have no P, nor have decisions that a tool refused.
    """
    for group in groups:
        for trajectory in group.trajectories:
            # an inherited turn has no decision (Trajectory.branch), so each decision counts once
            taken = (turn.decision for turn in trajectory.turns if turn.decision)
            yield from ((trajectory, decision) for decision in taken if decision.probability is not None)


def turns_after_results(groups: Sequence[Group]) -> Iterator[tuple[float, float, float]]:
    """Yield (H, H_root, 1.0 or 0.0) of each turn after a tool result, or after a note (rollout.context).

    The entropies are in nats. 1.0 means that the trajectory failed. Inherited turns count for the trajectory that
    sampled them. Trajectories with an infrastructure error do not count.
    """
    for trajectory in (t for group in groups for t in group.trajectories if t.is_judged):
        root_entropy = trajectory.turns[0].entropy
        failed = float(trajectory.reward <= 0)
        for turn in trajectory.turns[1:]:
            if not turn.inherited and turn.entropy is not None:
                yield turn.entropy, root_entropy, failed
