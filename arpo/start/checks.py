"""Checks for contradictions between the sections of a config. Each check yields one message per contradiction.

A section itself checks its own fields, and config/facts.py checks single knobs. This module does not import torch, so a
mistake shows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from arpo.config.named import is_own, names_of
from arpo.config.rewards import TrainingRewardConfig
from arpo.config.sections import DataConfig, EngineConfig, ModelConfig, UpdateConfig
from arpo.config.tools import SearchConfig
from arpo.options import AdvantageConfig, BranchingConfig, LossConfig, RolloutConfig, is_retrospective


def check_sizes(
    data: DataConfig, rollout: RolloutConfig, branching: BranchingConfig, update: UpdateConfig
) -> Iterator[str]:
    """Yield a message for each pair of sizes that do not fit each other."""
    if not data.train:
        yield "data.train is empty; pass a parquet or jsonl file of prompts"
    has_roots = branching.selector != "none" and not branching.dynamic_budget
    if has_roots and not 1 <= branching.num_initial_rollouts <= rollout.group_size:
        yield (
            f"branching.num_initial_rollouts={branching.num_initial_rollouts} must lie between 1 and "
            f"rollout.group_size={rollout.group_size}; lower it or raise the group size"
        )
    per_minibatch = update.num_prompts_per_minibatch
    if per_minibatch <= 0 or data.num_prompts_per_step % per_minibatch:
        yield (
            f"data.num_prompts_per_step={data.num_prompts_per_step} is not a multiple of "
            f"update.num_prompts_per_minibatch={per_minibatch}"
        )
    if not 1 <= rollout.answer_reserve_tokens < rollout.max_response_tokens:
        yield (
            f"rollout.answer_reserve_tokens={rollout.answer_reserve_tokens} must lie between 1 and "
            f"rollout.max_response_tokens={rollout.max_response_tokens}"
        )
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    yield from check_context(rollout, longest, update.max_tokens_per_microbatch)
    if longest > update.max_tokens_per_microbatch:
        yield (
            f"update.max_tokens_per_microbatch={update.max_tokens_per_microbatch} cannot hold one trajectory of "
            f"data.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens; raise it"
        )
    if rollout.temperature <= 0:
        yield "rollout.temperature must be above 0 in training: greedy rollouts have nothing to learn from"


def check_context(rollout: RolloutConfig, longest: int, max_row: float = inf) -> Iterator[str]:
    """Yield a message for each impossible setting of rollout.context.

    `longest`: most tokens of one context, with its prompt. `max_row`: most tokens of a row in training.
    """
    if rollout.context == "append":
        return
    if not longest < rollout.max_trajectory_tokens <= max_row:
        yield (
            f"rollout.max_trajectory_tokens={rollout.max_trajectory_tokens} must be more than the {longest} of one "
            "context (the longest prompt + rollout.max_response_tokens)"
            + (f", and at most update.max_tokens_per_microbatch={max_row}" if max_row < inf else "")
        )
    if rollout.context != "strip_thoughts":
        reserve = rollout.answer_reserve_tokens
        if rollout.note_tokens >= reserve:
            yield f"rollout.answer_reserve_tokens={reserve} has no room for rollout.note_tokens={rollout.note_tokens}"
        if rollout.context_tokens >= rollout.max_response_tokens - reserve:
            yield (
                f"rollout.context_tokens={rollout.context_tokens} is never exceeded: results end at rollout."
                f"max_response_tokens - answer_reserve_tokens = {rollout.max_response_tokens - reserve}; lower it"
            )


def check_result_room(search: SearchConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Yield a message if the pages in a search result are always longer than a result may be."""
    least_tokens = search.read_pages * search.page_chars // 8  # web text has about 4 characters per token, 8 at most
    if not search.summarizer_url and least_tokens > rollout.max_result_tokens:
        yield (
            f"tools.search.read_pages={search.read_pages} x page_chars={search.page_chars} are at least {least_tokens} "
            f"tokens, of which rollout.max_result_tokens={rollout.max_result_tokens} cuts off the end; raise it, or "
            "lower page_chars"
        )


def check_loss(loss: LossConfig, advantage: AdvantageConfig) -> Iterator[str]:
    """Yield a message if a part of the loss has no gradient under these settings, or if the KL comes too late."""
    if loss.dual_clip is not None and loss.dual_clip <= 1:
        yield (
            f"loss.dual_clip={loss.dual_clip} must be above 1, or no token with a negative advantage has a gradient at "
            "ratio 1; None = no bound"
        )
    if loss.has_kl_in_loss and loss.kl_estimator == "k1":
        yield (
            "loss.kl_estimator=k1 does nothing in the loss, where its gradient averages to 0; take k2 or k3, or set "
            "loss.kl_in=reward"
        )
    if advantage.dead_groups == "resample" and loss.has_kl_in_reward:
        yield (
            "advantage.dead_groups=resample needs the rewards during the rollout, but loss.kl_in=reward takes the KL "
            "off them after it; set loss.kl_in=loss"
        )


