"""The control that says what the entropies are worth: forks at the positions of another selector's, blind to H.

`--branching.selector extras/ablation/positions.py:positions`; the environment's FORK_POSITIONS names a JSON file of
turn -> how often a run forked there (`counted`).
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
    """Turns after a tool result, without replacement; the position of each as probable as in the file."""
    share = shares(os.environ["FORK_POSITIONS"])
    turns = [(t.trajectory_id, turn) for (t, turn), _ in sampled_turns(group) if share.get(turn)]
    number = Counter(turn for _, turn in turns)
    waits = {place: rng.expovariate(share[place[1]] / number[place[1]]) for place in turns}
    return [Fork(*place) for place in sorted(turns, key=waits.get)[:budget]]


@cache
def shares(path: str) -> dict[int, float]:
    counts = json.loads(Path(path).read_text())
    return {int(turn): count / sum(counts.values()) for turn, count in counts.items()}


def counted(folder: Path) -> dict[int, int]:
    """Turn -> number of forks there, from a run's dumps."""
    found: Counter[int] = Counter()
    for path in sorted(folder.glob("step_*.jsonl.gz")):
        for _, trajectory, _ in read_dump(path):
            for number, turn in enumerate(trajectory.turns):
                if turn.decision and not turn.inherited:
                    found[number] += turn.decision.num_children
    return dict(sorted(found.items()))
