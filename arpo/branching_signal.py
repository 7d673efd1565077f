"""The branching signal: whether the entropies act on the decisions, and what they are worth."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from arpo.branching import neutral_probability
from arpo.options import BranchingConfig
from arpo.trajectory import BranchDecision, Group, Trajectory

NUM_FIRST_STEPS, MIN_MOVED = 3, 0.02
"""A run whose entropies move P by less than this in each of its first steps is told so."""


class BranchingSignal:
    """The signal metrics of each step of a run, and a warning where entropy branching turns out to be random."""

    def __init__(self, cfg: BranchingConfig):
        self.cfg = cfg
        self.warning = ""
        """What the user must know of the step that was added last; "" where there is nothing."""
        self._moved: list[float] = []  # `branching/signal` of the steps that had decisions

    def add(self, groups: Sequence[Group]) -> dict[str, float]:
        """Add a step's scored groups, those of all ranks. Return `signal_metrics`."""
        metrics = signal_metrics(groups, self.cfg)
        self.warning = ""
        if "branching/signal" in metrics:
            self._moved.append(metrics["branching/signal"])
            acts = max(self._moved) >= MIN_MOVED or self.cfg.threshold is not None or self.cfg.selector == "random"
            if len(self._moved) == NUM_FIRST_STEPS and not acts:
                self.warning = (
                    f"warning: the entropies of {NUM_FIRST_STEPS} steps moved P(branch) by {max(self._moved):.3f} at "
                    "most: this is random branching under another name; raise branching.weight, set "
                    "branching.threshold, or take configs/arpo_top.yaml"
                )
        return metrics


def signal_metrics(groups: Sequence[Group], cfg: BranchingConfig) -> dict[str, float]:
    """Return how far the entropies moved P, and how well they foretold which trajectories fail (docs/metrics.md).

    A value that cannot be computed, like a correlation without variance, is left out.
    """
    values: dict[str, float] = {}
    if taken := [decision for _, decision in decisions(groups)]:
        values["branching/signal"] = statistics.fmean(abs(d.probability - neutral_probability(d, cfg)) for d in taken)
        values["branching/probability_std"] = statistics.pstdev(d.probability for d in taken)
        values["branching/delta_entropy_std"] = statistics.pstdev(d.entropy - d.root_entropy for d in taken)
    for outcome in ("branched", "declined"):
        solved = [t.is_solved for t, d in decisions(groups) if t.is_judged and d.outcome == outcome]
        if known := [float(is_solved) for is_solved in solved if is_solved is not None]:
            values[f"branching/solved_where_{outcome}"] = statistics.fmean(known)
    turns = list(turns_after_results(groups))
    entropies, failures = [entropy for entropy, _, _ in turns], [failed for _, _, failed in turns]
    deltas = [entropy - root_entropy for entropy, root_entropy, _ in turns]
    for name, signal in {"predicts_failure": entropies, "predicts_failure_delta": deltas}.items():
        if len(set(signal)) > 1 and len(set(failures)) > 1:
            values[f"branching/{name}"] = statistics.correlation(signal, failures)
    if quarter := len(turns) // 4:
        by_entropy = [failed for _, failed in sorted(zip(entropies, failures, strict=True), key=lambda pair: pair[0])]
        values["branching/failed_low_entropy"] = statistics.fmean(by_entropy[:quarter])
        values["branching/failed_high_entropy"] = statistics.fmean(by_entropy[-quarter:])
    if branches := list(branch_points(groups)):
        entropies, differ = zip(*branches, strict=True)
        values["branching/branches_differ"] = statistics.fmean(differ)
        if len(set(entropies)) > 1 and len(set(differ)) > 1:
            values["branching/predicts_difference"] = statistics.correlation(entropies, differ)
    return values


def branch_points(groups: Sequence[Group]) -> Iterator[tuple[float, float]]:
    """Yield (H, 1.0 if its reward is another than its parent's else 0.0) of each branch.

    H, in nats, is that of the turn after the result at which it left its parent, as the parent sampled it.
    """
    for group in groups:
        by_id = {t.trajectory_id: t for t in group.trajectories if t.is_judged}
        for branch in by_id.values():
            parent = by_id.get(branch.parent_id)
            turn = next((turn for turn in parent.turns if turn.start == branch.fork_at), None) if parent else None
            if turn and turn.entropy is not None:
                yield turn.entropy, float(branch.reward != parent.reward)


def decisions(groups: Sequence[Group]) -> Iterator[tuple[Trajectory, BranchDecision]]:
    """Yield (trajectory, decision) of all decisions that a rule took, in order; retrospective selectors have no P."""
    for group in groups:
        for trajectory in group.trajectories:
            taken = (turn.decision for turn in trajectory.turns if turn.decision)
            yield from ((trajectory, decision) for decision in taken if decision.probability is not None)


def turns_after_results(groups: Sequence[Group]) -> Iterator[tuple[float, float, float]]:
    """Yield (H, H_root, 1.0 if the trajectory failed else 0.0) of each turn after a tool result, nats.

    Inherited turns count for the trajectory that sampled them; those that ended in an error of ours do not count.
    """
    for trajectory in (t for group in groups for t in group.trajectories if t.is_judged):
        root_entropy, failed = trajectory.turns[0].entropy, float(trajectory.reward <= 0)
        for turn in trajectory.turns[1:]:
            if not turn.inherited and turn.entropy is not None:
                yield turn.entropy, root_entropy, failed
