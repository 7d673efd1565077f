"""From scored groups to an optimizer step: mini-batches, logprobs before the update, advantages, the update.

Mini-batches are made before advantages exist, because a KL in the reward and a critic's advantages need the tokens'
logprobs and values first. Each stage fills named fields of the micro-batches (batch.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from arpo.advantages import CRITIC_ESTIMATORS, CriticEvidence, assign_advantages, token_advantages
from arpo.batch import MicroBatch, microbatches, row_of
from arpo.config.named import is_own
from arpo.config.sections import UpdateConfig
from arpo.kl import token_kl
from arpo.log.nonfinite import NonFinite
from arpo.losses import LossInputs, loss_denominator, mean_and_std, policy_loss, token_moments
from arpo.metrics import Metrics
from arpo.model import Policy
from arpo.model.context_parallel import local_shares
from arpo.model.optim import clip_grad_norm
from arpo.model.policy import accumulating
from arpo.options import AdvantageConfig, LossConfig
from arpo.ranks import Ranks
from arpo.rollout_correction import rollout_weights
from arpo.sampling.gradient_noise import SketchedMinibatch
from arpo.selection import training_trajectories
from arpo.trajectory import Group, Trajectory
from arpo.tree import tree_microbatches


@dataclass(frozen=True)
class Minibatch:
    """The groups of an optimizer step. Every rank has all trajectories, but only its own micro-batches."""

    groups: list[Group]
    trajectories: list[tuple[int, Trajectory]]
    """(index in `groups`, trajectory) of each row. The index in this list is the row's id."""
    micros: list[MicroBatch]
    """This rank's micro-batches."""


def make_minibatches(
    groups: list[Group], cfg: UpdateConfig, advantage_cfg: AdvantageConfig, ranks: Ranks
) -> list[Minibatch]:
    """Cut a step's groups, in order, into mini-batches. Leave out a mini-batch without anything to train on."""
    assert cfg.layout != "auto", "resolve_layout first"
    to_micros = tree_microbatches if cfg.layout == "tree" else microbatches
    minibatches = []
    for start in range(0, len(groups), cfg.num_prompts_per_minibatch):
        chosen = groups[start : start + cfg.num_prompts_per_minibatch]
        trajectories = training_trajectories(chosen, advantage_cfg)
        if not trajectories:
            continue
        rows = [row_of(chosen[index], t) for index, t in trajectories]
        micros = to_micros(rows, ranks.data_rank, ranks.data_size, cfg.max_tokens_per_microbatch)
        # with model.context_parallel, the ranks of a group cut each micro-batch among them
        micros = [micro.to(ranks.device) for micro in local_shares(micros, ranks.group)]
        minibatches.append(Minibatch(chosen, trajectories, micros))
    return minibatches


# ------------------------------------------------------------------------------------------ logprobs before the update


def fill_ref_logprobs(reference: Policy, micros: list[MicroBatch], temperature: float) -> None:
    """Fill each token's log-probability under the reference policy."""
    for micro in micros:
        with torch.no_grad():
            micro.ref_logprobs, _ = reference(micro, temperature)


def fill_old_logprobs(policy: Policy, micros: list[MicroBatch], cfg: LossConfig, temperature: float) -> Metrics:
    """Fill the policy's logprobs and entropies before the update. Return metrics of the distance to vLLM's logprobs."""
    metrics = Metrics()
    for micro in micros:
        with torch.no_grad():
            logprobs, entropies = policy(micro, temperature)
        metrics.merge(use_as_old_logprobs(micro, logprobs, entropies, cfg))
    return metrics


def first_update_computes_old_logprobs(cfg: LossConfig) -> bool:
    """Return True if a rollout's first mini-batch needs no `fill_old_logprobs`.

    Its update starts from the old policy, and so computes the same logprobs. But a KL in the reward and AEPO need the
    logprobs or entropies of all tokens before the loss of any token.
    """
    return not (cfg.entropy_balanced_advantage or cfg.has_kl_in_reward)


