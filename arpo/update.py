"""The steps from scored groups to an optimizer step: mini-batches, logprobs of their tokens, advantages, the update.

The order matters: a KL in the reward and a critic's advantages need logprobs and values of the tokens first, so
mini-batches are cut before advantages exist, and each stage fills named fields of the micro-batches (batch.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from arpo.advantages import CRITIC_ESTIMATORS, CriticEvidence, assign_advantages, token_advantages
from arpo.batch import MicroBatch, microbatches, row_of
from arpo.config.sections import UpdateConfig
from arpo.log.nonfinite import NonFinite
from arpo.losses import (
    LossInputs,
    loss_denominator,
    policy_loss,
    statistics_of,
    token_kl,
    token_moments,
    uses_entropy_statistics,
)
from arpo.metrics import Metrics
from arpo.model import Policy
from arpo.model.context_parallel import spread
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
    """Whole groups for one optimizer step. Every rank knows all trajectories, and holds its part of the rows."""

    groups: list[Group]
    trajectories: list[tuple[int, Trajectory]]
    """(index in `groups`, trajectory) of each row; a row's id is its place in this list."""
    micros: list[MicroBatch]
    """This rank's part."""


def make_minibatches(
    groups: list[Group], cfg: UpdateConfig, advantage: AdvantageConfig, ranks: Ranks
) -> list[Minibatch]:
    """Cut a step's groups, in order, into mini-batches, without those in which there is nothing to train on."""
    assert cfg.layout != "auto", "resolve_layout first"
    cut = tree_microbatches if cfg.layout == "tree" else microbatches
    budget, minibatches = cfg.max_tokens_per_microbatch, []
    for start in range(0, len(groups), cfg.num_prompts_per_minibatch):
        some = groups[start : start + cfg.num_prompts_per_minibatch]
        if trajectories := training_trajectories(some, advantage):
            rows = [row_of(some[index], t) for index, t in trajectories]
            micros = spread(cut(rows, ranks.data_rank, ranks.data_size, budget), ranks.group)
            minibatches.append(Minibatch(some, trajectories, [micro.to(ranks.device) for micro in micros]))
    return minibatches


def fill_ref_logprobs(reference: Policy, micros: list[MicroBatch], temperature: float) -> None:
    """Fill each token's log-probability under the reference policy."""
    for micro in micros:
        with torch.no_grad():
            micro.ref_logprobs, _ = reference(micro, temperature)


def fill_old_logprobs(policy: Policy, micros: list[MicroBatch], cfg: LossConfig, temperature: float) -> Metrics:
    """Fill the policy's logprobs and entropies before the update; returns metrics of vLLM's distance from them."""
    metrics = Metrics()
    for micro in micros:
        with torch.no_grad():
            logprobs, entropies = policy(micro, temperature)
        metrics.merge(use_as_old_logprobs(micro, logprobs, entropies, cfg))
    return metrics


def first_update_computes_old_logprobs(cfg: LossConfig) -> bool:
    """Return whether a rollout's first mini-batch can do without `fill_old_logprobs`, as its update computes the same.

    A KL in the reward and AEPO's entropies need those of all tokens before any token's loss.
    """
    return not (uses_entropy_statistics(cfg) or (cfg.kl_coefficient and cfg.kl_in == "reward"))


def use_as_old_logprobs(micro: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor, cfg: LossConfig) -> Metrics:
    """Fill the logprobs and entropies before the update, (B, T) each, and the weights of the rollout correction."""
    metrics = Metrics()
    micro.old_logprobs, micro.old_entropies = logprobs.detach(), entropies.detach()
    if num_tokens := micro.num_loss_tokens:
        difference = micro.at_loss_tokens(micro.old_logprobs - micro.rollout_logprobs)
        metrics.mean("mismatch/abs", difference.abs().mean(), num_tokens)
        metrics.mean("mismatch/kl", (torch.expm1(difference) - difference).mean(), num_tokens)
    if cfg.rollout_correction != "none":
        micro.rollout_weights, weight_metrics = rollout_weights(
            micro.old_logprobs, micro.rollout_logprobs, micro.loss_mask, cfg
        )
        metrics.merge(weight_metrics, prefix="mismatch/")
    if cfg.old_logprobs == "rollout":
        micro.old_logprobs = micro.rollout_logprobs
    return metrics


