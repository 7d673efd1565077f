"""Retrospective selectors, which are pure: they say where to fork a group whose trajectories have all ended.

A rule of branching.py judges a tool result a moment after it has come; a retrospective selector sees how everything
went on, and so neither tool latencies nor the order of arrival can matter. It gets the group (without trajectories that
ended in an error of ours), the number of forks of this round, its config section and a random generator. A selector of
your own is one function, in a file of yours (branching.selector=FILE.py:NAME) or with one line in EXPANSIONS.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from arpo.branching import Path
from arpo.config.named import is_own
from arpo.config.returned import ask, instance, integer, number, shown
from arpo.errors import UserError
from arpo.growing import GroupState
from arpo.options import BranchingConfig
from arpo.trajectory import BranchDecision, Group, StopReason, Trajectory

SIBLING_PENALTY = 0.05
"""What each further turn sampled at the same place takes off a turn's score (nats per token)."""


class Fork(NamedTuple):
    """A place to fork. The new trajectory begins where the turn begins, so the turn is sampled anew."""

    trajectory_id: str
    turn: int
    """Index of the turn. Before it everything is shared, the tool result included; 0 makes a new root."""
    score: float | None = None
    """What the selector chose it by, for the record; None where chance chose."""


Start = tuple[str, int]
"""Where a turn begins: (trajectory_id of the one that sampled the turn before, index of the turn); ("", 0) = at the
prompt. Turns that begin at the same place of the tree have the same."""


def starts(group: Group) -> dict[tuple[str, int], Start]:
    """Return where each turn of each trajectory begins, inherited turns included, by (trajectory_id, turn).

    "0.0", a branch of "0" at turn 1: {("0", 0): ("", 0), ("0", 1): ("0", 1), ("0.0", 0): ("", 0), ("0.0", 1): ("0", 1)}
    """
    by_id, found = {t.trajectory_id: t for t in group.trajectories}, {}
    for t in group.trajectories:
        for turn in range(len(t.turns)):
            writer = t
            while turn and writer.turns[turn - 1].inherited:
                writer = by_id[writer.parent_id]
            found[t.trajectory_id, turn] = (writer.trajectory_id if turn else "", turn)
    return found


def own_turns(group: Group) -> list[tuple[tuple[Trajectory, int], Start]]:
    """Return ((trajectory, turn), where it begins) of every turn of the tree, once: with the one that sampled it."""
    by_id, begin = {t.trajectory_id: t for t in group.trajectories}, starts(group)
    return [((by_id[n], k), start) for (n, k), start in begin.items() if not by_id[n].turns[k].inherited]


def times_sampled(group: Group) -> Counter[Start]:
    """Return how many turns of the tree begin at each place."""
    return Counter(start for _, start in own_turns(group))


def surprise(t: Trajectory, turn: int) -> float:
    """Return the mean of -log pi over the turn's sampled tokens, in nats."""
    logprobs = t.rollout_logprobs[t.turns[turn].start : t.turns[turn].end]
    return -sum(logprobs) / max(len(logprobs), 1)


def best(candidates: list[Fork], budget: int, rng: random.Random) -> list[Fork]:
    """Return the `budget` candidates with the largest scores, best first; chance decides between equal ones."""
    return sorted(candidates, key=lambda fork: (-fork.score, rng.random()))[:budget]


# ---- the selectors


def tree_grpo(group: Group, budget: int, cfg: BranchingConfig, rng: random.Random) -> list[Fork]:
    """Uniformly, with replacement, after any turn that a tool answered, or at the root of any tree (Tree-GRPO, arXiv
    2509.21240). The control that shows what a choice is worth. A fork at a root begins a tree of its own, so that the
    credit `inter_intra` compares it with no other tail; the paper leaves that open, and its code was not at hand."""
    places = [
        Fork(t.trajectory_id, turn)
        for t in group.trajectories
        for turn in range(len(t.turns))
        if not t.turns[max(turn - 1, 0)].inherited  # a shared place counts once, for the one that made it
    ]
    return rng.choices(places, k=budget) if places else []


def at2po(group: Group, budget: int, cfg: BranchingConfig, rng: random.Random) -> list[Fork]:
    """The turns that the policy was least sure of: mean(-log pi) - 0.05 * max(0, siblings - 1) (AT2PO).

    `siblings` counts the turns that begin where this one does, itself included.
    """
    siblings, scored = times_sampled(group), []
    for (t, turn), start in own_turns(group):
        scored.append(Fork(t.trajectory_id, turn, surprise(t, turn) - SIBLING_PENALTY * (siblings[start] - 1)))
    return best(scored, budget, rng)


def top_h(group: Group, budget: int, cfg: BranchingConfig, rng: random.Random) -> list[Fork]:
    """The most uncertain turns after a tool result: H - 0.05 nats * (siblings - 1)."""
    siblings = times_sampled(group)
    scored = [
        Fork(t.trajectory_id, turn, t.turns[turn].entropy - SIBLING_PENALTY * (siblings[start] - 1))
        for (t, turn), start in own_turns(group)
        if turn > 0 and t.turns[turn].entropy is not None
    ]
    return best(scored, budget, rng)


