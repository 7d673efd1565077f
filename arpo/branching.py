"""Branching decisions, which are pure: the rules and what they may look at, AEPO's budget split, a group's budget.

ARPO: arXiv 2507.19849 sec. 3; AEPO: arXiv 2510.14545 sec. 3. A rule of your own is one function
(Evidence, BranchingConfig) -> P, in a file of yours (branching.selector=FILE.py:NAME) or with one line in RULES.
The functions named upstream_ do what the released code does where that differs from the papers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from arpo.config.returned import ask, number
from arpo.options import PER_NAT, RELEASED_WEIGHT, BranchingConfig
from arpo.trajectory import BranchDecision, ToolCall

Path = tuple[int, ...]
"""Place of a trajectory in its group's tree: (2,) is the third root, (2, 0) its first child."""

# ---- the entropy of a turn
#
# The released code measures a SUM over 20 tokens / ln V; ours is the mean per token in nats. PER_NAT (options.py) is
# the factor between them, by which the released weights were converted.

TOP_K, UPSTREAM_TOKENS = 10, 20
"""Likeliest tokens and first tokens of a turn, from which the released code measures a turn's entropy."""


def exact_turn_entropy(entropies: Sequence[float], num_tokens: int) -> float:
    """Return the mean over the first k tokens of the full next-token entropy, nats. [1.0, 0.0, 9.0], k 2 -> 0.5"""
    head = entropies[:num_tokens]
    return sum(head) / len(head) if head else 0.0


def upstream_turn_entropy(top_logprobs: Sequence[Sequence[float]], vocab_size: int) -> float:
    """Return the released measure, a SUM over at most 20 tokens of -p ln p over the top 10, / ln V; in our units.

    It is divided by PER_NAT: a turn of 20 tokens has its mean in nats (with the vocabulary of Qwen2.5), a shorter one
    less, and `branching.weight` acts on it as the released 0.2 acts on the released measure.
    """
    rows = top_logprobs[:UPSTREAM_TOKENS]
    return sum(-math.exp(lp) * lp for row in rows for lp in row[:TOP_K]) / math.log(vocab_size) / PER_NAT


def turn_entropy(
    entropies: Sequence[float], top_logprobs: Sequence[Sequence[float]], cfg: BranchingConfig, vocab_size: int
) -> float:
    """Return the entropy of a turn in nats as `cfg.compat` measures it, from its first tokens."""
    if cfg.compat == "upstream":
        return upstream_turn_entropy(top_logprobs, vocab_size)
    return exact_turn_entropy(entropies, cfg.entropy_tokens)


def tokens_to_measure(cfg: BranchingConfig) -> tuple[int, int]:
    """Return how many first tokens of a turn the engine reports entropies of, and how many top logprobs of each."""
    num_tokens = UPSTREAM_TOKENS if cfg.compat == "upstream" else cfg.entropy_tokens
    return num_tokens, 0 if cfg.compat == "paper" else TOP_K


# ---- what a rule may look at


