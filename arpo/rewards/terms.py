"""Named rewards: the reward of a trajectory is the weighted sum of its terms, each of which is logged under its name.

A built-in term is one function and one line in TERMS. It sees one evidence object, and says 0 to 1 (or -1 to 0) of a
trajectory. Other terms are functions of the user's (custom.py), which score all trajectories of a call together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from arpo.config.rewards import TrainingRewardConfig
from arpo.errors import UserError
from arpo.rewards.custom import TAKEN, CustomReward, Pairs, RewardResult, custom_results, load_custom
from arpo.trajectory import Prompt, Trajectory

BY_RULE = {"answer", "format", "accuracy", "tool_bonus"}
"""Terms that the built-in reward is made of. With one of them, all parts of that reward are logged."""


@dataclass(frozen=True)
class TermEvidence:
    """All that a built-in term may look at."""

    trajectory: Trajectory
    prompt: Prompt
    rule: RewardResult | None
    """The built-in reward; None without a term of BY_RULE."""
    max_response_tokens: int
    """Budget of one trajectory: sampled tokens and tool results together."""


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
    "accuracy": lambda evidence, cfg: evidence.rule.parts["accuracy"],  # whatever the format
    "tool_bonus": lambda evidence, cfg: evidence.rule.parts["tool_bonus"],
    "overlong": overlong,
}
"""Names in `reward.terms` -> value of a trajectory."""


@dataclass(frozen=True)
class Terms:
    """The terms of a run, with what they need besides a trajectory and its prompt."""

    cfg: TrainingRewardConfig
    max_response_tokens: int
    custom: dict[str, CustomReward]
    """Entry in `reward.terms` -> the function of the user's that it names."""


def load_terms(cfg: TrainingRewardConfig, max_response_tokens: int) -> Terms | None:
    """Return the terms, the files of their functions imported; None where `reward.terms` is empty. Raises UserError."""
    custom = {}
    for entry in cfg.weights:
        if entry not in TERMS:
            custom[entry] = load_custom("reward.terms", entry)
            name = label(entry)
            if name in TERMS.keys() | TAKEN or [label(other) for other in cfg.weights].count(name) > 1:
                another = f"would be logged as reward/{name}, which is another number's name"
                raise UserError(f"reward.terms: {entry} {another}; rename the function")
    return Terms(cfg, max_response_tokens, custom) if cfg.terms else None


def label(entry: str) -> str:
    """Return the name of a term in metrics and parts. "answer" -> "answer", "rewards/mine.py:style" -> "style" """
    return entry.rsplit(":", 1)[-1]


def sums_of_terms(
    terms: Terms, pairs: Pairs, by_rule: Callable[[Trajectory, Prompt], RewardResult]
) -> list[RewardResult]:
    """Return of each trajectory the weighted sum, and as parts each term's own value, and what it is made of.

    Where a function gives no value, there is no sum, and the reason is its own. Raises UserError where one fails.
    """
    own = {entry: custom_results(custom, pairs) for entry, custom in terms.custom.items()}
    weights, sums = terms.cfg.weights, []
    for number, (t, prompt) in enumerate(pairs):
        rule = by_rule(t, prompt) if weights.keys() & BY_RULE else None
        evidence = TermEvidence(t, prompt, rule, terms.max_response_tokens)
        parts = dict(rule.parts) if rule else {}  # what the values are made of
        reasons = [rule.reason] if rule else []
        values: dict[str, float | None] = {}
        for entry in weights:
            if entry in own:
                result = own[entry][number]
                values[entry] = result.total
                parts |= {f"{label(entry)}/{name}": value for name, value in result.parts.items()}
                parts |= {"accuracy": result.parts["accuracy"]} if "accuracy" in result.parts else {}
                reasons = [result.reason] if result.total is None else [*reasons, result.reason]
            else:
                values[entry] = TERMS[entry](evidence, terms.cfg)
        parts |= {label(entry): value for entry, value in values.items() if value is not None}
        total = None if None in values.values() else sum(weights[entry] * value for entry, value in values.items())
        sums.append(RewardResult(total, parts, next(filter(None, reasons), "")))
    return sums
