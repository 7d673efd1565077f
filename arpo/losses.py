"""The policy loss with its token losses (TOKEN_LOSSES), KL and entropy terms.

A new loss is one function (LossInputs, LossConfig) -> TokenLosses, in a file of yours (loss.kind=FILE.py:NAME) or with
one line in TOKEN_LOSSES. KL_ESTIMATORS and AGGREGATIONS work in the same way. All functions are pure.

Legend: B trajectories (rows), T response tokens. All tensors are (B, T); mask 1 = the policy sampled this token.
A mini-batch is cut into micro-batches over ranks. Each computes its share of one global loss, because sums are divided
by a *global* count (`denominator`); so shares add up, however the rows are cut:

    count = dist.all_reduce_sum(float(sum(loss_denominator(m.loss_mask, cfg.aggregation) for m in micro_batches)))
    loss, metrics = policy_loss(LossInputs(...), cfg, denominator=count)
    (loss * world_size).backward()          # FSDP2 averages gradients over ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from arpo.config.returned import ask, instance, tensor
from arpo.metrics import Metrics
from arpo.options import LossConfig

ENTROPY_STEP = 0.001
"""Change of the entropy coefficient in a step, under loss.entropy_target."""
MAX_K3 = 10.0
MAX_LOG_RATIO = 20.0  # exp(20) is far outside every clip range, and still finite in float32


@dataclass(frozen=True)
class LossInputs:
    """Everything that a policy loss may look at."""

    logprobs: Tensor
    """(B, T) nats, log-probability of each token under the policy that is trained; has a gradient."""
    old_logprobs: Tensor
    """(B, T) nats, under the policy before the update (loss.old_logprobs says who computed them)."""
    advantages: Tensor
    """(B, T), or a shape that broadcasts to it."""
    mask: Tensor
    """(B, T) bool or 0/1: 1 where the policy sampled the token and the loss counts it."""
    entropy: Tensor | None = None
    """(B, T) nats, entropy of the policy's distribution of each token; has a gradient."""
    ref_logprobs: Tensor | None = None
    """(B, T) nats, log-probabilities under the reference policy, for the KL term."""
    rollout_weights: Tensor | None = None
    """(B, T) importance weights of the rollout correction (rollout_correction.py), multiplied to each token's loss."""

    @property
    def log_ratio(self) -> Tensor:
        """(B, T) logprobs - old_logprobs, bounded by 20; exactly 0 and without gradient where the mask is 0."""
        difference = torch.where(self.mask.bool(), self.logprobs - self.old_logprobs, 0.0)
        return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class TokenLosses:
    """The loss of each token, before it is averaged."""

    losses: Tensor
    """(B, T), differentiable; values where the mask is 0 do not matter."""
    ratio: Tensor
    """(B, T) probability ratio that the loss used, for the metric `ratio_max`."""
    held: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> (B, T) bool or number, logged as its mean over the loss tokens."""


TokenLoss = Callable[[LossInputs, LossConfig], TokenLosses]
BOUNDS = ("clip_fraction", "clip_fraction_low", "dual_clip_fraction")
"""Metrics that every loss logs: shares of tokens held at the ratio's upper bound, at its lower, and by dual clip."""


