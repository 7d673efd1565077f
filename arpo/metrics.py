"""The metrics of a rollout, and `Metrics`, which adds up named numbers over ranks.

Each rank counts its share of the groups. `Ranks.reduce_metrics` merges the shares. docs/metrics.md defines each name.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import TYPE_CHECKING

from arpo.branching_signal import turns_after_results
from arpo.config.returned import checked_names
from arpo.trajectory import Group, Prompt, StopReason, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

MAX_SOURCES = 16
"""At most this many data sources have an accuracy metric with their name; the others are merged."""


def rollout_metrics(
    groups: list[Group],
    sources: Mapping[str, str] | None = None,
    tool_counts: Mapping[str, int] | None = None,
    step: int = 0,
) -> Metrics:
    """Return rewards, lengths, entropies, branching and tool calls of all trajectories.

    sources: data source -> name of its accuracy metric (`source_names`); None = no such metrics.
    tool_counts: counters that this rank's tools kept themselves. step: the training step of these groups.
    """
    m = staleness(groups, step)
    m.sum("tools/all/calls", 0)  # so that a step without calls logs 0
    for group in groups:
        rewards = [t.reward for t in group.trajectories if t.is_judged]
        m.mean("group/mixed_share", float(len(set(rewards)) > 1))
        if rewards:
            m.mean("group/reward_std", pstdev(rewards))
        m.mean("group/effective_size", sum(not t.is_left_out for t in group.trajectories))
        m.mean("branching/branches_per_prompt", sum(t.parent_id is not None for t in group.trajectories))
        by_id = {t.trajectory_id: t for t in group.trajectories}
        for trajectory in group.trajectories:
            _add_trajectory(m, trajectory)
            if parent := by_id.get(trajectory.parent_id):
                m.mean("branching/same_as_parent", float(trajectory.token_ids == parent.token_ids))
            source = (sources or {}).get(group.prompt.data_source)
            if source and trajectory.is_judged and trajectory.accuracy is not None:
                m.mean(f"accuracy/{source}", trajectory.accuracy)
            _add_tool_calls(m, trajectory)
    counts = tool_counts or {}
    checked_names(counts, "take_counts of a tool", reserved={name.removeprefix("tools/") for name in m.values()})
    for name, count in counts.items():
        m.sum(f"tools/{name}", count)
    return m


def _add_trajectory(m: Metrics, t: Trajectory) -> None:
    """Add reward, lengths, stop reason, and the entropies and branch decisions of the turns."""
    if t.is_judged:
        m.mean("reward/mean", t.reward)
        m.std("reward/std", t.reward)
        if t.is_solved is None:  # a custom reward above 0 need not mean a correct answer
            m.mean("reward/positive_share", float(t.reward > 0))
        else:
            m.mean("reward/solved_share", float(t.is_solved))
            m.sum("response/solved", t.is_solved)
        for part, value in t.reward_parts.items():
            m.mean(f"reward/{part}", value)
        m.sum(f"reward_reason/{t.reward_reason or 'ok'}", 1)
    elif t.is_left_out and t.stop_reason != StopReason.ERROR:  # a user's function gave no reward
        m.sum(f"reward_reason/{t.reward_reason}", 1)
    m.mean("response/tokens", len(t.token_ids))
    if t.contexts:
        m.sum("response/new_contexts", len(t.contexts))
    m.mean("response/sampled_tokens", t.num_sampled_tokens)
    for reason in StopReason:
        m.mean(f"response/stop_{reason}", float(t.stop_reason == reason))
    # Inherited turns are counted with the parent.
    new_turns = [turn for turn in t.turns if not turn.inherited]
    for turn in new_turns:
        if turn.entropy is not None:
            m.mean("entropy/root" if turn is t.turns[0] else "entropy/after_tool", turn.entropy)
        if turn.decision:
            if turn.decision.probability is not None:  # None with a retrospective selector
                m.mean("branching/probability", turn.decision.probability)
            m.sum(f"branching/{turn.decision.outcome}", 1)
    m.sum("tokens/sampled", sum(turn.end - turn.start for turn in new_turns))


def _add_tool_calls(m: Metrics, t: Trajectory) -> None:
    """Add the tool calls. A call counts for the trajectory that made the call, not for branches of this trajectory."""
    new_calls = t.own_tool_calls
    m.mean("tools/calls_per_trajectory", len(t.tool_calls))
    m.sum("tools/inherited", len(t.tool_calls) - len(new_calls))
    if new_calls:
        # All calls, also those of wrong answers, divided by the number of correct answers.
        m.ratio("tools/all/calls_per_correct", "tools/all/calls", "response/solved")
    for call in new_calls:
        tool = f"tools/{call.tag}"
        names = ("tools/all", tool)
        if call.replayed:
            m.sum("tools/replayed", call.replayed)
            m.sum("tools/replay_mismatch", call.replay_mismatches)
        if not call.executed:
            for name in names:
                m.sum(f"{name}/not_run", 1)
            continue
        for name in names:
            m.sum(f"{name}/calls", 1)
            m.sum(f"{name}/cached", call.cached)
            m.sum(f"{name}/failed", not call.ok)
            if call.cost:
                m.sum(f"{name}/cost", call.cost)
        if call.cost:
            m.ratio("tools/all/cost_per_correct", "tools/all/cost", "response/solved")
        if not call.ok:
            m.sum(f"{tool}/failed_{call.error_kind or 'unnamed'}", 1)
        m.sum(f"{tool}/bytes_in", len(call.argument.encode("utf-8", "replace")))
        m.sum(f"{tool}/bytes_out", len(call.result.encode("utf-8", "replace")))
        m.percentiles(f"{tool}/seconds", call.seconds)


def tokens_by_step(t: Trajectory, start: int = 0) -> list[tuple[int, int]]:
    """Return (step, number of tokens sampled in this step) of the response from `start` on; [] without carry-over.

    Ten sampled tokens, the first six in step 3, the others in step 4: [(3, 6), (4, 4)].
    """
    ends = [*(first for first, _ in t.versions), len(t.token_ids)][1:]
    counts = []
    for (first, step), end in zip(t.versions, ends, strict=True):
        count = sum(t.loss_mask[max(first, start) : end])
        if count:
            counts.append((step, count))
    return counts


def staleness(groups: Sequence[Group], step: int) -> Metrics:
    """Return the metrics of the tokens' staleness: `step` minus the training step of the policy that sampled the token.

    Each token counts once, for the trajectory that sampled it. Empty without carry-over.
    """
    m = Metrics()
    for group in groups:
        for t in group.trajectories:
            for sampled_in, count in tokens_by_step(t, start=t.fork_at):
                m.mean("carry_over/staleness", step - sampled_in, count)
                m.max("carry_over/staleness_max", step - sampled_in)
                m.sum("carry_over/tokens", count * (sampled_in < step))
        sampling_steps = [sampled_in for t in group.trajectories for _, sampled_in in t.versions]
        if sampling_steps:
            m.sum("carry_over/groups", min(sampling_steps) < step)
    return m


def source_names(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Return data source -> last part of its metric's name, like "NQ (open)" -> "NQ_open_".

    The MAX_SOURCES most frequent sources have a name each, all others are "other". A name that is taken gets a number:
    "NQ [open]" -> "NQ_open_2". Empty if there is only one source: its accuracy is the accuracy of all.
    """
    counts = Counter(prompt.data_source for prompt in prompts)
    if len(counts) < 2:
        return {}
    most_frequent_first = sorted(counts, key=lambda source: (-counts[source], source))
    names = {source: "other" for source in most_frequent_first}
    taken = {"other"}
    for source in most_frequent_first[:MAX_SOURCES]:
        plain = re.sub(r"[^\w.-]+", "_", source) or "unnamed"
        numbered = (f"{plain.rstrip('_')}_{number}" for number in itertools.count(2))
        names[source] = next(name for name in itertools.chain([plain], numbered) if name not in taken)
        taken.add(names[source])
    return names


