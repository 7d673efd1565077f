"""Retrospective selectors choose the forks of a group after all trajectories of the group have ended. No I/O.

A branching rule (branching.py) judges a tool result as soon as the first tokens after the result are known. A
retrospective selector reads complete trajectories, so tool latencies and the order of arrival cannot matter. The
arguments are the group (without trajectories ended by an infrastructure error), the number of forks of this round, the
config section and a random generator. To add a selector, write a function in your own file
(branching.selector=FILE.py:NAME), or here with a line in EXPANSIONS.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from arpo.branching import Path
from arpo.config.named import is_own
from arpo.config.returned import call_named, checked_instance, checked_integer, checked_number, shown
from arpo.errors import UserError
from arpo.growing import GroupState
from arpo.options import BranchingConfig
from arpo.trajectory import BranchDecision, Group, StopReason, Trajectory

SIBLING_PENALTY = 0.05
"""A turn's score is lowered by this for each other turn that begins at the same place (nats per token)."""


class Fork(NamedTuple):
    """A new trajectory. It shares everything before a turn of another one, and samples this turn anew."""

    trajectory_id: str
    turn: int
    """Index of the turn to sample anew. The tool result before this turn is shared. 0 makes a new root."""
    score: float | None = None
    """The selector's score of the turn, for the record; None if chance chose."""


# ---- turns of a tree, for selectors


Start = tuple[str, int]
"""Place in the tree where a turn begins: (trajectory_id of the trajectory that sampled the turn before, index of the
turn); ("", 0) = at the prompt. Turns that begin at the same place have the same Start."""


def turn_starts(group: Group) -> dict[tuple[str, int], Start]:
    """Return the start of each turn of each trajectory, inherited turns included, by (trajectory_id, turn).

    "0.0", a branch of "0" at turn 1: {("0", 0): ("", 0), ("0", 1): ("0", 1), ("0.0", 0): ("", 0), ("0.0", 1): ("0", 1)}
    """
    by_id = {t.trajectory_id: t for t in group.trajectories}
    starts: dict[tuple[str, int], Start] = {}
    for t in group.trajectories:
        for turn in range(len(t.turns)):
            writer = t
            while turn and writer.turns[turn - 1].inherited:
                writer = by_id[writer.parent_id]
            starts[t.trajectory_id, turn] = (writer.trajectory_id if turn else "", turn)
    return starts


def sampled_turns(group: Group) -> list[tuple[Trajectory, int, Start]]:
    """Return (trajectory, turn, start) of every turn of the tree. A shared turn comes once, with the trajectory that
    sampled it."""
    by_id = {t.trajectory_id: t for t in group.trajectories}
    return [
        (by_id[trajectory_id], turn, start)
        for (trajectory_id, turn), start in turn_starts(group).items()
        if not by_id[trajectory_id].turns[turn].inherited
    ]


def times_sampled(group: Group) -> Counter[Start]:
    """Return how many turns of the tree begin at each place."""
    return Counter(start for _, _, start in sampled_turns(group))


def surprise(t: Trajectory, turn: int) -> float:
    """Return the mean of -log pi over the turn's sampled tokens, in nats."""
    logprobs = t.rollout_logprobs[t.turns[turn].start : t.turns[turn].end]
    return -sum(logprobs) / max(len(logprobs), 1)


def highest_scores(candidates: list[Fork], budget: int, rng: random.Random) -> list[Fork]:
    """Return the `budget` candidates with the highest scores, best first. Chance decides between equal scores."""
    return sorted(candidates, key=lambda fork: (-fork.score, rng.random()))[:budget]


# ---- the selectors


def tree_grpo(group: Group, budget: int, cfg: BranchingConfig, rng: random.Random) -> list[Fork]:
    """Choose at random, with replacement, among the root of each tree and all turns after a tool result, or after a
    note (rollout.context).

    This is Tree-GRPO (arXiv 2509.21240), and the control that shows how much a choice is worth. A fork at
    turn 0 starts a new tree. The credit `inter_intra` treats it as a separate tree. The paper does not say whether it
    should, and the paper's code was not available.
    """
    candidates = [
        Fork(t.trajectory_id, turn)
        for t in group.trajectories
        for turn in range(len(t.turns))
        # A shared place counts once, for the trajectory that sampled the turn before it. Turn 0 counts for roots only.
        if not t.turns[max(turn - 1, 0)].inherited
    ]
    return rng.choices(candidates, k=budget) if candidates else []


def at2po(group: Group, budget: int, cfg: BranchingConfig, rng: random.Random) -> list[Fork]:
    """Choose the turns of which the policy was least sure: mean(-log pi) - 0.05 * (siblings - 1) (AT2PO).

    `siblings` is the number of turns with the same start, this turn included.
    """
    siblings = times_sampled(group)
    candidates = []
    for t, turn, start in sampled_turns(group):
        score = surprise(t, turn) - SIBLING_PENALTY * (siblings[start] - 1)
        candidates.append(Fork(t.trajectory_id, turn, score))
    return highest_scores(candidates, budget, rng)


def top_h(group: Group, budget: int, cfg: BranchingConfig, rng: random.Random) -> list[Fork]:
    """Choose the turns after a tool result, or after a note (rollout.context), with the highest entropy.

    The score of a turn is H - 0.05 nats * (siblings - 1).
    """
    siblings = times_sampled(group)
    candidates = []
    for t, turn, start in sampled_turns(group):
        entropy = t.turns[turn].entropy
        if turn > 0 and entropy is not None:
            score = entropy - SIBLING_PENALTY * (siblings[start] - 1)
            candidates.append(Fork(t.trajectory_id, turn, score))
    return highest_scores(candidates, budget, rng)


