"""The numbers of a validation in training, from scored groups; evaluate.py reports from records (scores.py)."""

from __future__ import annotations

import numpy as np

from arpo.evals import bootstrap_interval, pass_at_k
from arpo.trajectory import Group, StopReason, Trajectory


def summarize(groups: list[Group], *, seed: int = 0) -> dict[str, float]:
    """Scores of one question file.

    `accuracy` is avg@n, the mean over questions and samples of the reward's accuracy part, with a 95 % bootstrap
    interval over questions; `pass@k` is unbiased, a sample being solved where its accuracy is 1 (an exact answer).
    """
    accuracies = [[accuracy(t) for t in group.trajectories] for group in groups]
    trajectories = [t for group in groups for t in group.trajectories]
    low, high = bootstrap_interval([float(np.mean(samples)) for samples in accuracies], seed=seed)
    num_samples = max(map(len, accuracies))
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < num_samples] + [num_samples]
    solved = [(len(samples), sum(a >= 1.0 for a in samples)) for samples in accuracies]
    return {
        "questions": len(groups),
        "samples": num_samples,
        "accuracy": float(np.mean([a for samples in accuracies for a in samples])),
        "accuracy_low": low,
        "accuracy_high": high,
        **{f"pass@{k}": float(np.mean([pass_at_k(n, c, k) for n, c in solved])) for k in ks},
        "well_formed": float(np.mean([t.reward is not None and t.reward >= 0 for t in trajectories])),
        "reward": float(np.mean([t.reward or 0.0 for t in trajectories])),
        "tool_calls": float(np.mean([len(t.tool_calls) for t in trajectories])),
        "failed_tool_calls": float(np.mean([sum(not c.ok for c in t.tool_calls) for t in trajectories])),
        "response_tokens": float(np.mean([len(t.token_ids) for t in trajectories])),
        "truncated": float(np.mean([t.stop_reason == StopReason.LENGTH for t in trajectories])),
    }


def accuracy(trajectory: Trajectory) -> float:
    """The reward's accuracy part; a custom reward without such a part is its own measure. Errors of ours count as 0."""
    return trajectory.reward_parts.get("accuracy", trajectory.reward or 0.0)
