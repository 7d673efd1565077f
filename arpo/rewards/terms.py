"""Named rewards: the reward of a trajectory is a weighted sum of terms. Each term is logged under its name.

A built-in term is a function with a line in TERMS. The function gets an evidence object, and returns a number. All
other terms are custom functions (custom.py), which score all trajectories of a call together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arpo.config.rewards import TrainingRewardConfig
from arpo.errors import UserError
from arpo.rewards.custom import RESERVED_NAMES, CustomReward, Pairs, RewardResult, custom_results, load_custom
from arpo.trajectory import Prompt, Trajectory

BY_RULE = {"answer", "format", "accuracy", "tool_bonus"}
"""Terms from the built-in reward. If any is chosen, all parts of the built-in reward are logged."""


@dataclass(frozen=True)
class TermEvidence:
    """The input of a built-in term."""

    trajectory: Trajectory
    prompt: Prompt
    rule: RewardResult | None
    """The built-in reward; None if no term is in BY_RULE."""
    max_response_tokens: int
    """Token budget of one trajectory: sampled tokens and tool results together."""


def overlong(evidence: TermEvidence, cfg: TrainingRewardConfig) -> float:
    """DAPO's soft penalty (eq. 13): 0 up to L - B tokens, (L - B - n) / B beyond, -1 from L on.

    n tokens of the response, B = reward.overlong_buffer_tokens, L = rollout.max_response_tokens. With L = 100 and
    B = 20: n = 80 -> 0, n = 90 -> -0.5, n = 100 -> -1.
    """
    excess = len(evidence.trajectory.token_ids) - (evidence.max_response_tokens - cfg.overlong_buffer_tokens)
    return -min(max(excess / cfg.overlong_buffer_tokens, 0.0), 1.0)


TERMS: dict[str, Callable[[TermEvidence, TrainingRewardConfig], float]] = {
    "answer": lambda evidence, cfg: evidence.rule.total,
    "format": lambda evidence, cfg: evidence.rule.parts["format"],
    "accuracy": lambda evidence, cfg: evidence.rule.parts["accuracy"],  # even with a wrong format
    "tool_bonus": lambda evidence, cfg: evidence.rule.parts["tool_bonus"],
    "overlong": overlong,
}
"""Name in `reward.terms` -> function for a term's value."""


@dataclass(frozen=True)
class Terms:
    """The terms of a run."""

    cfg: TrainingRewardConfig
    max_response_tokens: int
    custom: dict[str, CustomReward]
    """Name in `reward.terms` -> custom function."""


def load_terms(cfg: TrainingRewardConfig, max_response_tokens: int) -> Terms | None:
    """Import the custom functions and return the terms; None if `reward.terms` is empty. Raises UserError."""
    custom = {}
    labels = [label(name) for name in cfg.weights]
    for name in cfg.weights:
        if name in TERMS:
            continue
        custom[name] = load_custom("reward.terms", name)
        if label(name) in TERMS.keys() | RESERVED_NAMES or labels.count(label(name)) > 1:
            problem = f"would be logged as reward/{label(name)}, which is another number's name"
            raise UserError(f"reward.terms: {name} {problem}; rename the function")
    return Terms(cfg, max_response_tokens, custom) if cfg.terms else None


def label(name: str) -> str:
    """Return a term's label in metrics and parts. "answer" -> "answer", "rewards/mine.py:style" -> "style" """
    return name.rsplit(":", 1)[-1]


def sums_of_terms(
    terms: Terms, pairs: Pairs, by_rule: Callable[[Trajectory, Prompt], RewardResult]
) -> list[RewardResult]:
    """Return the weighted sum for each trajectory. Its parts are each term's value, and the parts of this value.

    If a custom function returns no value, there is no sum, and the reason is this function's. Raises UserError if a
    function fails.
    """
    results_of_custom = {name: custom_results(custom, pairs) for name, custom in terms.custom.items()}
    weights = terms.cfg.weights
    sums = []
    for index, (t, prompt) in enumerate(pairs):
        rule = by_rule(t, prompt) if weights.keys() & BY_RULE else None
        evidence = TermEvidence(t, prompt, rule, terms.max_response_tokens)
        parts = dict(rule.parts) if rule else {}
        reasons = [rule.reason] if rule else []
        values: dict[str, float | None] = {}
        for name in weights:
            if name in TERMS:
                values[name] = TERMS[name](evidence, terms.cfg)
                continue
            result = results_of_custom[name][index]
            values[name] = result.total
            parts |= {f"{label(name)}/{part}": value for part, value in result.parts.items()}
            if "accuracy" in result.parts:
                parts["accuracy"] = result.parts["accuracy"]
            # A missing value decides the outcome, so its reason replaces the reasons before it.
            reasons = [result.reason] if result.total is None else [*reasons, result.reason]
        parts |= {label(name): value for name, value in values.items() if value is not None}
        total = None if None in values.values() else sum(weights[name] * value for name, value in values.items())
        sums.append(RewardResult(total, parts, next(filter(None, reasons), "")))
    return sums