EXPANSIONS: dict[str, Callable[[Group, int, BranchingConfig, random.Random], list[Fork]]] = {
    "tree_grpo": tree_grpo,
    "at2po": at2po,
    "top_h": top_h,
}
"""Values of `branching.selector` besides the names in RULES. Each function returns at most `budget` forks; all further
forks are ignored. If the group is not full after the last round, fresh roots fill the group."""


# ---- rounds of forks in a group that still grows


def finished_so_far(group: GroupState) -> Group | None:
    """Return the trajectories so far as a group, or None while any of them is still growing.

    Trajectories with an infrastructure error are left out. They have no branches, because a selector never sees them.
    """
    ordered = [t for _, t in sorted(group.trajectories.items())]
    if any(t.stop_reason is None for t in ordered):
        return None
    return Group(group.prompt, [t for t in ordered if t.stop_reason != StopReason.ERROR])


def next_forks(
    group: GroupState, finished: Group, cfg: BranchingConfig, refusal: Callable[[Iterable[str]], str]
) -> list[Fork]:
    """Return the forks of the group's next round, and record each fork in its turn.

    The remaining forks are spread evenly over the remaining rounds. `refusal` gets the tags of the calls before
    a fork, and returns the tool whose session forbids it, or "". Such a fork is recorded and left out.
    """
    num_left = group.size - len(group.trajectories)
    budget = math.ceil(num_left / (cfg.expansion_rounds - group.num_rounds))
    group.num_rounds += 1
    rng = random.Random(f"{group.seed}|{group.prompt.prompt_id}|round {group.num_rounds}")
    by_id = {t.trajectory_id: t for t in finished.trajectories}
    allowed = []
    for fork in chosen_forks(finished, budget, cfg, rng):
        turns_before = by_id[fork.trajectory_id].turns[: fork.turn]
        refused_by = refusal(call.tag for turn in turns_before for call in turn.tool_calls if call.executed)
        _record_choice(group, fork, budget_left=num_left - len(allowed), refused_by=refused_by)
        if not refused_by:
            allowed.append(fork)
    return allowed


def chosen_forks(finished: Group, budget: int, cfg: BranchingConfig, rng: random.Random) -> list[Fork]:
    """Return the first `budget` forks of the selector's choice.

    Raises UserError if a selector of the user returns anything but forks at existing turns with finite scores.
    """
    # All trajectories may have ended in an infrastructure error. A user's max() over none of them would end the run.
    if not finished.trajectories:
        return []
    visible = finished
    if is_own(cfg.selector):
        # A user's selector must not see rewards: most groups have none yet, and of ranks that share an engine only the
        # first has any. NaN, not None or 0: a score computed from NaN is NaN, and is refused below. A comparison with
        # NaN is False, and is not noticed.
        visible = finished.for_custom_code(reward=math.nan, reward_parts={}, reward_reason="")
    option = f"branching.selector={cfg.selector}"
    returned = call_named("branching.selector", cfg.selector, EXPANSIONS, visible, budget, cfg, rng)
    num_turns = {t.trajectory_id: len(t.turns) for t in finished.trajectories}
    forks = []
    for fork in checked_instance(returned, f"{option}: the returned value", list)[:budget]:
        checked_instance(fork, f"{option}: an entry of the returned list", Fork)
        if fork.trajectory_id not in num_turns:
            ids = ", ".join(num_turns)
            raise UserError(f"{option}: there is no trajectory {shown(fork.trajectory_id)} to fork; there are {ids}")
        where = f"{option}: in the Fork of trajectory {fork.trajectory_id}"
        turn = checked_integer(fork.turn, f"{where}, the turn", 0, num_turns[fork.trajectory_id] - 1)
        score = None
        if fork.score is not None:
            is_nan = isinstance(fork.score, float) and math.isnan(fork.score)
            hint = " (what a selector does not see is NaN: logprobs of results, rewards)" if is_nan else ""
            score = checked_number(fork.score, f"{where} at turn {turn}, the score{hint}")
        forks.append(Fork(fork.trajectory_id, turn, score))
    return forks


def paths_of(group: GroupState, fork: Fork) -> tuple[Path, Path]:
    """Return the paths of the fork's parent, the trajectory that sampled the turn before, and of the new child.

    At turn 0 there is no parent: its path is (), and the child is the next root.
    """
    parent = _path_of_writer(group, fork.trajectory_id, fork.turn - 1) if fork.turn else ()
    num_siblings = sum(path[:-1] == parent for path in group.trajectories)
    return parent, (*parent, num_siblings)


def _path_of_writer(group: GroupState, trajectory_id: str, turn: int) -> Path:
    """Return the path of the trajectory that sampled this turn of `trajectory_id`: itself, or an ancestor."""
    path = tuple(map(int, trajectory_id.split(".")))  # "0.1" -> (0, 1)
    while group.trajectories[path].turns[turn].inherited:
        path = path[:-1]
    return path


def _record_choice(group: GroupState, fork: Fork, *, budget_left: int, refused_by: str) -> None:
    """Write the selector's choice into the chosen turn.

    If a turn is chosen again, the numbers of children add up. All other values are from the newest choice.
    """
    trajectory = group.trajectories[_path_of_writer(group, fork.trajectory_id, fork.turn)]
    turn = trajectory.turns[fork.turn]
    num_children_before = turn.decision.num_children if turn.decision else 0
    turn.decision = BranchDecision(
        entropy=turn.entropy,
        root_entropy=trajectory.turns[0].entropy,
        probability=None,
        draw=None,
        consecutive=0,
        budget_left=budget_left,
        num_children=num_children_before + (not refused_by),
        outcome="refused" if refused_by else "branched",
        score=fork.score,
        refused_by=refused_by,
    )
