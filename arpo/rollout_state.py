"""What the rollout remembers of trajectories and groups while they grow; arpo/rollout.py is what happens to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from arpo import branching as br
from arpo.trajectory import BranchDecision, Group, Prompt, Trajectory


@dataclass
class Decision:
    """A taken branch decision, until its budget is settled."""

    entropy: float
    root_entropy: float
    probability: float
    draw: float | None
    consecutive: int
    wants: bool


@dataclass
class Live:
    """Working state of one trajectory while it grows."""

    trajectory: Trajectory
    group: GroupState
    path: br.Path
    consecutive: int = 0
    """Branching decisions in a row on this chain (AEPO's l)."""
    entropies: list[float] = field(default_factory=list)
    """Of the current turn's first tokens, nats."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    began_at_s: float | None = None
    """When its first token was there."""

    @property
    def turn_index(self) -> int:
        return len(self.trajectory.turns) - 1

    @property
    def root_entropy(self) -> float:
        return self.trajectory.turns[0].entropy or 0.0

    @property
    def key(self) -> str:
        return f"{self.trajectory.prompt_id}|{self.trajectory.trajectory_id}|{self.turn_index}"


@dataclass
class GroupState:
    """One prompt's tree while it grows."""

    prompt: Prompt
    size: int
    budget: br.BranchBudget
    trajectories: dict[br.Path, Trajectory] = field(default_factory=dict)
    decisions: dict[tuple[int, br.Path], Decision] = field(default_factory=dict)
    wall_s: dict[br.Path, float] = field(default_factory=dict)
    """Of finished trajectories: from the first own token to the end."""

    @property
    def num_roots(self) -> int:
        return sum(len(path) == 1 for path in self.trajectories)

    def finish(self) -> Group:
        """Write the decision records, check the invariants."""
        for (turn, path), d in self.decisions.items():
            children = self.budget.granted.get((turn, path), 0)
            outcome = "declined" if not d.wants else "branched" if children else "no_budget"
            self.trajectories[path].turns[turn].decision = BranchDecision(
                d.entropy,
                d.root_entropy,
                d.probability,
                d.draw,
                d.consecutive,
                budget_left=self.budget.budget_before(turn, path),
                num_children=children,
                outcome=outcome,
            )
        trajectories = [self.trajectories[path] for path in sorted(self.trajectories)]
        assert len(trajectories) == self.size, (self.prompt.prompt_id, len(trajectories))
        for trajectory in trajectories:
            trajectory.check()
        return Group(self.prompt, trajectories)