def fill_advantages(
    groups: list[Group], minibatches: list[Minibatch], cfg: AdvantageConfig, loss: LossConfig, ranks: Ranks
) -> Metrics:
    """Fill each token's advantage: its trajectory's against the group, or its own against the critic's value."""
    metrics = Metrics()
    if loss.kl_coefficient and loss.kl_in == "reward":
        for minibatch in minibatches:
            metrics.merge(penalize(minibatch, loss, ranks))
    if cfg.needs_critic:
        for minibatch in minibatches:
            fill_from_critic(minibatch, cfg, loss, ranks)
        return metrics
    assign_advantages(groups, cfg)
    for minibatch in minibatches:
        by_group = [token_advantages(group, cfg.tree, cfg) for group in minibatch.groups]
        by_row = [by_group[index][t.trajectory_id] for index, t in minibatch.trajectories]
        for micro in minibatch.micros:
            micro.advantages = micro.rows_to_tensor(by_row)
    return metrics


def drop_if_no_gradient(minibatches: list[Minibatch], loss: LossConfig, ranks: Ranks) -> list[Minibatch]:
    """Return the mini-batches; none of a step whose advantages are all 0 and whose loss has no other term.

    There momentum and weight decay alone would move the policy. Collective.
    """
    if loss.entropy_coefficient or (loss.kl_coefficient and loss.kl_in == "loss"):
        return minibatches
    teaches = any(bool(micro.advantages.any()) for minibatch in minibatches for micro in minibatch.micros)
    return minibatches if ranks.all_reduce_sum(float(teaches))[0] else []


def penalize(minibatch: Minibatch, loss: LossConfig, ranks: Ranks) -> Metrics:
    """Fill `trajectory.kl_penalty` on all ranks: coefficient * KL to the reference, summed over the loss tokens."""
    sums = [kl_penalties(micro, loss).sum(-1)[: len(micro.row_ids)] for micro in minibatch.micros]  # (B,) of each
    row_ids = [row_id for micro in minibatch.micros for row_id in micro.row_ids]
    mine = dict(zip(row_ids, torch.cat(sums).tolist(), strict=True))
    metrics = Metrics()
    for penalty in mine.values():  # each rank counts its own rows
        metrics.mean("reward/kl_penalty", penalty)
    for part in ranks.all_gather_objects(mine):
        for row_id, penalty in part.items():
            minibatch.trajectories[row_id][1].kl_penalty = penalty
    return metrics


def kl_penalties(micro: MicroBatch, loss: LossConfig) -> torch.Tensor:
    """Return coefficient * KL of each loss token before the update, (B, T), 0 elsewhere."""
    kl = token_kl(micro.old_logprobs, micro.ref_logprobs, loss.kl_estimator)
    return loss.kl_coefficient * torch.where(micro.loss_mask, kl, 0.0)


def fill_from_critic(minibatch: Minibatch, cfg: AdvantageConfig, loss: LossConfig, ranks: Ranks) -> None:
    """Fill advantages and returns from `old_values`; the reward comes with the last token that the policy wrote.

    The advantages (not the returns) are whitened over the loss tokens of the global mini-batch.
    """
    by_row = [reward_at_the_end(t) for _, t in minibatch.trajectories]
    for micro in minibatch.micros:
        rewards = micro.rows_to_tensor(by_row)  # (B, T)
        if loss.kl_coefficient and loss.kl_in == "reward":
            rewards -= kl_penalties(micro, loss)
        evidence = CriticEvidence(rewards, micro.old_values, micro.loss_mask)
        micro.advantages, micro.returns = CRITIC_ESTIMATORS[cfg.kind](evidence, cfg)
    mean, std = global_statistics([micro.at_loss_tokens(micro.advantages) for micro in minibatch.micros], ranks)
    for micro in minibatch.micros:
        micro.advantages = (micro.advantages - mean) / (std + 1e-8) * micro.loss_mask


