"""Named rewards: the reward of a trajectory is the weighted sum of its terms, each of which is logged under its name.

A built-in term is one function and one line in TERMS. It sees one evidence object, and says 0 to 1 (or -1 to 0) of a
trajectory. Other terms are functions of the user's (custom.py), which score all trajectories of a call together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from arpo.config.rewards import TrainingRewardConfig
from arpo.errors import UserError
from arpo.rewards.custom import CustomReward, custom_scores, load_custom
from arpo.trajectory import Prompt, StopReason, Trajectory

Fallback = Literal["rule", "drop"]
"""What stands in for a verdict that is not there: the built-in accuracy, or nothing."""
BY_RULE = {"answer", "format", "accuracy", "tool_bonus"}
"""Terms that the built-in reward is made of. With one of them, all parts of that reward are logged."""
TAKEN = {"mean", "std", "solved_share", "positive_share", "kl_penalty", "judge_failed"}
"""Names of other metrics under reward/."""


@dataclass(frozen=True)
class RewardResult:
    """The reward of a response, and what it is made of."""

    total: float
    parts: dict[str, float]
    """format (1 or 0), accuracy (of the boxed answer, even if the format is wrong), tool_bonus."""
    reason: str = ""
    """Short stable name of the defect if the total is -1 ("missing_answer", "call_without_result", ...); else ""."""


@dataclass(frozen=True)
class TermEvidence:
    """All that a built-in term may look at."""

    trajectory: Trajectory
    prompt: Prompt
    by_rule: Callable[[Trajectory, Prompt], RewardResult]
    max_response_tokens: int
    """Budget of one trajectory: sampled tokens and tool results together."""
    judge_fallback: Fallback

    @cached_property
    def rule(self) -> RewardResult:
        """The built-in reward, which is computed when a term first looks at it."""
        return self.by_rule(self.trajectory, self.prompt)


def answer(evidence: TermEvidence, cfg: TrainingRewardConfig) -> float:
    """The built-in reward: -1 for a wrong format, else the accuracy and the bonus for tools."""
    return evidence.rule.total


def well_formed(evidence: TermEvidence, cfg: TrainingRewardConfig) -> float:
    """1 where the format is right, else 0."""
    return evidence.rule.parts["format"]


def accuracy(evidence: TermEvidence, cfg: TrainingRewardConfig) -> float:
    """Accuracy of the boxed answer, 0..1, whatever the format."""
    return evidence.rule.parts["accuracy"]


def tool_bonus(evidence: TermEvidence, cfg: TrainingRewardConfig) -> float:
    """0.1 for a right answer with the help of all of `reward.bonus_tools`, else 0."""
    return evidence.rule.parts["tool_bonus"]


def overlong(evidence: TermEvidence, cfg: TrainingRewardConfig) -> float:
    """DAPO's soft penalty (eq. 13): 0 up to L - B tokens, (L - B - n) / B beyond, -1 from L on.

    n tokens of the response, B = reward.overlong_buffer_tokens, L = rollout.max_response_tokens. With L = 100 and
    B = 20: n = 80 -> 0, n = 90 -> -0.5, n = 100 -> -1.
    """
    excess = len(evidence.trajectory.token_ids) - (evidence.max_response_tokens - cfg.overlong_buffer_tokens)
    return -min(max(excess / cfg.overlong_buffer_tokens, 0.0), 1.0)


def judge(evidence: TermEvidence, cfg: TrainingRewardConfig) -> float | None:
    """1 where the judge finds the answer right, else 0; without a verdict the accuracy by rule, or None."""
    t = evidence.trajectory
    if t.verdict is None and not t.verdict_reason:  # nobody was asked about what is not trained on
        assert t.stop_reason == StopReason.ERROR, t.trajectory_id
        return None
    return accuracy(evidence, cfg) if t.verdict is None and evidence.judge_fallback == "rule" else t.verdict


TERMS: dict[str, Callable[[TermEvidence, TrainingRewardConfig], float | None]] = {
    "answer": answer,
    "format": well_formed,
    "accuracy": accuracy,
    "tool_bonus": tool_bonus,
    "overlong": overlong,
    "judge": judge,
}
"""Names in `reward.terms` -> value of a trajectory; None = it has none, and the trajectory is not trained on."""


@dataclass(frozen=True)
class Terms:
    """The terms of a run, with what they need besides a trajectory and its prompt."""

    cfg: TrainingRewardConfig
    max_response_tokens: int
    custom: dict[str, CustomReward]
    """Entry in `reward.terms` -> the function of the user's that it names."""
    judge_fallback: Fallback


def load_terms(cfg: TrainingRewardConfig, max_response_tokens: int, judge_fallback: Fallback = "rule") -> Terms | None:
    """Return the terms, the files of their functions imported; None where `reward.terms` is empty. Raises UserError."""
    custom = {}
    for entry in cfg.weights:
        if entry not in TERMS:
            custom[entry] = load_custom("reward.terms", entry)
            name = label(entry)
            if name in TERMS.keys() | TAKEN or [label(other) for other in cfg.weights].count(name) > 1:
                another = f"would be logged as reward/{name}, which is another number's name"
                raise UserError(f"reward.terms: {entry} {another}; rename the function")
    return Terms(cfg, max_response_tokens, custom, judge_fallback) if cfg.terms else None


def label(entry: str) -> str:
    """Return the name of a term in metrics and parts. "answer" -> "answer", "rewards/mine.py:style" -> "style" """
    return entry.rsplit(":", 1)[-1]


def score_terms(
    terms: Terms,
    trajectories: list[Trajectory],
    prompts_by_id: Mapping[str, Prompt],
    by_rule: Callable[[Trajectory, Prompt], RewardResult],
) -> None:
    """Fill reward (the weighted sum), parts (each term's own value, and what it is made of) and reason.

    Where a term has no value, the reward stays None, and the reason says why. Raises UserError where a custom reward
    fails.
    """
    pairs = [(t, prompts_by_id[t.prompt_id]) for t in trajectories]
    own = {entry: custom_scores(custom, pairs) for entry, custom in terms.custom.items()}
    weights = terms.cfg.weights
    for number, (t, prompt) in enumerate(pairs):
        evidence = TermEvidence(t, prompt, by_rule, terms.max_response_tokens, terms.judge_fallback)
        parts: dict[str, float] = {}  # what the values are made of
        values: dict[str, float | None] = {}
        reasons: list[str] = []
        if weights.keys() & BY_RULE:
            parts |= evidence.rule.parts
            reasons.append(evidence.rule.reason)
        for entry in weights:
            if entry in own:
                values[entry], details, reason = own[entry][number]
                parts |= {f"{label(entry)}/{name}": value for name, value in details.items()}
                parts |= {"accuracy": details["accuracy"]} if "accuracy" in details else {}
                reasons.append(reason)
            else:
                values[entry] = TERMS[entry](evidence, terms.cfg)
        if t.verdict is not None or t.verdict_reason:
            parts["judge_failed"] = float(bool(t.verdict_reason))
            reasons.append(t.verdict_reason)
        t.reward_parts = parts | {label(entry): value for entry, value in values.items() if value is not None}
        if missing := [label(entry) for entry, value in values.items() if value is None]:
            t.reward, t.reward_reason = None, t.verdict_reason or f"no_{missing[0]}"
            continue
        t.reward = sum(weights[entry] * value for entry, value in values.items())
        t.reward_reason = next(filter(None, reasons), "")