def use_as_old_logprobs(micro: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor, cfg: LossConfig) -> Metrics:
    """Store a forward pass's logprobs and entropies, (B, T) each, as the micro-batch's old ones.

    Also fill the weights of the rollout correction. Return metrics of the distance to vLLM's logprobs. With
    loss.old_logprobs=rollout, vLLM's logprobs are stored as old_logprobs instead.
    """
    metrics = Metrics()
    micro.old_logprobs = logprobs.detach()
    micro.old_entropies = entropies.detach()
    num_tokens = micro.num_loss_tokens
    if num_tokens:  # not an empty micro-batch
        difference = micro.at_loss_tokens(micro.old_logprobs - micro.rollout_logprobs)
        metrics.mean("mismatch/abs", difference.abs().mean(), num_tokens)
        # k3 estimates KL(vLLM || trainer), since the tokens were sampled by vLLM.
        metrics.mean("mismatch/kl", (torch.expm1(difference) - difference).mean(), num_tokens)
    if cfg.rollout_correction != "none":
        micro.rollout_weights, weight_metrics = rollout_weights(
            micro.old_logprobs, micro.rollout_logprobs, micro.loss_mask, cfg
        )
        metrics.merge(weight_metrics, prefix="mismatch/")
    # Last: mismatch and correction compare the trainer's logprobs with vLLM's.
    if cfg.old_logprobs == "rollout":
        micro.old_logprobs = micro.rollout_logprobs
    return metrics


# --------------------------------------------------------------------------------------------------------- advantages


def fill_advantages(
    groups: list[Group], minibatches: list[Minibatch], cfg: AdvantageConfig, loss_cfg: LossConfig, ranks: Ranks
) -> Metrics:
    """Fill each token's advantage: from its trajectory's group, or, under a critic, from the token's value."""
    metrics = Metrics()
    if loss_cfg.has_kl_in_reward:
        for minibatch in minibatches:
            metrics.merge(fill_kl_penalties(minibatch, loss_cfg, ranks))
    if cfg.needs_critic:
        for minibatch in minibatches:
            fill_from_critic(minibatch, cfg, loss_cfg, ranks)
        return metrics
    assign_advantages(groups, cfg)
    for minibatch in minibatches:
        by_group = [token_advantages(group, cfg.tree, cfg) for group in minibatch.groups]
        by_row = [by_group[index][t.trajectory_id] for index, t in minibatch.trajectories]
        for micro in minibatch.micros:
            micro.advantages = micro.rows_to_tensor(by_row)
    return metrics


def drop_if_no_gradient(minibatches: list[Minibatch], loss_cfg: LossConfig, ranks: Ranks) -> list[Minibatch]:
    """Return the mini-batches, or [] if all gradients of this training step would be 0. Collective.

    The gradients are 0 if all advantages are 0, unless the loss has a KL or entropy term. (A user's loss may have a
    term of its own.) Without this, momentum and weight decay of the optimizer would move the policy although there is
    nothing to learn.
    """
    if loss_cfg.entropy_coefficient or loss_cfg.has_kl_in_loss or is_own(loss_cfg.kind):
        return minibatches
    has_gradient = any(bool(micro.advantages.any()) for minibatch in minibatches for micro in minibatch.micros)
    [num_ranks_with_gradient] = ranks.all_reduce_sum(float(has_gradient))
    return minibatches if num_ranks_with_gradient else []


