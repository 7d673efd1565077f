"""Branching decisions: the rules and the evidence for a rule, AEPO's budget split, the budget of a group. No I/O.

ARPO: arXiv 2507.19849 sec. 3; AEPO: arXiv 2510.14545 sec. 3. To add a rule, write a function
(Evidence, BranchingConfig) -> P in your own file (branching.selector=FILE.py:NAME), or here with a line in RULES.
Functions named upstream_ follow the released code where the code differs from the papers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from arpo.config.returned import call_named, checked_number
from arpo.options import PER_NAT, RELEASED_WEIGHT, BranchingConfig
from arpo.trajectory import BranchDecision, ToolCall

Path = tuple[int, ...]
"""Path of a trajectory in its group's tree: (2,) is the third root, (2, 0) its first child."""

# ---- the entropy of a turn
#
# The released code measures a SUM over 20 tokens / ln V. Ours is the mean per token in nats. PER_NAT (options.py) is
# the factor between the two; the released weights were converted by it.

TOP_K = 10
"""The released code measures the entropy of a token from this many likeliest tokens."""
UPSTREAM_TOKENS = 20
"""The released code measures the entropy of a turn from this many first tokens."""


def exact_turn_entropy(entropies: Sequence[float], num_tokens: int) -> float:
    """Return the mean full-vocabulary entropy (nats) of the first `num_tokens` tokens. [1.0, 0.0, 9.0], 2 -> 0.5"""
    head = entropies[:num_tokens]
    return sum(head) / len(head) if head else 0.0


def upstream_turn_entropy(top_logprobs: Sequence[Sequence[float]], vocab_size: int) -> float:
    """Return the entropy of a turn as the released code measures it, divided by PER_NAT.

    The released measure is the SUM over at most 20 tokens of -p ln p over the top 10, / ln V. After the division a turn
    of 20 tokens has its mean in nats (with the vocabulary of Qwen2.5), and a shorter turn has less. `branching.weight`
    then acts on it as the released 0.2 acts on the released measure.
    """
    rows = top_logprobs[:UPSTREAM_TOKENS]
    total = sum(-math.exp(logprob) * logprob for row in rows for logprob in row[:TOP_K])
    return total / math.log(vocab_size) / PER_NAT


def turn_entropy(
    entropies: Sequence[float], top_logprobs: Sequence[Sequence[float]], cfg: BranchingConfig, vocab_size: int
) -> float:
    """Return the entropy of a turn in nats, from its first tokens. `cfg.compat` chooses the measure."""
    if cfg.compat == "upstream":
        return upstream_turn_entropy(top_logprobs, vocab_size)
    return exact_turn_entropy(entropies, cfg.entropy_tokens)


def tokens_to_measure(cfg: BranchingConfig) -> tuple[int, int]:
    """Return what the engine has to report: (number of a turn's first tokens, number of top logprobs of each)."""
    if cfg.compat == "upstream":
        return UPSTREAM_TOKENS, TOP_K
    return cfg.entropy_tokens, 0


# ---- the evidence of a rule


@dataclass(frozen=True)
class Evidence:
    """The input of a branching rule, about one tool result.

    Two turns count: the turn after the result, and the first turn, before any tool was called. A branch shares its
    parent's first turn.
    """

    entropies: tuple[float, ...]
    """(k,) Next-token entropy (nats, full vocabulary) of each of the turn's first k tokens. A shorter turn has fewer.
    k is branching.entropy_tokens, or 20 under branching.compat=upstream."""
    root_entropies: tuple[float, ...]
    """(k,) The same for the first turn."""
    entropy: float
    """H: mean of `entropies`, nats. (branching.compat=upstream measures it in another way.)"""
    root_entropy: float
    """H_root: the same for the first turn."""
    consecutive: int = 0
    """AEPO's l: how many decisions directly before this one were to branch. A child continues its parent's count."""
    turn: int = 0
    """Index of the turn of `entropies`: 1 is the turn after the first tool result. (branching.compat=upstream judges
    the turn before the result, so the index is one less.)"""
    calls: tuple[ToolCall, ...] = ()
    """The answered calls: `tag`, `argument`, `result` (as the policy reads the text), `ok`, `error_kind`, `info`.
    One call with tags, one or more in JSON, none after a note (rollout.context)."""

    @property
    def delta_entropy(self) -> float:
        """H - H_root, nats: positive if the policy has become less certain."""
        return self.entropy - self.root_entropy