def check_sampling_policy(
    engine: EngineConfig, loss: LossConfig, rollout: RolloutConfig, advantage: AdvantageConfig
) -> Iterator[str]:
    """Yield a message if an older or quantised policy samples tokens and the loss does not correct for this."""
    if rollout.carry_over > 0:  # a group has tokens of several policies
        why = f"rollout.carry_over={rollout.carry_over} cannot go with"
        if loss.rollout_correction == "none":
            yield f"{why} loss.rollout_correction=none; set it to tis or mis"
        if advantage.dead_groups == "resample":
            yield f"{why} advantage.dead_groups=resample; set it to drop or keep"
        if engine.tensor_parallel > 1:
            yield f"{why} engine.tensor_parallel={engine.tensor_parallel}; set it to 1"
    if engine.quantization != "none" and loss.rollout_correction == "none":
        yield (
            f"engine.quantization={engine.quantization} samples from another policy than the one that is trained; set "
            "loss.rollout_correction=tis (or mis), or engine.quantization=none"
        )


def check_parallel(model: ModelConfig, advantage: AdvantageConfig, loss: LossConfig) -> Iterator[str]:
    """Yield a message for each option that needs whole rows on a rank, if context parallelism splits the rows."""
    if model.context_parallel == 1:
        return
    need_whole_rows = names_of("losses", "NEED_WHOLE_ROWS") + names_of("rollout_correction", "NEED_WHOLE_ROWS")

    def combines(value: str) -> bool:
        """True if the function combines tokens of a row. A user's function may do so, and counts as True."""
        return is_own(value) or value in need_whole_rows

    for wrong, option in (
        (advantage.needs_critic, f"advantage.kind={advantage.kind}"),
        (combines(loss.kind), f"loss.kind={loss.kind}"),
        (combines(loss.aggregation), f"loss.aggregation={loss.aggregation}"),
        (combines(loss.rollout_correction), f"loss.rollout_correction={loss.rollout_correction}"),
        (loss.has_kl_in_reward, "loss.kl_in=reward"),
    ):
        if wrong:
            yield f"model.context_parallel={model.context_parallel} cannot go with {option}; set it to 1"


def check_terms(reward: TrainingRewardConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Yield a message for each term of the reward without a possible value."""
    if "overlong" in reward.weights and rollout.context != "append":
        yield f"reward term overlong counts the tokens of one context; drop it, or rollout.context={rollout.context}"
    if "overlong" in reward.weights and reward.overlong_buffer_tokens >= rollout.max_response_tokens:
        yield (
            f"reward.overlong_buffer_tokens={reward.overlong_buffer_tokens} must be below "
            f"rollout.max_response_tokens={rollout.max_response_tokens}"
        )


def warnings_of(
    rollout: RolloutConfig, branching: BranchingConfig, advantage: AdvantageConfig, loss: LossConfig
) -> Iterator[str]:
    """Yield a warning for a group of one, for a first turn without contrast, and for an incomplete AEPO."""
    if rollout.group_size == 1 and not advantage.needs_critic:
        yield "warning: rollout.group_size=1: a trajectory's advantage is its whole reward (REINFORCE, no baseline)"
    # The advantages of a group add up to 0, and so does the gradient of what all its trajectories share. The other
    # selectors fork at the first turn too.
    has_one_root = branching.selector == "top_h" and branching.num_initial_rollouts == 1 < rollout.group_size
    if has_one_root and not advantage.needs_critic:
        yield (
            "warning: branching.num_initial_rollouts=1: all trajectories of a prompt share the first turn, so their "
            "rewards teach it almost nothing; set 2 if the first turn decides"
        )
    parts = {
        "branching.dynamic_budget": branching.dynamic_budget,
        "loss.entropy_balanced_clipping": loss.entropy_balanced_clipping,
        "loss.entropy_balanced_advantage": loss.entropy_balanced_advantage,
    }
    missing = [name for name, is_on in parts.items() if not is_on]
    if branching.selector == "aepo" and missing:
        yield f"warning: branching.selector=aepo without {', '.join(missing)}; all of AEPO is in configs/aepo.yaml"


def forecast(rollout: RolloutConfig, cfg: BranchingConfig) -> str:
    """Return a line for the log: the numbers of roots, forks and decisions of a prompt."""
    size = rollout.group_size
    calls = rollout.max_tool_calls
    if cfg.selector == "none":
        return f"branching: none, {size} roots a prompt"
    roots = 1 if cfg.dynamic_budget else min(cfg.num_initial_rollouts, size)
    begins = f"{roots} root" + "s" * (roots > 1)
    if is_retrospective(cfg.selector):
        until = " until its rewards differ" if cfg.until_mixed else ""
        afterwards = f"{cfg.selector} in {cfg.expansion_rounds} rounds{until}"
        at_most = "at most " if cfg.until_mixed else ""
        return f"branching: {begins}, {at_most}{size - roots} forks a prompt by {afterwards}, after up to {calls} calls"
    most_roots = size if cfg.dynamic_budget else roots
    most_decisions = most_roots * calls + (size - most_roots) * max(calls - 1, 0)
    return (
        f"branching: at least {begins}, at most {size - roots} forks a prompt in at most "
        f"{most_decisions} decisions by {cfg.selector}, after up to {calls} calls; the rest are fresh roots"
    )
