"""Contradictions between the reward's terms, the judge, and what looks at rewards early. See checks.py."""

from __future__ import annotations

from arpo.config.evals import TrainingJudgeConfig
from arpo.errors import require
from arpo.named import names_of
from arpo.options import AdvantageConfig, BranchingConfig, LossConfig, RolloutConfig, TrainingRewardConfig


def check_rewards_in_time(branching: BranchingConfig, advantage: AdvantageConfig, loss: LossConfig) -> None:
    """Raise ValueError where something looks at rewards before the KL has been taken off them."""
    for needs_rewards, option in (
        (branching.selector in names_of("retrospective", "NEED_REWARDS"), f"branching.selector={branching.selector}"),
        (advantage.dead_groups == "resample", "advantage.dead_groups=resample"),
    ):
        require(
            not (needs_rewards and loss.kl_coefficient and loss.kl_in == "reward"),
            f"{option} needs the rewards during the rollout, but loss.kl_in=reward takes the KL off them after it; "
            "set loss.kl_in=loss",
        )


def check_terms(
    reward: TrainingRewardConfig, judge: TrainingJudgeConfig, rollout: RolloutConfig, branching: BranchingConfig
) -> None:
    """Raise ValueError where a term of the reward cannot have a value, or has it too late."""
    require(
        reward.overlong_buffer_tokens < rollout.max_response_tokens,
        f"reward.overlong_buffer_tokens={reward.overlong_buffer_tokens} must be below "
        f"rollout.max_response_tokens={rollout.max_response_tokens}",
    )
    if "judge" not in reward.weights:
        return
    require(judge.deadline_s > 0, f"judge.deadline_s={judge.deadline_s} must be above 0")
    require(
        branching.selector not in names_of("retrospective", "NEED_REWARDS"),
        f"branching.selector={branching.selector} needs rewards while the groups still grow, and would wait for the "
        "judge each time; choose another selector, or drop judge from reward.terms",
    )


def check_queue(
    rollout: RolloutConfig, advantage: AdvantageConfig, reward: TrainingRewardConfig, judge: TrainingJudgeConfig
) -> None:
    """Raise ValueError where a judge would make it matter which rank has pulled which prompt."""
    if rollout.dispatch != "pull" or "judge" not in reward.weights:
        return
    require(
        advantage.dead_groups != "resample",
        "advantage.dead_groups=resample with rollout.dispatch=pull needs rewards during the rollout, and would wait "
        "for the judge each time; set rollout.dispatch=fixed, or drop judge from reward.terms",
    )
    for option, limit in {"max_calls_per_step": judge.max_calls_per_step, "max_calls": judge.max_calls}.items():
        require(
            not limit,
            f"judge.{option}={limit} is shared out evenly to the ranks, which with rollout.dispatch=pull do not have "
            "equal shares of the prompts; set it to 0, or rollout.dispatch=fixed",
        )