# ---- the rules: evidence -> P(branch)


def branch_probability(
    delta_entropy: float,
    *,
    base: float = 0.5,
    weight: float = RELEASED_WEIGHT,
    consecutive: int = 0,
    penalty: float = 0.0,
) -> float:
    """P = clip((base + weight * (H - H_root)) * (1 - penalty * l), 0, 1).

    ARPO has penalty 0, AEPO more. Entropies in nats; l (`consecutive`) = decisions to branch in a row.
    (0.5, base 0.5, weight 0.2) -> 0.6
    """
    damping = max(0.0, 1.0 - penalty * consecutive)
    return min(max((base + weight * delta_entropy) * damping, 0.0), 1.0)


def upstream_branch_probability(delta_entropy: float, *, weight: float, consecutive: int, penalty: float) -> float:
    """P = clip(1 - 0.5 / f + weight * dH, 0, 1), f = 1 - penalty * l: (dH 0, l 5, penalty 0.05) -> 0.333.

    This is the probability that AEPO as released branches: clip((u + weight * dH) * f, 0, 1) >= 0.5, with a uniform u.
    """
    damping = max(0.0, 1.0 - penalty * consecutive)
    if damping == 0.0:
        return 0.0
    return min(max(1.0 - 0.5 / damping + weight * delta_entropy, 0.0), 1.0)


def arpo(evidence: Evidence, cfg: BranchingConfig) -> float:
    """P is above `base` if the policy is less certain after the tool result than after the question."""
    return branch_probability(evidence.delta_entropy, base=cfg.base, weight=cfg.weight)


def aepo(evidence: Evidence, cfg: BranchingConfig) -> float:
    """P as in `arpo`, but damped for each decision to branch in a row, so that no chain takes the whole budget."""
    damping = {"consecutive": evidence.consecutive, "penalty": cfg.consecutive_penalty}
    if cfg.compat == "upstream":
        return upstream_branch_probability(evidence.delta_entropy, weight=cfg.weight, **damping)
    return branch_probability(evidence.delta_entropy, base=cfg.base, weight=cfg.weight, **damping)


def at_random(evidence: Evidence, cfg: BranchingConfig) -> float:
    """P = base; entropies are ignored. This is the control that shows what the entropies add."""
    return cfg.base


RULES: dict[str, Callable[[Evidence, BranchingConfig], float] | None] = {
    "arpo": arpo,
    "aepo": aepo,
    "random": at_random,
    "none": None,  # no tool result is judged: plain GRPO
}
"""Value of `branching.selector` -> function that returns P(branch), 0..1."""


def decide(evidence: Evidence, cfg: BranchingConfig, rng: random.Random) -> tuple[bool, float, float | None]:
    """Return whether to branch, P(branch), and the uniform draw; under `branching.threshold` the draw is None.

    Raises UserError if a rule of the user does not return a probability.
    """
    probability = call_named("branching.selector", cfg.selector, RULES, evidence, cfg)
    probability = checked_number(probability, f"branching.selector={cfg.selector}: P(branch)", 0.0, 1.0)
    if cfg.threshold is not None:
        return probability > cfg.threshold, probability, None
    draw = rng.random()
    return draw < probability, probability, draw


def neutral_probability(decision: BranchDecision, cfg: BranchingConfig) -> float:
    """Return P(branch) of this decision, by a rule of RULES, if the entropy change were 0."""
    if cfg.selector != "aepo":
        return cfg.base
    unchanged = Evidence((), (), entropy=0.0, root_entropy=0.0, consecutive=decision.consecutive)
    return aepo(unchanged, cfg)


# ---- the number of roots and children of a group, and the trajectories that get children


def initial_rollouts(group_size: int, root_entropy: float, tool_entropy: float, *, beta: float) -> int:
    """Return AEPO's number of roots: clip(floor(n * sigmoid(beta * (H_root - mean H_tool))) + 1, 1, n), H in nats.

    The more uncertain the policy is after the question, compared with after tool results, the more roots.
    (16, .2, .2) -> 9
    """
    exponent = min(-beta * (root_entropy - tool_entropy), 700.0)  # exp(710) overflows
    share = 1.0 / (1.0 + math.exp(exponent))
    return min(max(math.floor(group_size * share) + 1, 1), group_size)