@dataclass(frozen=True)
class Evidence:
    """Everything that a branching rule may look at when it judges a tool result: the first tokens of the turn after it,
    and those of the first turn, before any tool was called. A branch has its parent's first turn."""

    entropies: tuple[float, ...]
    """(k,) Next-token entropy (nats, full vocabulary) of each of the turn's first k = branching.entropy_tokens tokens;
    fewer where the turn was shorter."""
    root_entropies: tuple[float, ...]
    """(k,) The same of the first turn."""
    entropy: float
    """H: mean of `entropies`, nats. (branching.compat=upstream measures it in another way.)"""
    root_entropy: float
    """H_root: the same of the first turn."""
    consecutive: int = 0
    """Branching decisions in a row on this chain before this one (AEPO's l)."""
    turn: int = 0
    """Index of the turn that `entropies` belong to: 1 is the turn after the first tool result. (Under
    branching.compat=upstream the turn before the result is judged, so there it is one less.)"""
    calls: tuple[ToolCall, ...] = ()
    """The calls that were answered: `tag`, `argument`, `result` as the policy reads it, `ok`, `error_kind`, `info`. One
    with tags, one or more in JSON; none behind a note (rollout.context)."""

    @property
    def delta_entropy(self) -> float:
        """H - H_root, nats: positive where the policy has become less certain."""
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

    Entropies in nats. ARPO (penalty 0) and AEPO; l = branching decisions in a row on the chain.
    (0.5, base 0.5, weight 0.2) -> 0.6
    """
    damping = max(0.0, 1.0 - penalty * consecutive)
    return min(max((base + weight * delta_entropy) * damping, 0.0), 1.0)


def upstream_branch_probability(delta_entropy: float, *, weight: float, consecutive: int, penalty: float) -> float:
    """P = clip(1 - 0.5 / f + weight * dH, 0, 1), f = 1 - penalty * l: (dH 0, l 5, penalty 0.05) -> 0.333.

    For AEPO as released branches if clip((u + weight * dH) * f, 0, 1) >= 0.5, with a uniform u.
    """
    damping = max(0.0, 1.0 - penalty * consecutive)
    if damping == 0.0:
        return 0.0
    return min(max(1.0 - 0.5 / damping + weight * delta_entropy, 0.0), 1.0)


def arpo(evidence: Evidence, cfg: BranchingConfig) -> float:
    """P rises with the entropy: the tool result has made the policy less certain than the question did."""
    return branch_probability(evidence.delta_entropy, base=cfg.base, weight=cfg.weight)


def aepo(evidence: Evidence, cfg: BranchingConfig) -> float:
    """P as in `arpo`, but damped for each branching decision in a row, so that no chain takes the whole budget."""
    delta, consecutive, penalty = evidence.delta_entropy, evidence.consecutive, cfg.consecutive_penalty
    if cfg.compat == "upstream":
        return upstream_branch_probability(delta, weight=cfg.weight, consecutive=consecutive, penalty=penalty)
    return branch_probability(delta, base=cfg.base, weight=cfg.weight, consecutive=consecutive, penalty=penalty)


def at_random(evidence: Evidence, cfg: BranchingConfig) -> float:
    """P = base: a control that shows what the entropies are worth."""
    return cfg.base


RULES: dict[str, Callable[[Evidence, BranchingConfig], float] | None] = {
    "arpo": arpo,
    "aepo": aepo,
    "random": at_random,
    "none": None,  # no tool result is judged: plain GRPO
}
"""Each value of `branching.selector`, and the function that returns P(branch), 0..1."""


def decide(evidence: Evidence, cfg: BranchingConfig, rng: random.Random) -> tuple[bool, float, float | None]:
    """Return whether to branch, P, and the draw, which is None where there is a `branching.threshold`. Raises
    UserError where a rule of the user's returns no probability."""
    probability = ask("branching.selector", cfg.selector, RULES, evidence, cfg)
    probability = number(probability, f"branching.selector={cfg.selector}: P(branch)", 0.0, 1.0)
    if cfg.threshold is not None:
        return probability > cfg.threshold, probability, None
    draw = rng.random()
    return draw < probability, probability, draw


def neutral_probability(decision: BranchDecision, cfg: BranchingConfig) -> float:
    """Return what P had been for this decision if the entropy had not changed."""
    if cfg.selector != "aepo":
        return cfg.base
    return aepo(Evidence((), (), 0.0, 0.0, decision.consecutive), cfg)


# ---- the number of children of a group, and the trajectories that get them


def initial_rollouts(group_size: int, root_entropy: float, tool_entropy: float, *, beta: float) -> int:
    """Return AEPO's number of roots, clip(floor(n * sigmoid(beta * (H_root - mean H_tool))) + 1, 1, n), H in nats.

    The more uncertain the question itself (and not the tool results), the more roots. (16, .2, .2) -> 9
    """
    share = 1.0 / (1.0 + math.exp(-beta * (root_entropy - tool_entropy)))
    return min(max(math.floor(group_size * share) + 1, 1), group_size)


