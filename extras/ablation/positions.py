"""Two controls. `positions` shows the value of the entropies: it forks at the positions of another selector, without
reading H. `roots` shows the value of forks: it begins each new trajectory at the prompt.

`--branching.selector extras/ablation/positions.py:positions`. For it the environment variable FORK_POSITIONS names a
JSON file: turn -> number of forks of a run at this turn (written by `counted`).
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from functools import cache
from pathlib import Path

from arpo.log.dumps import read_dump
from arpo.options import BranchingConfig
from arpo.retrospective import Fork, sampled_turns
from arpo.trajectory import Group


def positions(group: Group, budget: int, cfg: BranchingConfig, rng: random.Random) -> list[Fork]:
    """Draw turns after a tool result without replacement. Each position is as probable as in the file."""
    share = shares(os.environ["FORK_POSITIONS"])
    turns = [(t.trajectory_id, turn) for t, turn, _ in sampled_turns(group) if share.get(turn)]
    num_candidates = Counter(turn for _, turn in turns)
    # the smallest of exponential waiting times: a weighted draw without replacement
    waits = {(name, turn): rng.expovariate(share[turn] / num_candidates[turn]) for name, turn in turns}
    return [Fork(name, turn) for name, turn in sorted(turns, key=waits.get)[:budget]]


def roots(group: Group, budget: int, cfg: BranchingConfig, rng: random.Random) -> list[Fork]:
    """Return new roots."""
    return [Fork(group.trajectories[0].trajectory_id, 0)] * budget if group.trajectories else []


@cache
def shares(path: str) -> dict[int, float]:
    counts = json.loads(Path(path).read_text())
    return {int(turn): count / sum(counts.values()) for turn, count in counts.items()}


def counted(folder: Path) -> dict[int, int]:
    """Return turn -> number of forks there, from a run's dumps."""
    num_forks: Counter[int] = Counter()
    for path in sorted(folder.glob("step_*.jsonl.gz")):
        for _, trajectory, _ in read_dump(path):
            for index, turn in enumerate(trajectory.turns):
                if turn.decision and not turn.inherited:
                    num_forks[index] += turn.decision.num_children
    return dict(sorted(num_forks.items()))
