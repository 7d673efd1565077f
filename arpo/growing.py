"""The rollout's memory of what is under way: a group's tree, and each of its trajectories while it grows. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from arpo.branching import BranchBudget, Evidence, Path, initial_rollouts
from arpo.options import BranchingConfig, RolloutConfig, is_retrospective
from arpo.protocol.calls import LIMIT_REACHED, TOOL_LIMIT_REACHED
from arpo.protocol.stop_watch import StopWatch
from arpo.trajectory import BranchDecision, Group, Prompt, Trajectory


@dataclass(frozen=True)
class Decision:
    """A taken branch decision, until its budget is settled."""

    evidence: Evidence
    wants: bool
    probability: float | None
    draw: float | None
    refused_by: str = ""
    """The tool whose open session forbids a branch: then nothing was drawn."""

    def outcome(self, num_children: int) -> str:
        """Return what became of the decision, for the record."""
        if self.refused_by:
            return "refused"
        if not self.wants:
            return "declined"
        return "branched" if num_children else "no_budget"


@dataclass
class Live:
    """Working state of one trajectory while it grows."""

    trajectory: Trajectory
    group: GroupState
    path: Path
    evidence: Evidence | None = None
    """Evidence of the newest measured turn, None before there is one; a branch begins with its parent's."""
    entropies: list[float] = field(default_factory=list)
    """Next-token entropies (nats) of the current turn's first tokens, as far as sampled."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    """The largest logprobs of those tokens; empty where the entropy is measured exactly."""
    began_at_s: float | None = None
    """Time of its first own token."""
    num_calling: int = 0
    """Number of the current turn's calls whose results are not there yet."""
    has_failed: bool = False
    """True once a call of the current turn has failed through us."""
    watch: StopWatch | None = None
    """Set where the turn was cut, and a stop string may lie across the cut."""

    @property
    def turn_index(self) -> int:
        return len(self.trajectory.turns) - 1

    @property
    def owner(self) -> tuple[str, str]:
        """Name of the trajectory, among all that are under way: prompt_id and trajectory_id."""
        return self.group.prompt.prompt_id, self.trajectory.trajectory_id

    @property
    def key(self) -> str:
        return f"{self.group.prompt.prompt_id}|{self.trajectory.trajectory_id}|{self.turn_index}"

    def room(self, cfg: RolloutConfig) -> int:
        """Return how many more tokens what the policy has before it may have."""
        num_prompt = len(self.group.prompt.token_ids)
        room = cfg.max_response_tokens - self.trajectory.num_context_tokens(num_prompt)
        if cfg.context == "append":
            return room
        total = num_prompt + len(self.trajectory.token_ids) + sum(len(c.token_ids) for c in self.trajectory.contexts)
        return min(room, cfg.max_trajectory_tokens - total)

    def measured(self, entropy: float) -> None:
        """Note the current turn's entropy, and with its first tokens renew the evidence."""
        turn, entropies = self.trajectory.turns[-1], tuple(self.entropies)
        turn.entropy, turn.token_entropies = entropy, list(entropies)
        known = self.evidence or Evidence(entropies, entropies, entropy, entropy)  # the first turn is its own root
        self.evidence = replace(known, entropies=entropies, entropy=entropy, turn=self.turn_index)


@dataclass
class GroupState:
    """One prompt's tree while it grows."""

    prompt: Prompt
    size: int
    budget: BranchBudget
    seed: str = ""
    """Name of its random numbers: the run's seed and the rollout in which it began."""
    trajectories: dict[Path, Trajectory] = field(default_factory=dict)
    decisions: dict[tuple[int, Path], Decision] = field(default_factory=dict)
    wall_s: dict[Path, float] = field(default_factory=dict)
    """Seconds of each finished trajectory, from its first own token to its end."""
    num_rounds: int = 0
    """Rounds of forks that a retrospective selector has chosen."""

    @classmethod
    def begin(cls, prompt: Prompt, rollout: RolloutConfig, cfg: BranchingConfig, seed: str) -> tuple[GroupState, int]:
        """Return a group without trajectories, and how many roots it begins with."""
        size = rollout.group_size
        roots = 1 if cfg.dynamic_budget else min(cfg.num_initial_rollouts, size)
        budget = BranchBudget(
            budget=None if cfg.dynamic_budget else size - roots,
            max_children=cfg.max_branches_per_turn,
            last_turn=0 if cfg.selector == "none" or is_retrospective(cfg.selector) else rollout.max_turns - 1,
        )
        return cls(prompt, size, budget, seed), roots

    def roots_after(self, pilot: Trajectory, beta: float) -> int:
        """AEPO: the finished pre-monitoring trajectory (kept as root 0) decides how many roots there are."""
        root_entropy = pilot.turns[0].entropy or 0.0
        after_tools = [t.entropy for t in pilot.turns[1:] if t.entropy is not None]
        # Without a tool call there is no H_tool: taken as equal, so half the group (plus one) starts as roots.
        tool_entropy = sum(after_tools) / len(after_tools) if after_tools else root_entropy
        return initial_rollouts(self.size, root_entropy, tool_entropy, beta=beta)

    @property
    def seconds(self) -> list[float]:
        """`wall_s` in the order of the paths."""
        return [seconds for _, seconds in sorted(self.wall_s.items())]

    @property
    def num_roots(self) -> int:
        return sum(len(path) == 1 for path in self.trajectories)

    def finish(self) -> Group:
        """Write the decision records, check the invariants."""
        for (turn, path), d in self.decisions.items():
            children = self.budget.granted.get((turn, path), 0)
            self.trajectories[path].turns[turn].decision = BranchDecision(
                d.evidence.entropy,
                d.evidence.root_entropy,
                d.probability,
                d.draw,
                d.evidence.consecutive,
                budget_left=self.budget.budget_before(turn, path),
                num_children=children,
                outcome=d.outcome(children),
                refused_by=d.refused_by,
            )
        trajectories = [self.trajectories[path] for path in sorted(self.trajectories)]
        assert len(trajectories) == self.size, (self.prompt.prompt_id, len(trajectories))
        for trajectory in trajectories:
            trajectory.check()
        return Group(self.prompt, trajectories)


def refused(trajectory: Trajectory, tag: str, cfg: RolloutConfig) -> str:
    """Return the text that the model reads instead of a result of one more call; "" where the call may run."""
    calls, limit = [call.tag for call in trajectory.tool_calls], cfg.call_limits.get(tag)
    if len(calls) >= cfg.max_tool_calls:
        return LIMIT_REACHED.format(limit=cfg.max_tool_calls)
    return "" if limit is None or calls.count(tag) < limit else TOOL_LIMIT_REACHED.format(limit=limit, tag=tag)


def number_of(text: str) -> int:
    """Return 32 bits of a text.

    By a chance of 1e-6 two of a hundred requests of a group share theirs, and so draw the same noise.
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())