def fill_kl_penalties(minibatch: Minibatch, loss_cfg: LossConfig, ranks: Ranks) -> Metrics:
    """Fill `trajectory.kl_penalty` on all ranks: coefficient * KL to the reference, summed over the loss tokens."""
    # Each row is whole on one rank: kl_in=reward is refused with context parallelism (start/checks.py).
    row_ids = [row_id for micro in minibatch.micros for row_id in micro.row_ids]
    # An empty micro-batch has a row, but no row id: cut it off.
    sums = [kl_penalties(micro, loss_cfg).sum(-1)[: len(micro.row_ids)] for micro in minibatch.micros]  # (B,) each
    local_penalties = dict(zip(row_ids, torch.cat(sums).tolist(), strict=True))
    metrics = Metrics()
    for penalty in local_penalties.values():  # each rank counts its own rows
        metrics.mean("reward/kl_penalty", penalty)
    for penalties in ranks.all_gather_objects(local_penalties):
        for row_id, penalty in penalties.items():
            _, trajectory = minibatch.trajectories[row_id]
            trajectory.kl_penalty = penalty
    return metrics


def kl_penalties(micro: MicroBatch, loss_cfg: LossConfig) -> torch.Tensor:
    """Return coefficient * KL of each loss token before the update, (B, T); 0 at other tokens."""
    kl = token_kl(micro.old_logprobs, micro.ref_logprobs, loss_cfg.kl_estimator)
    return loss_cfg.kl_coefficient * torch.where(micro.loss_mask, kl, 0.0)


def fill_from_critic(minibatch: Minibatch, cfg: AdvantageConfig, loss_cfg: LossConfig, ranks: Ranks) -> None:
    """Fill advantages and returns from the critic's `old_values`. The reward comes with the last loss token.

    The advantages, but not the returns, are whitened over the loss tokens of the global mini-batch.
    """
    by_row = [reward_at_the_end(t) for _, t in minibatch.trajectories]
    for micro in minibatch.micros:
        rewards = micro.rows_to_tensor(by_row)  # (B, T)
        if loss_cfg.has_kl_in_reward:
            rewards -= kl_penalties(micro, loss_cfg)
        evidence = CriticEvidence(rewards, micro.old_values, micro.loss_mask)
        micro.advantages, micro.returns = CRITIC_ESTIMATORS[cfg.kind](evidence, cfg)
    mean, std = global_statistics([micro.at_loss_tokens(micro.advantages) for micro in minibatch.micros], ranks)
    for micro in minibatch.micros:
        # * loss_mask: without it, tokens without a loss would get -mean / std
        micro.advantages = (micro.advantages - mean) / (std + 1e-8) * micro.loss_mask


def reward_at_the_end(trajectory: Trajectory) -> np.ndarray:
    """Return the reward of each response token, (T,): the trajectory's at the last loss token, 0 at the others."""
    rewards = np.zeros(len(trajectory.token_ids))
    last = np.flatnonzero(trajectory.loss_mask)[-1]
    rewards[last] = trajectory.reward
    return rewards