def policy_loss(
    inputs: LossInputs,
    cfg: LossConfig,
    *,
    denominator: float | None = None,
    entropy_statistics: tuple[float, float] | None = None,
) -> tuple[Tensor, Metrics]:
    """Policy loss + kl_coefficient * KL - entropy_coefficient * entropy. Returns (scalar loss, metrics).

    `denominator` is the global count of what is averaged: loss tokens for token_mean, sequences with loss tokens for
    the sequence means (`loss_denominator`, summed over micro-batches and ranks); None = these rows.
    `entropy_statistics` are (mean, std) of the entropies over the mini-batch, for AEPO; None = of these rows.

    Metrics are to be merged over micro-batches and ranks: the sum `policy` (this share of the policy loss, without KL
    and entropy terms); means over loss tokens of BOUNDS, `approx_kl` (k3 estimate of KL(old || new)), `entropy`, `kl`
    (to the reference); the maximum `ratio_max`. Raises ValueError where `cfg` needs the entropy, but `inputs` lacks it.

    >>> one = torch.ones(1, 1)
    >>> policy_loss(LossInputs(1.5 * one, 0 * one, one, one), LossConfig())[0].item()    # r = 4.48 is clipped to 1.2
    -1.2000000476837158
    """
    assert inputs.logprobs.shape == inputs.old_logprobs.shape == inputs.mask.shape, inputs
    keep, entropy = inputs.mask.bool(), inputs.entropy
    if entropy is None and (uses_entropy_statistics(cfg) or cfg.entropy_coefficient):
        raise ValueError("these options need the tokens' entropies; pass LossInputs(entropy=...)")
    if uses_entropy_statistics(cfg) and entropy_statistics is None:
        entropy_statistics = statistics_of(token_moments(entropy[keep]))
    advantages = inputs.advantages.expand_as(inputs.logprobs)
    if cfg.entropy_balanced_advantage:  # AEPO: A max(1 + weight z, 0), z = (H - mean) / std; the floor keeps A's sign
        mean, std = entropy_statistics
        z = (entropy.detach() - mean) / (std + 1e-8)
        if cfg.entropy_advantage_max_z is not None:
            z = z.clamp(max=cfg.entropy_advantage_max_z)
        advantages = advantages * (1 + cfg.entropy_advantage_weight * z).clamp(min=0)
    inputs = replace(inputs, advantages=advantages, mask=keep)

    tokens = token_losses(inputs, cfg)
    weighted = tokens.losses if inputs.rollout_weights is None else tokens.losses * inputs.rollout_weights.detach()
    loss = policy_part = aggregate(weighted, keep, cfg.aggregation, denominator)

    log_ratio = inputs.log_ratio.detach()
    per_token = dict.fromkeys(BOUNDS, torch.zeros_like(keep)) | tokens.held
    per_token["approx_kl"] = log_ratio.exp() - 1 - log_ratio
    if entropy is not None:
        per_token["entropy"] = entropy.detach()
    if inputs.ref_logprobs is not None and cfg.kl_in == "loss":
        logprobs, ref_logprobs = (torch.where(keep, x, 0.0) for x in (inputs.logprobs, inputs.ref_logprobs))
        kl = token_kl(logprobs, ref_logprobs, cfg.kl_estimator)
        loss = loss + cfg.kl_coefficient * aggregate(kl, keep, cfg.aggregation, denominator)
        per_token["kl"] = kl.detach()
    if cfg.entropy_coefficient:
        loss = loss - cfg.entropy_coefficient * aggregate(entropy, keep, cfg.aggregation, denominator)
    return loss, loss_metrics(policy_part.detach(), per_token, tokens.ratio.detach(), keep)