def reward_at_the_end(trajectory: Trajectory) -> np.ndarray:
    """Return the reward of each response token, (T,): the trajectory's at the last loss token, 0 at the others."""
    rewards = np.zeros(len(trajectory.token_ids))
    rewards[np.flatnonzero(trajectory.loss_mask)[-1]] = trajectory.reward
    return rewards


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micros: list[MicroBatch],
    cfg: LossConfig,
    temperature: float,
    max_grad_norm: float,
    ranks: Ranks,
    *,
    is_first: bool,
) -> Metrics:
    """One optimizer step on a global mini-batch, of which `micros` are this rank's part.

    The host waits for a GPU a few times for the step, and never for a micro-batch, so that it is always ahead of it
    with the next kernels: no float, boolean index or copy without pinned memory in the loop, also not in a new loss.
    Raises NonFinite, on all ranks alike.
    """
    metrics, losses = Metrics(), []
    if cfg.entropy_target is not None:
        metrics.mean("loss/entropy_coefficient", cfg.entropy_coefficient)
    [count] = ranks.all_reduce_sum(float(sum(loss_denominator(micro.loss_mask, cfg.aggregation) for micro in micros)))
    statistics = None
    if uses_entropy_statistics(cfg):  # of the current policy; before the first step that is the old one
        with torch.no_grad():
            entropies = [m.old_entropies if is_first else policy(m, temperature)[1] for m in micros]
        statistics = global_statistics([m.at_loss_tokens(h) for m, h in zip(micros, entropies, strict=True)], ranks)

    for micro in accumulating(policy, micros):
        logprobs, entropies = policy(micro, temperature)  # (B, T)
        if micro.old_logprobs is None:  # see `first_update_computes_old_logprobs`
            metrics.merge(use_as_old_logprobs(micro, logprobs, entropies, cfg))
        if policy.sketch:
            policy.sketch.take_rows(micro)
        inputs = LossInputs(
            logprobs,
            micro.old_logprobs,
            micro.advantages,
            micro.loss_mask,
            entropy=entropies,
            ref_logprobs=micro.ref_logprobs,
            rollout_weights=micro.rollout_weights,
        )
        loss, loss_metrics = policy_loss(inputs, cfg, denominator=count, entropy_statistics=statistics)
        # The loss is this micro-batch's part of the global mean; FSDP2 averages gradients over ranks, so undo that.
        (loss * ranks.world_size).backward()
        losses.append(loss.detach())
        metrics.merge(loss_metrics, prefix="loss/")
        if micro.num_loss_tokens:
            num_computed = micro.input_ids.numel()
            metrics.sum("tokens/trained", num_computed)
            metrics.mean("train/tree_token_ratio", micro.num_row_tokens / num_computed, num_computed)

    try:
        metrics.mean("optim/grad_norm", clip_grad_norm(policy, max_grad_norm))
    except FloatingPointError as error:
        raise NonFinite(str(error), losses) from error
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return metrics


def step_sketches(policy: Policy, minibatches: list[Minibatch], ranks: Ranks) -> list[SketchedMinibatch]:
    """Return what the policy's sketch has collected in the updates of a step, of all ranks. Collective."""
    mine = policy.sketch.collected([len(minibatch.micros) for minibatch in minibatches])
    totals: list[dict[int, np.ndarray]] = [{} for _ in minibatches]
    for part in ranks.all_gather_objects(mine):
        for total, rows in zip(totals, part, strict=True):
            for row_id, sums in rows.items():  # ranks that share a row's tokens have a part of its sum each
                total[row_id] = total.get(row_id, 0.0) + sums
    return [
        SketchedMinibatch(minibatch.groups, minibatch.trajectories, rows)
        for minibatch, rows in zip(minibatches, totals, strict=True)
    ]


def global_statistics(micros: list[torch.Tensor], ranks: Ranks) -> tuple[float, float]:
    """Return (mean, std) over the global mini-batch, of the values (L,) at the loss tokens of each micro-batch."""
    moments = sum(token_moments(values) for values in micros)
    return statistics_of(torch.tensor(ranks.all_reduce_sum(*moments.tolist()), dtype=torch.float64))
