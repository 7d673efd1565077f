"""Measure what the entropy after a tool result predicts, from the trajectory dumps of finished runs.

    python benchmarks/ablation/siblings.py runs/demo_hard_ablation/{random,arpo,standardized}_seed*
    python benchmarks/ablation/siblings.py runs/llm_arpo

First table: the distributions of H_root (the first turn), of H after a successful and after a failed call, and of dH =
H - H_root. Then: is a branch at a high entropy worth more? A group learns from a branch only if its reward differs from
its parent's. So the script prints the correlation of H and of dH at the fork with "the rewards differ", with a 95 %
bootstrap interval over the groups. Last table, for each quarter of H: how often the parent fails, the two differ, and
both fail.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from arpo.config.exits import exit_with
from arpo.errors import UserError
from arpo.log.dumps import read_dump
from arpo.trajectory import Group, Prompt

PERCENTILES = (5, 25, 50, 75, 95)
NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Branch:
    """A branch and its parent."""

    group: int
    """Index of the group: branches of one group are not independent observations."""
    entropy: float
    """H (nats) of the parent's turn at the fork."""
    delta: float
    """`entropy` minus H of the parent's first turn."""
    parent_fails: bool
    fails: bool
    differs: bool
    """The rewards of branch and parent differ."""


def groups_of(dump: Path) -> Iterator[Group]:
    """Yield the groups of a dump. These runs draw a question at most once per step."""
    trajectories = (trajectory for _, trajectory, _ in read_dump(dump))
    for prompt_id, members in groupby(trajectories, key=lambda t: t.prompt_id):
        yield Group(Prompt(prompt_id, [], []), list(members))


def branches_of(groups: Sequence[Group]) -> list[Branch]:
    """Return all branches with a known entropy of the parent. Trajectories with infrastructure errors do not count."""
    branches = []
    for index, group in enumerate(groups):
        by_id = {t.trajectory_id: t for t in group.trajectories if t.is_judged}
        for child in by_id.values():
            parent = by_id.get(child.parent_id)
            turn = next((turn for turn in parent.turns if turn.start == child.fork_at), None) if parent else None
            if turn and turn.entropy is not None:
                branches.append(
                    Branch(
                        group=index,
                        entropy=turn.entropy,
                        delta=turn.entropy - parent.turns[0].entropy,
                        parent_fails=parent.reward <= 0,
                        fails=child.reward <= 0,
                        differs=child.reward != parent.reward,
                    )
                )
    return branches


def entropies_of(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Return name -> entropies (nats) of all turns. A turn counts once, for the trajectory that sampled it."""
    values: dict[str, list[float]] = {
        name: [] for name in ("H_root", "H after success", "H after error", "dH after success", "dH after error")
    }
    for t in (t for group in groups for t in group.trajectories if t.is_judged):
        root = t.turns[0].entropy
        if t.parent_id is None and root is not None:
            values["H_root"].append(root)
        for before, turn in zip(t.turns, t.turns[1:], strict=False):
            if not turn.inherited and turn.entropy is not None and before.tool_calls:
                outcome = "success" if all(call.ok for call in before.tool_calls) else "error"
                values[f"H after {outcome}"].append(turn.entropy)
                values[f"dH after {outcome}"].append(turn.entropy - root)
    return {name: np.array(found) for name, found in values.items()}


def correlation(branches: Sequence[Branch], signal: str) -> str:
    """Return the correlation of a signal ("entropy", "delta") with `differs`, with its interval over resampled
    groups."""
    x = np.array([getattr(branch, signal) for branch in branches])
    y = np.array([float(branch.differs) for branch in branches])
    if len(branches) < 3 or not x.std() or not y.std():
        return "not defined"
    _, numbers = np.unique([branch.group for branch in branches], return_inverse=True)
    # per group the sums n, x, y, xx, yy, xy, from which `pearson` computes a correlation
    sums = np.zeros((numbers.max() + 1, 6))
    np.add.at(sums, numbers, np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], axis=1))
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), NUM_RESAMPLES) @ sums
    low, high = np.nanpercentile(pearson(drawn), [2.5, 97.5])
    return f"{pearson(sums.sum(axis=0, keepdims=True))[0]:.3f} [{low:.3f}, {high:.3f}]"


def pearson(sums: np.ndarray) -> np.ndarray:
    """Return the correlations from rows of n, x, y, xx, yy, xy; nan without variance."""
    n, x, y, xx, yy, xy = sums.T
    with np.errstate(invalid="ignore", divide="ignore"):
        return (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))


def entropy_table(entropies: dict[str, np.ndarray]) -> str:
    lines = [f"| nats | turns | mean | {' | '.join(f'{p} %' for p in PERCENTILES)} |", "|---|" + "---|" * 7]
    for name, values in entropies.items():
        if len(values):
            numbers = [values.mean(), *np.percentile(values, PERCENTILES)]
            lines.append(f"| {name} | {len(values)} | {' | '.join(f'{number:.3f}' for number in numbers)} |")
    return "\n".join(lines)


def quarters(branches: Sequence[Branch]) -> list[list[Branch]]:
    """Sort the branches by H, and return four parts of about equal size."""
    ordered = sorted(branches, key=lambda branch: branch.entropy)
    return [ordered[len(ordered) * i // 4 : len(ordered) * (i + 1) // 4] for i in range(4)]


def quarter_table(branches: Sequence[Branch]) -> str:
    lines = ["| H, nats | parent fails | branch and parent differ | both fail |", "|---|---|---|---|"]
    for part in quarters(branches):
        flags = [(branch.parent_fails, branch.differs, branch.parent_fails and branch.fails) for branch in part]
        shares = " | ".join(f"{share:.3f}" for share in np.mean(flags, axis=0))
        lines.append(f"| {part[0].entropy:.3f} to {part[-1].entropy:.3f} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs that branched")
    args = parser.parse_args()
    dumps = [dump for run in args.runs for dump in sorted(run.glob("trajectories/step_*"))]
    groups = [group for dump in dumps for group in groups_of(dump)]
    if not groups:
        exit_with(UserError(f"{args.runs[0]}: no trajectories/step_* in it; name runs with run.dump_every above 0"))
    entropies = entropies_of(groups)
    branches = branches_of(groups)
    print(f"{len(dumps)} steps, {len(groups)} groups, {len(branches)} branches\n\n{entropy_table(entropies)}\n")
    for name, signal in {"H": "entropy", "dH": "delta"}.items():
        print(f"correlation of {name} with another reward: {correlation(branches, signal)}")
    if len(branches) >= 4:
        print(f"\n{quarter_table(branches)}")


if __name__ == "__main__":
    main()