def distributions(groups: Sequence[Group]) -> dict[str, list[float]]:
    """Return the values of a step's histograms: reward, response length, and H - H_root of turns after a result."""
    trajectories = [t for group in groups for t in group.trajectories]
    return {
        "histogram/reward": [t.reward for t in trajectories if t.is_judged],
        "histogram/response_tokens": [float(len(t.token_ids)) for t in trajectories],
        "histogram/delta_entropy": [entropy - root for entropy, root, _ in turns_after_results(groups)],
    }


class Metrics:
    """Named numbers with a declared reduction. So a value means the same on 1 rank and on 64.

    A number may be a tensor with one element. A number on a GPU stays there, in float64, until `values` (or pickling)
    reads all numbers in one transfer. So adding to a metric never makes the host wait for the GPU.

    >>> m = Metrics(); m.mean("reward/mean", 1.0); m.mean("reward/mean", 0.0); m.sum("tools/calls", 3); m.values()
    {'reward/mean': 0.5, 'tools/calls': 3.0}
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, float | Tensor, float | Tensor]] = {}  # name -> (op, value, weight)
        self._samples: dict[str, list[float]] = {}
        self._ratios: dict[str, tuple[str, str]] = {}
        self._moments: dict[str, tuple[float, float, float]] = {}  # name -> (count, sum, sum of squares)

    def mean(self, name: str, value: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Add to a weighted mean; weight 0 adds nothing."""
        self._add(name, "mean", _exact(value) * _exact(weight), _exact(weight))

    def sum(self, name: str, value: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Add to a sum. If all weights are 0, the metric has no value."""
        self._add(name, "sum", _exact(value), _exact(weight))

    def max(self, name: str, value: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Update a maximum. If all weights are 0, the metric has no value."""
        self._add(name, "max", _exact(value), _exact(weight))

    def ratio(self, name: str, numerator: str, denominator: str) -> None:
        """Declare a ratio of two sums, computed at the end. If the denominator is 0, the metric has no value."""
        self._ratios[name] = (numerator, denominator)

    def percentiles(self, name: str, value: float) -> None:
        """Add to the values behind `name`_p50, _p95 and _max, which are exact."""
        self._samples.setdefault(name, []).append(float(value))

    def std(self, name: str, value: float) -> None:
        """Add to the values of a standard deviation (the population's, over all ranks)."""
        count, total, squares = self._moments.get(name, (0.0, 0.0, 0.0))
        self._moments[name] = (count + 1.0, total + value, squares + value * value)

    def _add(self, name: str, op: str, value: float | Tensor, weight: float | Tensor) -> None:
        nothing = (op, -math.inf if op == "max" else 0.0, 0.0)
        old_op, old_value, old_weight = self._entries.get(name, nothing)
        assert op == old_op, f"metric {name} is declared as {old_op} and as {op}"
        new_value = _larger(old_value, value) if op == "max" else old_value + value
        self._entries[name] = (op, new_value, old_weight + weight)

    def _read(self) -> None:
        """Turn the numbers on a GPU into floats, with a single transfer."""
        tensors = [x for _, *numbers in self._entries.values() for x in numbers if not isinstance(x, float)]
        if not tensors:
            return
        import torch  # here, so that a process without tensors need not load it

        on_host = iter(torch.stack(tensors).tolist())
        for name, (op, *numbers) in self._entries.items():
            self._entries[name] = (op, *(x if isinstance(x, float) else next(on_host) for x in numbers))

    def __getstate__(self) -> dict:
        self._read()
        return vars(self)

    def merge(self, other: Metrics, prefix: str = "") -> None:
        """Add the numbers of `other`, with `prefix` before each name."""
        for name, (op, value, weight) in other._entries.items():
            self._add(prefix + name, op, value, weight)
        for name, samples in other._samples.items():
            self._samples.setdefault(prefix + name, []).extend(samples)
        for name, moments in other._moments.items():
            old_moments = self._moments.get(prefix + name, (0.0, 0.0, 0.0))
            self._moments[prefix + name] = tuple(a + b for a, b in zip(old_moments, moments, strict=True))
        for name, (numerator, denominator) in other._ratios.items():
            self._ratios[prefix + name] = (prefix + numerator, prefix + denominator)

    def __getitem__(self, name: str) -> float:
        """Return the reduced value. Raises KeyError if the metric has none."""
        return self.values()[name]

    def values(self) -> dict[str, float]:
        """Return metric name -> reduced value, without the metrics that have no value."""
        self._read()
        values = {}
        for name, (op, value, weight) in self._entries.items():
            if weight > 0:
                values[name] = value / weight if op == "mean" else value
        for name, samples in self._samples.items():
            ordered = sorted(samples)
            for label, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0)):
                values[f"{name}_{label}"] = ordered[math.ceil(share * len(ordered)) - 1]
        for name, (count, total, squares) in self._moments.items():
            values[name] = math.sqrt(max(squares / count - (total / count) ** 2, 0.0))
        for name, (numerator, denominator) in self._ratios.items():
            if values.get(denominator):
                values[name] = values[numerator] / values[denominator]
        return values


def _exact(number: float | Tensor) -> float | Tensor:
    """Return a number as a float; if it is on a GPU, as a float64 tensor there."""
    if not hasattr(number, "detach"):
        return float(number)
    number = number.detach()
    return number.double().reshape(()) if number.is_cuda else float(number)


def _larger(a: float | Tensor, b: float | Tensor) -> float | Tensor:
    """Return the larger of two numbers; if one is a tensor, as a tensor."""
    if isinstance(a, float) and isinstance(b, float):
        return a if math.isnan(a) else max(b, a)  # in this order a NaN of b stays, too
    if isinstance(b, float):
        a, b = b, a
    return b.clamp(min=a)
