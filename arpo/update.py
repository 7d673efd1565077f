"""From scored groups to an optimizer step: mini-batches, what the models say of their tokens, advantages, the update.

The order matters: a KL in the reward and a critic's advantages need logprobs and values of the tokens first, so
mini-batches are cut before advantages exist, and each stage fills named fields of the micro-batches (batch.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig

from arpo.advantages import assign_advantages, gae_advantages, token_advantages
from arpo.batch import MicroBatch, microbatches, training_rows, training_trajectories
from arpo.errors import UserError
from arpo.losses import policy_loss, rollout_weights, statistics_of, token_kl, token_moments
from arpo.model import Policy
from arpo.model.attention import attention_backend
from arpo.model.context_parallel import spread
from arpo.model.optim import clip_grad_norm
from arpo.options import AdvantageConfig, LossConfig, ModelConfig, UpdateConfig
from arpo.ranks import Ranks
from arpo.trajectory import Group, Metrics, Trajectory
from arpo.tree import check_attention, tree_microbatches


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step sees: whole groups. Every rank knows all trajectories, and holds its part of the rows."""

    groups: list[Group]
    trajectories: list[tuple[int, Trajectory]]
    """By row id: (index in `groups`, trajectory)."""
    micros: list[MicroBatch]
    """This rank's part."""


def resolve_layout(cfg: UpdateConfig, models: list[ModelConfig], group_size: int, device: torch.device) -> UpdateConfig:
    """`cfg` with layout "auto" decided, by the config.json of all models that will read the micro-batches.

    Without branches a group still shares its prompt. Raises UserError where layout is "tree" and a model cannot do it.
    """
    if cfg.layout == "packed" or (cfg.layout == "auto" and group_size == 1):
        return replace(cfg, layout="packed")
    try:
        for model in models:
            config = AutoConfig.from_pretrained(model.path)
            config._attn_implementation = attention_backend(model, device)
            check_attention(config)
    except (UserError, OSError, ValueError) as error:  # OSError, ValueError: no config that transformers can read
        if cfg.layout == "tree" and isinstance(error, UserError):
            raise
        return replace(cfg, layout="packed")  # what is wrong with the config is the loader's to say
    return replace(cfg, layout="tree")


def make_minibatches(
    groups: list[Group], cfg: UpdateConfig, advantage: AdvantageConfig, dist: Ranks
) -> list[Minibatch]:
    """Cut a step's groups, in order, into mini-batches; one in which nothing is left to train is left out."""
    size = cfg.num_prompts_per_minibatch
    assert cfg.layout != "auto", "resolve_layout first"
    cut = tree_microbatches if cfg.layout == "tree" else microbatches
    return [
        Minibatch(
            some,
            training_trajectories(some, advantage),
            spread(
                cut(rows, dist.data_rank, dist.data_size, cfg.max_tokens_per_microbatch, device=dist.device), dist.group
            ),
        )
        for some in (groups[start : start + size] for start in range(0, len(groups), size))
        if (rows := training_rows(some, advantage))
    ]


def fill_ref_logprobs(reference: Policy, micros: list[MicroBatch], temperature: float) -> None:
    for micro in micros:
        with torch.no_grad():
            micro.ref_logprobs, _ = reference(micro, temperature)


def fill_old_logprobs(policy: Policy, micros: list[MicroBatch], cfg: LossConfig, temperature: float) -> Metrics:
    """Logprobs and entropies of the policy before the update, and how far vLLM's logprobs are from them."""
    metrics = Metrics()
    for micro in micros:
        with torch.no_grad():
            logprobs, entropies = policy(micro, temperature)
        metrics.merge(take_as_old(micro, logprobs, entropies, cfg))
    return metrics


def first_update_fills(cfg: LossConfig) -> bool:
    """Whether a rollout's first mini-batch can do without `fill_old_logprobs`: its update computes the same logprobs.

    Not where all tokens' are needed before any token's loss: for a KL in the reward and for AEPO's entropies.
    """
    return not (uses_entropy_statistics(cfg) or (cfg.kl_coefficient and cfg.kl_in == "reward"))