def token_losses(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    """Return what `cfg.kind` says of each token. Raises UserError where a loss of the user's returns other shapes."""
    what, shape = f"loss.kind={cfg.kind}", tuple(inputs.logprobs.shape)
    tokens = instance(ask("loss.kind", cfg.kind, TOKEN_LOSSES, inputs, cfg), f"{what}: the returned value", TokenLosses)
    tensor(tokens.losses, f"{what}: TokenLosses.losses", shape)
    tensor(tokens.ratio, f"{what}: TokenLosses.ratio", shape)
    for name, values in instance(tokens.held, f"{what}: TokenLosses.held", dict).items():
        tensor(values, f"{what}: TokenLosses.held[{name!r}]", shape)
    return tokens


def towards_target(cfg: LossConfig, entropies: Sequence[float]) -> LossConfig:
    """Return the loss with the entropy coefficient that these mean entropies (nats) of the steps so far lead to.

    Target 0.3, entropies 0.2, 0.2, 0.4 -> 0.001, 0.002, and now 0.001.
    """
    if cfg.entropy_target is None:
        return cfg
    coefficient = cfg.entropy_coefficient
    for entropy in entropies:
        coefficient = max(coefficient + math.copysign(ENTROPY_STEP, cfg.entropy_target - entropy), 0.0)
    return replace(cfg, entropy_coefficient=coefficient)


def ppo(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(log_ratio); where A < 0, at most -A dual_clip."""
    clipped = clipped_surrogate(inputs, inputs.log_ratio.exp(), cfg)
    if cfg.dual_clip is None:
        return clipped
    bound = -inputs.advantages * cfg.dual_clip
    over = (inputs.advantages < 0) & (clipped.losses.detach() > bound)
    held = clipped.held | {"dual_clip_fraction": over}
    return TokenLosses(torch.where(over, bound, clipped.losses), clipped.ratio, held)


def gspo(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    """PPO without dual clip, with one ratio in place of r for all tokens of the sequence (arXiv 2507.18071), or of the
    turn (ratio_over=turn; AT2PO, arXiv 2601.04767)."""
    mean = mean_over_turns if cfg.ratio_over == "turn" else mean_over_sequence
    return clipped_surrogate(inputs, shared_ratio(inputs.log_ratio, inputs.mask, mean), cfg)


def cispo(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    """l = -A clip(r, 1 - clip_low, 1 + clip_high) logprobs, the clipped ratio detached (arXiv 2506.13585)."""
    ratio, low, high = inputs.log_ratio.exp(), 1 - cfg.clip_low, 1 + cfg.clip_high
    losses = -inputs.advantages * ratio.clamp(low, high).detach() * inputs.logprobs
    return TokenLosses(losses, ratio, {"clip_fraction": ratio > high, "clip_fraction_low": ratio < low})


def reinforce(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    """l = -A logprobs."""
    return TokenLosses(-inputs.advantages * inputs.logprobs, inputs.log_ratio.exp())


TOKEN_LOSSES: dict[str, TokenLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}
NEED_WHOLE_ROWS = {"gspo", "sequence_mean_token_sum", "sequence_mean_token_mean"}
"""Losses and aggregations that combine the tokens of a row, and so cannot go with model.context_parallel > 1. (Those of
a user's file are taken for such.)"""


def clipped_surrogate(inputs: LossInputs, ratio: Tensor, cfg: LossConfig) -> TokenLosses:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) for the ratio r (B, T).

    With `cfg.entropy_balanced_clipping` (AEPO, arXiv 2510.14545) an r above the range is clipped to
    (1 + clip_high) r / stop_gradient(r): the same value, but with a gradient, whose size is bounded by 1 + clip_high.
    """
    low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
    above, below, clipped_ratio = ratio > high, ratio < low, ratio.clamp(low, high)
    if cfg.entropy_balanced_clipping:
        clipped_ratio = torch.where(above & inputs.mask, high * ratio / ratio.detach(), clipped_ratio)
    losses = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * clipped_ratio)
    above, below = above & (inputs.advantages > 0), below & (inputs.advantages < 0)
    return TokenLosses(losses, ratio, {"clip_fraction": above, "clip_fraction_low": below})


def shared_ratio(log_ratio: Tensor, mask: Tensor, mean: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return GSPO's ratio, (B, T): exp(mean log ratio over loss tokens), the same value at all tokens of the mean, but
    with the gradient of each token's own logprob, so that tokens with one ratio may have different advantages.

    Ratios 2 and 0.5 -> 1 at both tokens; d value / d logp is 1 at its own token and 0 at the other.
    """
    return (mean(log_ratio.detach(), mask) + (log_ratio - log_ratio.detach())).exp()


def mean_over_sequence(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each row's loss tokens, (B, 1); 0 where there is none."""
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def mean_over_turns(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the loss tokens of each token's turn, (B, T).

    A turn is a run of loss tokens: a tool result, whose mask is 0, ends it.
    values [1, 3, 9, 5], mask [1, 1, 0, 1] -> [2, 2, 2, 5]; what it says of mask-0 tokens does not matter.
    """
    starts = mask.int().diff(dim=-1, prepend=mask.new_zeros(len(mask), 1).int()) > 0
    turn_ids = starts.cumsum(-1)  # (B, T) from 1; 0 before the first turn
    is_in = (turn_ids[..., None] == torch.arange(int(turn_ids.max()) + 1, device=mask.device)) & mask[..., None]
    sums = torch.where(is_in, values[..., None], 0.0).sum(1)  # (B, turns + 1); no scatter_add: its order is not fixed
    return (sums / is_in.sum(1).clamp(min=1)).gather(1, turn_ids)


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) for each token. (B, T), (B, T) -> (B, T) nats, differentiable in `logprobs`.

    With d = logprobs - ref_logprobs (http://joschu.net/blog/kl-approx.html). In the loss it is the *gradient* that
    counts, in expectation over tokens that the policy samples:

        estimator  value             expected value  d value / d logprobs  expected gradient is that of
        k1         d                 KL              1                     nothing: it is 0, whatever the reference
        abs        |d|               above KL        sign(d)               the total variation distance (times 2)
        k2         d^2 / 2           biased          d                     KL(policy || reference)
        k3         exp(-d) + d - 1   KL              1 - exp(-d)           KL(reference || policy)

    So k1 belongs into the reward. k3's log ratio is bounded by 20 and its value by 10, as in the released code; where a
    bound holds, the gradient is 0.

    logprobs -1, ref_logprobs -2: k1 and abs 1, k2 0.5, k3 0.368.
    """
    difference = logprobs - ref_logprobs
    kl = ask("loss.kl_estimator", estimator, KL_ESTIMATORS, difference)
    return tensor(kl, f"loss.kl_estimator={estimator}: the KL", tuple(difference.shape))


def k3(difference: Tensor) -> Tensor:
    log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio.exp() - 1 - log_ratio).clamp(-MAX_K3, MAX_K3)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "abs": torch.abs,
    "k2": lambda difference: 0.5 * difference.square(),
    "k3": k3,
}


def aggregate(token_loss: Tensor, mask: Tensor, aggregation: str, denominator: float | None) -> Tensor:
    """Sum token losses (B, T) as AGGREGATIONS says, over `denominator` (None = the count of these rows, at least 1)."""
    # where, not a product: 0 * inf would poison the sum, and the gradient of a masked token must be exactly 0
    rows, _ = sums_and_counts(torch.where(mask.bool(), token_loss, 0.0), mask, aggregation)
    if denominator is None:
        denominator = loss_denominator(mask, aggregation).clamp(min=1)
    return rows.sum() / denominator


def loss_denominator(mask: Tensor, aggregation: str) -> Tensor:
    """Return the part of these rows in the global count, 0-dim: number of loss tokens, or of sequences that have any.

    mask [[1, 1], [0, 0]] -> 2 for token_mean, 1 for the sequence means.
    """
    _, counts = sums_and_counts(torch.zeros_like(mask), mask, aggregation)
    return counts.sum()


def sums_and_counts(losses: Tensor, mask: Tensor, aggregation: str) -> tuple[Tensor, Tensor]:
    """Return the (B,) sums and counts of an aggregation. Raises UserError where one of the user's returns others."""
    what = f"loss.aggregation={aggregation}"
    found = ask("loss.aggregation", aggregation, AGGREGATIONS, losses, mask)
    rows, counts = instance(found, f"{what}: the returned value", tuple, length=2)
    shape = (len(mask),)
    return tensor(rows, f"{what}: the rows' sums", shape), tensor(counts, f"{what}: the rows' counts", shape)


Aggregation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Losses (0 where the mask is 0) and mask, (B, T) each -> each row's sum and its part of the denominator, (B,)."""
AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": lambda losses, mask: (losses.sum(-1), mask.sum(-1)),
    "sequence_mean_token_sum": lambda losses, mask: (losses.sum(-1), mask.sum(-1) > 0),
    "sequence_mean_token_mean": lambda losses, mask: (losses.sum(-1) / mask.sum(-1).clamp(min=1), mask.sum(-1) > 0),
}


def uses_entropy_statistics(cfg: LossConfig) -> bool:
    """Return whether the loss of a token depends on the entropies of all others (AEPO)."""
    return cfg.entropy_balanced_advantage


def token_moments(values: Tensor) -> Tensor:
    """Return count, sum and sum of squares of the loss tokens' values (L,), as (3,) float64; rows and ranks add up."""
    values = values.detach().double()
    return torch.stack([values.new_full((), values.numel()), values.sum(), values.square().sum()])


def statistics_of(moments: Tensor) -> tuple[float, float]:
    """Return (mean, unbiased standard deviation); a single token has deviation 1. Entropies 1, 3 -> (2, 1.414)."""
    count, total, squares = moments.tolist()
    if count < 2:
        return (total if count else 0.0), 1.0
    mean = total / count
    return mean, max((squares - count * mean * mean) / (count - 1), 0.0) ** 0.5


def loss_metrics(policy: Tensor, per_token: dict[str, Tensor], ratio: Tensor, mask: Tensor) -> Metrics:
    """Return the metrics of `policy_loss`; rows without a loss token have none."""
    metrics, count = Metrics(), mask.sum().double()
    metrics.sum("policy", policy, weight=count)
    metrics.max("ratio_max", torch.where(mask, ratio, -torch.inf).amax(), weight=count)
    for name, values in per_token.items():
        total = torch.where(mask, values.float(), 0.0).sum()
        metrics.mean(name, total / count.clamp(min=1), weight=count)
    return metrics
