"""Is a branch at a high entropy worth more? From the trajectory dumps of finished runs:

    python benchmarks/ablation/siblings.py runs/demo_hard_ablation/{random,arpo,standardized}_seed*

For each quarter of the entropies H at which branches left their parents: how often the parent fails, how often the
branch's reward is another than its parent's (which is what a group can learn from), and how often both fail.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import json

from arpo.branching_signal import branch_points
from arpo.dumps import open_dump
from arpo.trajectory import Group, Prompt, Trajectory
from arpo.viewer.viewer import parse_trajectory


def groups_of(dump: Path) -> Iterator[Group]:
    """Yield the groups of a dump; a question is drawn once in a step of these runs."""
    with open_dump(dump) as file:
        rows = [json.loads(line) for line in file]
    for prompt_id, members in groupby(rows, key=lambda row: row["prompt_id"]):
        fields = Trajectory.__dataclass_fields__
        trajectories = [parse_trajectory({k: v for k, v in row.items() if k in fields}) for row in members]
        yield Group(Prompt(prompt_id, [], []), trajectories)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs that branched")
    runs = parser.parse_args().runs
    groups = [group for run in runs for dump in sorted(run.glob("trajectories/step_*")) for group in groups_of(dump)]
    parents = {(id(group), t.trajectory_id): t for group in groups for t in group.trajectories}
    points = []
    for group in groups:
        branches = [t for t in group.trajectories if t.parent_id is not None]
        for (entropy, differs), branch in zip(branch_points([group]), branches, strict=True):
            parent_fails = parents[id(group), branch.parent_id].reward <= 0
            points.append((entropy, differs, parent_fails, parent_fails and branch.reward <= 0))
    points.sort()
    entropies, differ, _, _ = zip(*points, strict=True)
    print(
        f"{len(points)} branches; correlation of H with another reward {statistics.correlation(entropies, differ):.3f}"
    )
    print("| H, nats | parent fails | branch and parent differ | both fail |\n|---|---|---|---|")
    for quarter in range(4):
        part = points[len(points) * quarter // 4 : len(points) * (quarter + 1) // 4]
        shares = " | ".join(f"{statistics.fmean(float(row[i]) for row in part):.3f}" for i in (2, 1, 3))
        print(f"| {part[0][0]:.3f} to {part[-1][0]:.3f} | {shares} |")


if __name__ == "__main__":
    main()