# --------------------------------------------------------------------------------------------------------- the update


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micros: list[MicroBatch],
    cfg: LossConfig,
    *,
    temperature: float,
    max_grad_norm: float,
    ranks: Ranks,
    is_first: bool,
) -> Metrics:
    """Take one optimizer step on a global mini-batch. `micros` are this rank's micro-batches.

    `is_first`: no optimizer step was taken since the rollout. Raises NonFinite, on all ranks alike, if the
    gradient's norm is not finite.

    Nothing in the loop may make the host wait for the GPU, so that the next kernels are always queued in time: no
    float(tensor), no boolean index, no copy without pinned memory. The same holds for a new loss.
    """
    metrics = Metrics()
    if cfg.entropy_target is not None:
        metrics.mean("loss/entropy_coefficient", cfg.entropy_coefficient)

    # ---- what a token's loss needs to know of all ranks' tokens
    [denominator] = ranks.all_reduce_sum(float(sum(loss_denominator(m.loss_mask, cfg.aggregation) for m in micros)))
    statistics = None
    if cfg.entropy_balanced_advantage:
        statistics = entropy_statistics(policy, micros, temperature=temperature, is_first=is_first, ranks=ranks)

    # ---- forward and backward, one micro-batch at a time
    losses = []
    # `accumulating`: the gradients of all micro-batches add up, and are exchanged only at the last
    for micro in accumulating(policy, micros):
        logprobs, entropies = policy(micro, temperature)  # (B, T)
        if micro.old_logprobs is None:  # see `first_update_computes_old_logprobs`
            metrics.merge(use_as_old_logprobs(micro, logprobs, entropies, cfg))
        if policy.sketch:  # update.measure_noise
            policy.sketch.take_rows(micro)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=micro.old_logprobs,
            advantages=micro.advantages,
            mask=micro.loss_mask,
            entropy=entropies,
            ref_logprobs=micro.ref_logprobs,
            rollout_weights=micro.rollout_weights,
            starts_context=micro.starts_context,
        )
        loss, loss_metrics = policy_loss(inputs, cfg, denominator=denominator, entropy_statistics=statistics)
        # The loss is this micro-batch's share of the global mean. FSDP2 averages gradients over ranks: undo that.
        (loss * ranks.world_size).backward()
        losses.append(loss.detach())
        metrics.merge(loss_metrics, prefix="loss/")
        if micro.row_ids:  # not an empty micro-batch
            num_computed = micro.input_ids.numel()
            metrics.sum("tokens/trained", num_computed)
            metrics.mean("train/tree_token_ratio", micro.num_row_tokens / num_computed, num_computed)

    # ---- clip and step
    metrics.mean("optim/grad_norm", optimizer_step(policy, optimizer, max_grad_norm, losses))
    return metrics


def entropy_statistics(
    policy: Policy, micros: list[MicroBatch], *, temperature: float, is_first: bool, ranks: Ranks
) -> tuple[float, float]:
    """Return (mean, std) of the current policy's token entropies over the global mini-batch, for AEPO. Collective."""
    at_loss_tokens = []
    for micro in micros:
        if is_first:  # the current policy is still the old one
            entropies = micro.old_entropies
        else:
            with torch.no_grad():
                _, entropies = policy(micro, temperature)
        at_loss_tokens.append(micro.at_loss_tokens(entropies))
    return global_statistics(at_loss_tokens, ranks)


def optimizer_step(
    policy: Policy, optimizer: torch.optim.Optimizer, max_grad_norm: float, losses: list[torch.Tensor]
) -> float:
    """Clip the accumulated gradient, take the optimizer step, and return the gradient's norm before clipping.

    Raises NonFinite, on all ranks alike, before the step if the norm is not finite; `losses` (this rank's) go with it.
    Shared with train_sft.py.
    """
    try:
        norm = clip_grad_norm(policy, max_grad_norm)
    except FloatingPointError as error:
        raise NonFinite(str(error), losses) from error
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def step_sketches(policy: Policy, minibatches: list[Minibatch], ranks: Ranks) -> list[SketchedMinibatch]:
    """Return the gradient sketches that the updates of a step have collected on all ranks. Collective."""
    local_sums = policy.sketch.collected([len(minibatch.micros) for minibatch in minibatches])
    totals: list[dict[int, np.ndarray]] = [{} for _ in minibatches]
    for rank_sums in ranks.all_gather_objects(local_sums):
        for total, rows in zip(totals, rank_sums, strict=True):
            for row_id, sums in rows.items():
                # Added up: with context parallelism each rank of a group has a part of the row's tokens.
                total[row_id] = total.get(row_id, 0.0) + sums
    return [
        SketchedMinibatch(minibatch.groups, minibatch.trajectories, rows)
        for minibatch, rows in zip(minibatches, totals, strict=True)
    ]


def global_statistics(values: list[torch.Tensor], ranks: Ranks) -> tuple[float, float]:
    """Return (mean, std) over the global mini-batch of values at the loss tokens, (L,) for each micro-batch."""
    moments = sum(token_moments(of_micro) for of_micro in values)
    return mean_and_std(torch.tensor(ranks.all_reduce_sum(*moments.tolist()), dtype=torch.float64))