@dataclass
class BranchBudget:
    """Hands out a group's branch budget in the canonical order (turn, path), whatever the order of arrival.

    Tool latencies must not decide who branches. So a claim is granted when, even if every decision that precedes it
    in canonical order were to branch, budget would be left for it; it is refused when none can be left; else it waits
    for the earlier ones. A late grant costs nothing: the child forks at the tool result, which stays where it is.

    Budget None = not known yet (AEPO's pre-monitoring phase): everything waits.
    """

    budget: int | None
    max_children: int
    last_turn: int
    """The last turn at which a decision is possible (= tool calls allowed)."""
    open: dict[Path, int] = field(default_factory=dict)
    """Trajectories that may still decide -> the turn of their next decision."""
    granted: dict[tuple[int, Path], int] = field(default_factory=dict)
    """(turn, path) -> children."""
    waiting: set[tuple[int, Path]] = field(default_factory=set)

    @property
    def is_settled(self) -> bool:
        """True when the budget is known and no trajectory of the group can branch any more."""
        return self.budget is not None and not self.open and not self.waiting

    def expect(self, path: Path, turn: int) -> None:
        """`path` may decide at `turn` next."""
        self.open.pop(path, None)
        if turn <= self.last_turn:
            self.open[path] = turn

    def close(self, path: Path) -> None:
        """`path` has ended."""
        self.open.pop(path, None)

    def decided(self, turn: int, path: Path, *, wants: bool) -> None:
        """Record the decision of `path` at `turn`; `settle` says what comes of it."""
        self.expect(path, turn + 1)
        if wants:
            self.waiting.add((turn, path))

    def settle(self) -> list[tuple[int, Path, list[Path]]]:
        """The claims that can be decided now, as (turn, path, paths of the new children); no children = refused.

        Children count as open at once (their own decisions come before those of later claims).
        """
        settled: list[tuple[int, Path, list[Path]]] = []
        if self.budget is None:
            return settled
        progress = True
        while progress:
            progress = False
            for claim in sorted(self.waiting):
                num_children = self._grant(claim)
                if num_children is None:
                    continue
                turn, path = claim
                self.waiting.discard(claim)
                self.granted[claim] = num_children
                first = sum(n for (_, p), n in self.granted.items() if p == path) - num_children
                children = [(*path, first + i) for i in range(num_children)]
                for child in children:
                    self.expect(child, turn + 1)
                settled.append((turn, path, children))
                progress = True
        return settled

    def _grant(self, claim: tuple[int, Path]) -> int | None:
        """Children of a claim, or None where it has to wait."""
        left = self.budget - sum(n for key, n in self.granted.items() if key < claim)
        ahead = sum(self._most_children((turn, path), claim) for path, turn in self.open.items())
        ahead += sum(self._most_children(key, claim) for key in self.waiting)
        if left - ahead >= self.max_children:
            return self.max_children
        if ahead == 0 or left <= 0:
            return max(min(left, self.max_children), 0)
        return None

    def _most_children(self, key: tuple[int, Path], claim: tuple[int, Path]) -> int:
        """Upper bound of the children before `claim` out of the decision `key` and all that follow from it."""
        if key >= claim:
            return 0
        num_turns = claim[0] - key[0] + 1
        return (1 + self.max_children) ** num_turns - 1

    def undecided(self) -> Iterator[tuple[int, Path]]:
        """Yield the (turn, path) at which children may still be granted."""
        yield from self.waiting
        yield from ((turn, path) for path, turn in self.open.items())

    def budget_before(self, turn: int, path: Path) -> int:
        """Budget left when (turn, path) decides, in canonical order."""
        assert self.budget is not None
        return self.budget - sum(n for key, n in self.granted.items() if key < (turn, path))
