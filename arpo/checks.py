"""Settings of train_rl.py and evaluate.py that contradict each other.

Imports no torch: a mistake shows before the model is loaded.
"""

from __future__ import annotations

from arpo.options import (
    AdvantageConfig,
    BranchingConfig,
    CriticConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    RolloutConfig,
    UpdateConfig,
)
from arpo.tools.options import SearchConfig

MAX_CHARS_PER_TOKEN = 8
"""Of text on web pages, with any tokenizer; 4 is usual."""


def check_sizes(data: DataConfig, rollout: RolloutConfig, branching: BranchingConfig, update: UpdateConfig) -> None:
    """Raises ValueError with the numbers and the fix where they do not fit each other."""
    if not data.train:
        raise ValueError("data.train is empty; pass a parquet or jsonl file of prompts")
    if not 1 <= branching.num_initial_rollouts <= rollout.group_size:
        raise ValueError(
            f"branching.num_initial_rollouts={branching.num_initial_rollouts} must lie between 1 and "
            f"rollout.group_size={rollout.group_size}; lower it or raise the group size"
        )
    if data.num_prompts_per_step % update.num_prompts_per_minibatch:
        raise ValueError(
            f"data.num_prompts_per_step={data.num_prompts_per_step} is not a multiple of "
            f"update.num_prompts_per_minibatch={update.num_prompts_per_minibatch}"
        )
    if not 1 <= rollout.answer_reserve_tokens < rollout.max_response_tokens:
        raise ValueError(
            f"rollout.answer_reserve_tokens={rollout.answer_reserve_tokens} must lie between 1 and "
            f"rollout.max_response_tokens={rollout.max_response_tokens}"
        )
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    if longest > update.max_tokens_per_microbatch:
        raise ValueError(
            f"update.max_tokens_per_microbatch={update.max_tokens_per_microbatch} cannot hold one trajectory of "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens; raise it"
        )
    if rollout.temperature <= 0:
        raise ValueError("rollout.temperature must be above 0 in training: greedy rollouts have nothing to learn from")


def check_result_room(search: SearchConfig, rollout: RolloutConfig) -> None:
    """Raises ValueError where the pages that a search reads cannot but be cut again, and so were read for nothing."""
    least_tokens = search.read_pages * search.page_chars // MAX_CHARS_PER_TOKEN
    if not search.summarizer_url and least_tokens > rollout.max_result_tokens:
        raise ValueError(
            f"tools.search.read_pages={search.read_pages} x page_chars={search.page_chars} are at least {least_tokens} "
            f"tokens, of which rollout.max_result_tokens={rollout.max_result_tokens} cuts off the end; raise it, or "
            "lower page_chars"
        )


def check_algorithm(
    branching: BranchingConfig, advantage: AdvantageConfig, critic: CriticConfig, loss: LossConfig
) -> None:
    """Raises ValueError with the reason and the fix where an option would be ignored, or work against another."""
    for wrong, reason in (
        *_of_the_branching(branching, advantage),
        *_of_the_advantages(advantage, critic),
        *_of_the_loss(loss),
    ):
        if wrong:
            raise ValueError(reason)


def check_parallel(model: ModelConfig, advantage: AdvantageConfig, loss: LossConfig) -> None:
    """Raises ValueError where an algorithm needs whole rows on a rank, but context parallelism gives it parts."""
    if model.context_parallel == 1:
        return
    for wrong, option in (
        (advantage.needs_critic, f"advantage.kind={advantage.kind}"),
        (loss.kind == "gspo", "loss.kind=gspo"),
        (loss.aggregation != "token_mean", f"loss.aggregation={loss.aggregation}"),
        (bool(loss.kl_coefficient) and loss.kl_in == "reward", "loss.kl_in=reward"),
    ):
        if wrong:
            raise ValueError(f"model.context_parallel={model.context_parallel} cannot go with {option}; set it to 1")


def _of_the_branching(branching: BranchingConfig, advantage: AdvantageConfig) -> list[tuple[bool, str]]:
    none = branching.selector == "none"
    return [
        (
            none and branching.dynamic_budget,
            "branching.dynamic_budget needs branching; set branching.selector or turn it off",
        ),
        (
            none and advantage.tree == "hard",
            "advantage.tree=hard needs branches that share tokens; set branching.selector or advantage.tree=soft",
        ),
    ]


def _of_the_advantages(advantage: AdvantageConfig, critic: CriticConfig) -> list[tuple[bool, str]]:
    if not advantage.needs_critic:
        default = CriticConfig()
        changed = [name for name, value in vars(critic).items() if value != getattr(default, name)]
        return [
            (
                bool(changed),
                f"critic.{'/'.join(changed)}: {advantage.kind} has no critic; set advantage.kind=gae or leave it out",
            ),
            (
                (advantage.gamma, advantage.lam) != (1.0, 1.0),
                f"advantage.gamma and lam belong to advantage.kind=gae; {advantage.kind} gives a trajectory one value",
            ),
        ]
    return [
        (
            advantage.tree == "hard",
            "advantage.tree=hard averages advantages of whole trajectories, but gae already gives each token its own; "
            "set advantage.tree=soft",
        ),
        (
            not advantage.normalize_std,
            "advantage.normalize_std=False (Dr.GRPO) is about groups, but gae compares with the critic; leave it out",
        ),
        (
            advantage.dead_groups == "drop",
            "advantage.dead_groups=drop would keep from the critic what it can learn from: under gae groups with equal "
            "rewards teach too; set it to keep",
        ),
        (not 0 <= advantage.gamma <= 1, f"advantage.gamma={advantage.gamma} must lie between 0 and 1"),
        (not 0 <= advantage.lam <= 1, f"advantage.lam={advantage.lam} must lie between 0 and 1"),
        (critic.clip_value <= 0, f"critic.clip_value={critic.clip_value} must be above 0, or no value can change"),
        (critic.warmup_steps < 0, f"critic.warmup_steps={critic.warmup_steps} must not be negative"),
    ]


def _of_the_loss(loss: LossConfig) -> list[tuple[bool, str]]:
    return [
        (
            loss.rollout_correction != "none" and loss.old_logprobs == "rollout",
            f"loss.rollout_correction={loss.rollout_correction} weighs by trainer / vLLM probability, which is 1 under "
            "loss.old_logprobs=rollout; set one of them back",
        ),
        (
            not loss.correction_low <= 1 <= loss.correction_high,
            f"loss.correction_low={loss.correction_low} and correction_high={loss.correction_high} must enclose 1",
        ),
        (
            loss.entropy_balanced_clipping and loss.kind not in ("ppo", "gspo"),
            f"loss.entropy_balanced_clipping keeps the gradient of clipped tokens, but {loss.kind} loses none; "
            "set loss.kind=ppo or turn it off",
        ),
        (
            loss.balanced_clipping_tokens != "all" and not loss.entropy_balanced_clipping,
            "loss.balanced_clipping_tokens needs loss.entropy_balanced_clipping; turn it on or leave it out",
        ),
        (loss.kl_coefficient < 0, f"loss.kl_coefficient={loss.kl_coefficient} would drive the policy away; use >= 0"),
        (
            loss.kl_coefficient == 0 and bool(loss.reference),
            f"loss.reference={loss.reference} is not loaded while loss.kl_coefficient is 0; set it or leave the "
            "reference out",
        ),
    ]