def take_as_old(micro: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor, cfg: LossConfig) -> Metrics:
    """Keep what the policy says before the update, (B, T) each, and with it the weights of the rollout correction."""
    metrics = Metrics()
    micro.old_logprobs, micro.old_entropies = logprobs.detach(), entropies.detach()
    if num_tokens := micro.num_loss_tokens:
        difference = (micro.old_logprobs - micro.rollout_logprobs)[micro.loss_mask]
        metrics.mean("mismatch/abs", float(difference.abs().mean()), num_tokens)
        metrics.mean("mismatch/kl", float((difference.exp() - 1 - difference).mean()), num_tokens)
    if cfg.rollout_correction != "none":
        micro.rollout_weights, weight_metrics = rollout_weights(
            micro.old_logprobs,
            micro.rollout_logprobs,
            micro.loss_mask,
            cfg.rollout_correction,
            low=cfg.correction_low,
            high=cfg.correction_high,
        )
        metrics.merge(weight_metrics, prefix="mismatch/")
    if cfg.old_logprobs == "rollout":
        micro.old_logprobs = micro.rollout_logprobs
    return metrics


def uses_entropy_statistics(cfg: LossConfig) -> bool:
    """Whether the loss of a token depends on the entropies of all others (AEPO)."""
    return cfg.entropy_balanced_advantage or cfg.balanced_clipping_tokens == "high_entropy"


def fill_advantages(
    groups: list[Group], minibatches: list[Minibatch], cfg: AdvantageConfig, loss: LossConfig, dist: Ranks
) -> Metrics:
    """Advantages of all tokens: of trajectories against their group (grpo), or of tokens against the critic (gae)."""
    metrics = Metrics()
    if loss.kl_coefficient and loss.kl_in == "reward":
        for minibatch in minibatches:
            metrics.merge(penalize(minibatch, loss, dist))
    if cfg.kind == "gae":
        for minibatch in minibatches:
            fill_gae(minibatch, cfg, loss, dist)
        return metrics
    assign_advantages(groups, cfg)
    for minibatch in minibatches:
        by_group = [token_advantages(group, cfg.tree) for group in minibatch.groups]
        by_row = [by_group[index][t.trajectory_id] for index, t in minibatch.trajectories]
        for micro in minibatch.micros:
            micro.advantages = micro.rows_to_tensor(by_row)
    return metrics


def penalize(minibatch: Minibatch, loss: LossConfig, dist: Ranks) -> Metrics:
    """Fill `trajectory.kl_penalty` on all ranks: coefficient * KL to the reference, summed over the loss tokens."""
    mine = {}
    for micro in minibatch.micros:
        sums = kl_penalties(micro, loss).sum(-1).tolist()  # (B,); an empty micro-batch has a row, but no row id
        mine |= {row_id: sums[b] for b, row_id in enumerate(micro.row_ids)}
    metrics = Metrics()
    for penalty in mine.values():  # each rank counts its own rows
        metrics.mean("reward/kl_penalty", penalty)
    for part in dist.all_gather_objects(mine):
        for row_id, penalty in part.items():
            minibatch.trajectories[row_id][1].kl_penalty = penalty
    return metrics


def kl_penalties(micro: MicroBatch, loss: LossConfig) -> torch.Tensor:
    """(B, T) coefficient * KL of each loss token before the update, 0 elsewhere."""
    kl = token_kl(micro.old_logprobs, micro.ref_logprobs, loss.kl_estimator)
    return loss.kl_coefficient * torch.where(micro.loss_mask, kl, 0.0)