EXPANSIONS: dict[str, Callable[[Group, int, BranchingConfig, random.Random], list[Fork]]] = {
    "tree_grpo": tree_grpo,
    "at2po": at2po,
    "top_h": top_h,
}
"""Values of `branching.selector` besides those of RULES. Each returns at most `budget` forks; more are left out, and
what is missing to the group's size after the last round is filled with fresh roots."""


# ---- rounds of forks in a group that the rollout lets grow


def next_forks(
    group: GroupState, finished: Group, cfg: BranchingConfig, seed: str, refusal: Callable[[Iterable[str]], str]
) -> list[Fork]:
    """Return the forks of the group's next round, and note them in the turns they chose.

    Each round may make an equal part of the forks that are left. `seed` names the rollout. `refusal` returns the tool,
    of those called before a fork, whose session allows none; such a fork is noted and left out.
    """
    left = group.size - len(group.trajectories)
    budget = math.ceil(left / (cfg.expansion_rounds - group.num_rounds))
    group.num_rounds += 1
    rng = random.Random(f"{seed}|{group.prompt.prompt_id}|round {group.num_rounds}")
    forks = chosen_forks(finished, budget, cfg, rng)
    by_id = {t.trajectory_id: t for t in finished.trajectories}
    allowed = []
    for fork in forks:
        called = [call for t in by_id[fork.trajectory_id].turns[: fork.turn] for call in t.tool_calls]
        refused_by = refusal(call.tag for call in called if call.executed)
        _record(group, fork, left - len(allowed), refused_by)
        allowed += [] if refused_by else [fork]
    return allowed


def chosen_forks(finished: Group, budget: int, cfg: BranchingConfig, rng: random.Random) -> list[Fork]:
    """Return the first `budget` forks that the selector chooses. Raises UserError where one of the user's does not
    return forks at turns that are there, with finite scores."""
    # NaN and not None or 0: whatever is computed from it is NaN, and a score that is NaN is refused below.
    seen = finished.as_seen(reward=math.nan) if is_own(cfg.selector) else finished
    what = f"branching.selector={cfg.selector}"
    found = ask("branching.selector", cfg.selector, EXPANSIONS, seen, budget, cfg, rng)
    num_turns = {t.trajectory_id: len(t.turns) for t in finished.trajectories}
    forks = []
    for fork in instance(found, f"{what}: the returned value", list)[:budget]:
        instance(fork, f"{what}: an entry of the returned list", Fork)
        if fork.trajectory_id not in num_turns:
            known = ", ".join(num_turns)
            raise UserError(f"{what}: there is no trajectory {shown(fork.trajectory_id)} to fork; there are {known}")
        where = f"{what}: in the Fork of trajectory {fork.trajectory_id}"
        turn = integer(fork.turn, f"{where}, the turn", 0, num_turns[fork.trajectory_id] - 1)
        is_nan = isinstance(fork.score, float) and math.isnan(fork.score)
        hint = " (what a selector does not see is NaN: logprobs of results, rewards)" if is_nan else ""
        score = None if fork.score is None else number(fork.score, f"{where} at turn {turn}, the score{hint}")
        forks.append(Fork(fork.trajectory_id, turn, score))
    return forks


def finished_part(group: GroupState) -> Group | None:
    """Return the trajectories started so far; None while one is growing. Those that an error of ours ended are not
    among them, nor are their branches."""
    ordered = sorted(group.trajectories.items())
    if any(t.stop_reason is None for _, t in ordered):
        return None
    failed = [path for path, t in ordered if t.stop_reason == StopReason.ERROR]
    return Group(group.prompt, [t for path, t in ordered if not any(path[: len(f)] == f for f in failed)])


def place(group: GroupState, fork: Fork) -> tuple[Path, Path]:
    """Return the path of a fork's parent, which is the trajectory that sampled the turn before, and of the new child.

    At turn 0 there is no parent: its path is (), and the child is the next root.
    """
    parent = _writer(group, fork.trajectory_id, fork.turn - 1) if fork.turn else ()
    return parent, (*parent, sum(path[:-1] == parent for path in group.trajectories))


def _writer(group: GroupState, trajectory_id: str, turn: int) -> Path:
    """Return the path of the trajectory that sampled this turn of another: itself, or one that it was forked from."""
    path = tuple(map(int, trajectory_id.split(".")))
    while group.trajectories[path].turns[turn].inherited:
        path = path[:-1]
    return path


def _record(group: GroupState, fork: Fork, budget_left: int, refused_by: str) -> None:
    """Note in its turn that the selector has chosen it; a turn that is chosen again keeps count."""
    trajectory = group.trajectories[_writer(group, fork.trajectory_id, fork.turn)]
    turn = trajectory.turns[fork.turn]
    turn.decision = BranchDecision(
        turn.entropy,
        trajectory.turns[0].entropy,
        probability=None,
        draw=None,
        consecutive=0,
        budget_left=budget_left,
        num_children=(not refused_by) + (turn.decision.num_children if turn.decision else 0),
        outcome="refused" if refused_by else "branched",
        score=fork.score,
        refused_by=refused_by,
    )