@dataclass
class BranchBudget:
    """Hands out a group's branch budget in canonical order (turn, path), not in the order of arrival.

    So tool latencies do not decide about branches. A decision to branch is a claim on the budget:

    - It is granted once the budget suffices even if every earlier decision in canonical order branches.
    - It is refused once no budget can be left for it.
    - Until then it waits for the earlier decisions. A late grant costs nothing: the child forks at the tool result, and
      the result does not change.
    """

    total_children: int | None
    """Number of children of the group. None in AEPO's pre-monitoring phase: all claims wait."""
    max_children: int
    """Number of children of a granted claim. A claim gets fewer if less budget is left."""
    last_turn: int
    """The last turn at which a decision is possible."""
    next_decision: dict[Path, int] = field(default_factory=dict)
    """Trajectory that may still decide -> the turn of the next decision."""
    granted: dict[tuple[int, Path], int] = field(default_factory=dict)
    """Settled claim (turn, path) -> number of children."""
    waiting: set[tuple[int, Path]] = field(default_factory=set)
    """Claims (turn, path) neither granted nor refused yet."""

    @property
    def is_settled(self) -> bool:
        """True once the budget is known and no trajectory of the group can branch any more."""
        return self.total_children is not None and not self.next_decision and not self.waiting

    def expect(self, path: Path, turn: int) -> None:
        """Note that the next decision of `path` may be at `turn`."""
        self.next_decision.pop(path, None)
        if turn <= self.last_turn:
            self.next_decision[path] = turn

    def close(self, path: Path) -> None:
        """Note that `path` has ended."""
        self.next_decision.pop(path, None)

    def decided(self, turn: int, path: Path, *, wants: bool) -> None:
        """Record the decision of `path` at `turn`. `settle` grants or refuses the claim."""
        self.expect(path, turn + 1)
        if wants:
            self.waiting.add((turn, path))

    def settle(self) -> list[tuple[int, Path, list[Path]]]:
        """Grant or refuse every claim that need not wait. Return (turn, path, paths of the new children) of each.

        A refused claim has no children. Decisions of new children are expected at once: they come before later claims.
        """
        settled: list[tuple[int, Path, list[Path]]] = []
        if self.total_children is None:
            return settled
        progress = True
        while progress:  # a settled claim may be what another claim waited for
            progress = False
            for claim in sorted(self.waiting):
                num_children = self._num_children(claim)
                if num_children is None:
                    continue
                turn, path = claim
                # The claims of one trajectory are granted in the order of its turns, so a child's number does not
                # depend on time.
                num_before = sum(count for (_, parent), count in self.granted.items() if parent == path)
                self.waiting.discard(claim)
                self.granted[claim] = num_children
                children = [(*path, num_before + i) for i in range(num_children)]
                for child in children:
                    self.expect(child, turn + 1)
                settled.append((turn, path, children))
                progress = True
        return settled

    def _num_children(self, claim: tuple[int, Path]) -> int | None:
        """Return the number of children of a claim, 0 if it is refused, None if it has to wait."""
        left = self.budget_before(*claim)
        # the most children that the open decisions and waiting claims before this claim can take
        may_take = sum(self._most_children((turn, path), claim) for path, turn in self.next_decision.items())
        may_take += sum(self._most_children(earlier, claim) for earlier in self.waiting)
        if left - may_take >= self.max_children:  # enough is left even if all earlier decisions branch
            return self.max_children
        if may_take == 0 or left <= 0:  # no earlier decision can take from the rest, or nothing is left
            return max(min(left, self.max_children), 0)
        return None

    def _most_children(self, earlier: tuple[int, Path], claim: tuple[int, Path]) -> int:
        """Return the most children that the decision `earlier` and all that follow from it can take before `claim`."""
        if earlier >= claim:
            return 0
        # In n turns one trajectory can grow to (1 + max_children) ** n trajectories. The turn of the claim counts too.
        num_turns = claim[0] - earlier[0] + 1
        return (1 + self.max_children) ** num_turns - 1

    def undecided(self) -> Iterator[tuple[int, Path]]:
        """Yield each (turn, path) that may still get children."""
        yield from self.waiting
        yield from ((turn, path) for path, turn in self.next_decision.items())

    def budget_before(self, turn: int, path: Path) -> int:
        """Return the budget left for (turn, path), after all earlier claims in canonical order."""
        assert self.total_children is not None
        return self.total_children - sum(count for claim, count in self.granted.items() if claim < (turn, path))