def fill_gae(minibatch: Minibatch, cfg: AdvantageConfig, loss: LossConfig, dist: Ranks) -> None:
    """Advantages and returns from `old_values`; the reward comes with the last token that the policy wrote.

    The advantages (not the returns) are whitened over the loss tokens of the global mini-batch.
    """
    moments = torch.zeros(3, dtype=torch.float64)
    for micro in minibatch.micros:
        rewards = torch.zeros_like(micro.old_values)  # (B, T)
        for b, row_id in enumerate(micro.row_ids):
            rewards[b, micro.loss_mask[b].nonzero()[-1]] = minibatch.trajectories[row_id][1].reward
        if loss.kl_coefficient and loss.kl_in == "reward":
            rewards -= kl_penalties(micro, loss)
        micro.advantages, micro.returns = gae_advantages(
            rewards, micro.old_values, micro.loss_mask, gamma=cfg.gamma, lam=cfg.lam
        )
        moments += token_moments(micro.advantages, micro.loss_mask)
    mean, std = statistics_of(torch.tensor(dist.all_reduce_sum(*moments.tolist()), dtype=torch.float64))
    for micro in minibatch.micros:
        micro.advantages = (micro.advantages - mean) / (std + 1e-8) * micro.loss_mask


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micros: list[MicroBatch],
    cfg: LossConfig,
    temperature: float,
    max_grad_norm: float,
    dist: Ranks,
    *,
    is_first: bool,
) -> Metrics:
    """One optimizer step on a global mini-batch, of which `micros` are this rank's part."""
    metrics = Metrics()
    num_tokens, num_sequences = dist.all_reduce_sum(
        sum(micro.num_loss_tokens for micro in micros), sum(micro.num_sequences for micro in micros)
    )
    statistics = None
    if uses_entropy_statistics(cfg):
        # Of the current policy; before the first step that is the policy the old logprobs came from.
        statistics = entropy_statistics(policy, micros, temperature, dist, reuse_old=is_first)

    for micro in micros:
        logprobs, entropies = policy(micro, temperature)  # (B, T)
        if micro.old_logprobs is None:  # see `first_update_fills`
            metrics.merge(take_as_old(micro, logprobs, entropies, cfg))
        loss, loss_metrics = policy_loss(
            logprobs,
            micro.old_logprobs,
            micro.advantages,
            micro.loss_mask,
            kind=cfg.kind,
            entropy=entropies,
            clip_low=cfg.clip_low,
            clip_high=cfg.clip_high,
            dual_clip=cfg.dual_clip,
            entropy_balanced_clipping=cfg.entropy_balanced_clipping,
            balanced_clipping_tokens=cfg.balanced_clipping_tokens,
            entropy_balanced_advantage=cfg.entropy_balanced_advantage,
            entropy_advantage_weight=cfg.entropy_advantage_weight,
            entropy_statistics=statistics,
            entropy_coefficient=cfg.entropy_coefficient,
            ref_logprobs=micro.ref_logprobs if cfg.kl_in == "loss" else None,
            kl_coefficient=cfg.kl_coefficient,
            kl_estimator=cfg.kl_estimator,
            rollout_weights=micro.rollout_weights,
            aggregation=cfg.aggregation,
            denominators=num_tokens if cfg.aggregation == "token_mean" else num_sequences,
        )
        # The loss is this micro-batch's part of the global mean; FSDP2 averages gradients over ranks, so undo that.
        (loss * dist.world_size).backward()
        metrics.merge(loss_metrics, prefix="loss/")
        if micro.num_loss_tokens:
            num_computed = micro.input_ids.numel()
            metrics.sum("tokens/trained", num_computed)
            metrics.mean("train/tree_token_ratio", micro.num_row_tokens / num_computed, num_computed)

    metrics.mean("optim/grad_norm", clip_grad_norm(policy, max_grad_norm))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return metrics


def entropy_statistics(
    policy: Policy, micros: list[MicroBatch], temperature: float, dist: Ranks, *, reuse_old: bool
) -> tuple[float, float]:
    """(mean, std) of the policy's token entropies over all loss tokens of the global mini-batch (AEPO)."""
    moments = torch.zeros(3, dtype=torch.float64)
    for micro in micros:
        entropies = micro.old_entropies
        if not reuse_old:
            with torch.no_grad():
                _, entropies = policy(micro, temperature)
        moments += token_moments(entropies, micro.loss_mask)
    return statistics_of(torch.tensor(dist.all_reduce_sum(*moments.tolist()), dtype=torch.float64))
