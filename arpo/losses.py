"""The policy loss: token losses (TOKEN_LOSSES), KL and entropy terms.

To add a loss, write a function (LossInputs, LossConfig) -> TokenLosses in your own file (loss.kind=FILE.py:NAME), or
here with a line in TOKEN_LOSSES. AGGREGATIONS (below) and KL_ESTIMATORS (kl.py) work in the same way.
All functions are pure.

Legend: B trajectories (rows), T response tokens. A tensor without another shape is (B, T). Mask 1 = the policy sampled
this token, and the loss counts it.

A mini-batch is cut into micro-batches over the ranks. Each micro-batch computes a share of the global loss: the sum
over the micro-batch, divided by a *global* count, `denominator`. The shares add up, however the rows are cut:

    [denominator] = ranks.all_reduce_sum(float(sum(loss_denominator(m.loss_mask, cfg.aggregation) for m in micros)))
    loss, metrics = policy_loss(LossInputs(...), cfg, denominator=denominator)
    (loss * world_size).backward()          # FSDP2 averages gradients over ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from arpo.config.returned import call_named, checked_instance, checked_names, checked_tensor
from arpo.kl import MAX_LOG_RATIO, token_kl
from arpo.metrics import Metrics
from arpo.options import LossConfig


@dataclass(frozen=True)
class LossInputs:
    """Everything that a policy loss may look at."""

    logprobs: Tensor
    """(B, T) nats, log-probability of each token under the trained policy; has a gradient."""
    old_logprobs: Tensor
    """(B, T) nats, under the policy before the update (computed as loss.old_logprobs says)."""
    advantages: Tensor
    """(B, T), or a shape that broadcasts to it."""
    mask: Tensor
    """(B, T) bool or 0/1: 1 where the policy sampled the token and the loss counts it."""
    entropy: Tensor | None = None
    """(B, T) nats, entropy of the policy's distribution of each token; has a gradient."""
    ref_logprobs: Tensor | None = None
    """(B, T) nats, log-probabilities under the reference policy. None unless loss.kl_coefficient is above 0."""
    rollout_weights: Tensor | None = None
    """(B, T) importance weights of the rollout correction (rollout_correction.py): factors of the token losses."""
    starts_context: Tensor | None = None
    """(B, T) bool: True at the first token sampled after a new context (rollout.context). None = no new contexts."""

    @property
    def log_ratio(self) -> Tensor:
        """(B, T) logprobs - old_logprobs, within +-20; exactly 0 and without gradient where the mask is 0."""
        difference = torch.where(self.mask.bool(), self.logprobs - self.old_logprobs, 0.0)
        return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class TokenLosses:
    """The loss of each token, before averaging."""

    losses: Tensor
    """(B, T), differentiable. Values where the mask is 0 do not matter."""
    ratio: Tensor
    """(B, T) probability ratio, for the metric `ratio_max`."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Metric name -> (B, T) bool or number; its mean over the loss tokens is logged."""


CLIP_METRICS = ("clip_fraction", "clip_fraction_low", "dual_clip_fraction")
"""Metrics of every loss, 0 by default: the shares of loss tokens clipped at the ratio's upper bound, at its lower
bound, and by the dual clip."""
RESERVED_METRICS = ("policy", "ratio_max", "approx_kl", "entropy", "kl", "entropy_coefficient")
"""Other numbers under loss/. No metric of a token loss may have one of these names."""


def policy_loss(
    inputs: LossInputs,
    cfg: LossConfig,
    *,
    denominator: float | None = None,
    entropy_statistics: tuple[float, float] | None = None,
) -> tuple[Tensor, Metrics]:
    """Return (loss, metrics): policy loss + kl_coefficient * KL - entropy_coefficient * entropy, a scalar.

    denominator: `loss_denominator`, summed over the micro-batches of all ranks. That is the number of loss tokens for
        token_mean, of sequences with loss tokens for the sequence means. None = the count of these rows.
    entropy_statistics: (mean, std) of the entropies over the mini-batch, for AEPO. None = of these rows.

    Merge the metrics over micro-batches and ranks. They are the sum `policy` (this share of the policy loss, without KL
    and entropy terms); the means over loss tokens of CLIP_METRICS, `approx_kl` (k3 estimate of KL(old || new)),
    `entropy` and `kl` (to the reference); the maximum `ratio_max`.
    Raises ValueError if `cfg` needs the entropy or a reference, and `inputs` lacks it.

    >>> one = torch.ones(1, 1)
    >>> policy_loss(LossInputs(1.5 * one, 0 * one, one, one), LossConfig())[0].item()    # r = 4.48 is clipped to 1.2
    -1.2000000476837158
    """
    assert inputs.logprobs.shape == inputs.old_logprobs.shape == inputs.mask.shape, inputs
    mask = inputs.mask.bool()
    entropy = inputs.entropy
    if entropy is None and (cfg.entropy_balanced_advantage or cfg.entropy_coefficient):
        raise ValueError("these options need the tokens' entropies; pass LossInputs(entropy=...)")
    if inputs.ref_logprobs is None and cfg.has_kl_in_loss:
        raise ValueError("loss.kl_coefficient needs a reference, which a run loads if it is above 0 from the start")

    # ---- policy term
    advantages = inputs.advantages.expand_as(inputs.logprobs)
    if cfg.entropy_balanced_advantage:
        # AEPO: A max(1 + weight z, 0) with z = (H - mean) / std. Without the floor at 0 an A could change its sign.
        mean, std = entropy_statistics or mean_and_std(token_moments(entropy[mask]))
        z = (entropy.detach() - mean) / (std + 1e-8)
        if cfg.entropy_advantage_max_z is not None:
            z = z.clamp(max=cfg.entropy_advantage_max_z)
        advantages = advantages * (1 + cfg.entropy_advantage_weight * z).clamp(min=0)
    inputs = replace(inputs, advantages=advantages, mask=mask)
    tokens = token_losses(inputs, cfg)
    weighted = tokens.losses
    if inputs.rollout_weights is not None:  # vLLM sampled from a slightly other policy than the trainer's
        weighted = weighted * inputs.rollout_weights.detach()
    policy_term = aggregate(weighted, mask, cfg.aggregation, denominator)
    loss = policy_term

    # ---- KL and entropy terms
    kl = None
    if inputs.ref_logprobs is not None and cfg.kl_in == "loss":
        # Masked before the difference: a masked token must have no gradient, even if its logprob is -inf.
        logprobs = torch.where(mask, inputs.logprobs, 0.0)
        ref_logprobs = torch.where(mask, inputs.ref_logprobs, 0.0)
        kl = token_kl(logprobs, ref_logprobs, cfg.kl_estimator)
        loss = loss + cfg.kl_coefficient * aggregate(kl, mask, cfg.aggregation, denominator)
    if cfg.entropy_coefficient:
        loss = loss - cfg.entropy_coefficient * aggregate(entropy, mask, cfg.aggregation, denominator)

    # ---- metrics
    metrics = Metrics()
    num_tokens = mask.sum()
    metrics.sum("policy", policy_term.detach(), weight=num_tokens)
    metrics.max("ratio_max", torch.where(mask, tokens.ratio.detach(), -torch.inf).amax(), weight=num_tokens)
    log_ratio = inputs.log_ratio.detach()
    # name -> value at each token, (B, T)
    per_token = dict.fromkeys(CLIP_METRICS, torch.zeros_like(mask)) | tokens.metrics
    per_token["approx_kl"] = torch.expm1(log_ratio) - log_ratio
    if entropy is not None:
        per_token["entropy"] = entropy.detach()
    if kl is not None:
        per_token["kl"] = kl.detach()
    metrics.merge(token_means(per_token, mask))
    return loss, metrics


def token_losses(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    """Return the token losses of `cfg.kind`. Raises UserError if a custom loss returns other types or shapes."""
    option = f"loss.kind={cfg.kind}"
    shape = tuple(inputs.logprobs.shape)
    tokens = call_named("loss.kind", cfg.kind, TOKEN_LOSSES, inputs, cfg)
    checked_instance(tokens, f"{option}: the returned value", TokenLosses)
    checked_tensor(tokens.losses, f"{option}: TokenLosses.losses", shape)
    checked_tensor(tokens.ratio, f"{option}: TokenLosses.ratio", shape)
    checked_instance(tokens.metrics, f"{option}: TokenLosses.metrics", dict)
    for name, values in tokens.metrics.items():
        checked_tensor(values, f"{option}: TokenLosses.metrics[{name!r}]", shape)
    checked_names(tokens.metrics, f"{option}: TokenLosses.metrics", RESERVED_METRICS)
    return tokens


def ppo(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    """l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(log_ratio); if A < 0, at most -A dual_clip."""
    clipped = clipped_surrogate(inputs, inputs.log_ratio.exp(), cfg)
    if cfg.dual_clip is None:
        return clipped
    bound = -inputs.advantages * cfg.dual_clip
    over = (inputs.advantages < 0) & (clipped.losses.detach() > bound)
    metrics = clipped.metrics | {"dual_clip_fraction": over}
    return TokenLosses(torch.where(over, bound, clipped.losses), clipped.ratio, metrics)


def gspo(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    """PPO without dual clip. All tokens of the sequence have one ratio (arXiv 2507.18071); with ratio_over=turn, all
    tokens of a turn (AT2PO, arXiv 2601.04767)."""
    log_ratio = inputs.log_ratio
    if cfg.ratio_over == "turn":
        mean = mean_over_turns(log_ratio.detach(), inputs.mask, inputs.starts_context)
    else:
        mean = mean_over_sequence(log_ratio.detach(), inputs.mask)
    return clipped_surrogate(inputs, shared_ratio(log_ratio, mean), cfg)


def cispo(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    """l = -A clip(r, 1 - clip_low, 1 + clip_high) logprobs, without gradient of the ratio (arXiv 2506.13585)."""
    low = 1 - cfg.clip_low
    high = 1 + cfg.clip_high
    ratio = inputs.log_ratio.exp()
    losses = -inputs.advantages * ratio.clamp(low, high).detach() * inputs.logprobs
    return TokenLosses(losses, ratio, {"clip_fraction": ratio > high, "clip_fraction_low": ratio < low})


def reinforce(inputs: LossInputs, cfg: LossConfig) -> TokenLosses:
    """l = -A logprobs."""
    return TokenLosses(-inputs.advantages * inputs.logprobs, inputs.log_ratio.exp())


TOKEN_LOSSES: dict[str, Callable[[LossInputs, LossConfig], TokenLosses]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
}
NEED_WHOLE_ROWS = {"gspo", "sequence_mean_token_sum", "sequence_mean_token_mean"}
"""Losses and aggregations over all tokens of a row. All tokens of a row must be on the same rank, so
model.context_parallel must be 1. Custom losses count as members of this set."""


def clipped_surrogate(inputs: LossInputs, ratio: Tensor, cfg: LossConfig) -> TokenLosses:
    """l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) for the ratio r (B, T).

    With `cfg.entropy_balanced_clipping` (AEPO, arXiv 2510.14545) an r above the range is clipped to
    (1 + clip_high) r / stop_gradient(r). The value is the same, but its gradient by log r is 1 + clip_high, not 0.
    """
    low = 1 - cfg.clip_low
    high = 1 + cfg.clip_high
    above = ratio > high
    below = ratio < low
    clipped_ratio = ratio.clamp(low, high)
    if cfg.entropy_balanced_clipping:
        clipped_ratio = torch.where(above & inputs.mask, high * ratio / ratio.detach(), clipped_ratio)
    losses = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * clipped_ratio)
    # With the other sign of A the maximum takes the unclipped term.
    clipped_above = above & (inputs.advantages > 0)
    clipped_below = below & (inputs.advantages < 0)
    return TokenLosses(losses, ratio, {"clip_fraction": clipped_above, "clip_fraction_low": clipped_below})


def shared_ratio(log_ratio: Tensor, mean: Tensor) -> Tensor:
    """Return GSPO's ratio exp(mean), (B, T). `mean`: the mean log ratio of the token's sequence or turn.

    Each token's value has the gradient of this token's logprob alone, so that tokens with one ratio may have different
    advantages. Ratios 2 and 0.5 -> 1 at both tokens; d value / d logprob is 1 at the same token and 0 at the other.
    """
    # log_ratio - log_ratio.detach() is 0: it adds only the gradient.
    return (mean + (log_ratio - log_ratio.detach())).exp()


def mean_over_sequence(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each row's loss tokens, (B, 1); 0 for a row without any."""
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def mean_over_turns(values: Tensor, mask: Tensor, starts_context: Tensor | None = None) -> Tensor:
    """Return the mean over the loss tokens of each token's turn, (B, T). Values at mask-0 tokens do not matter.

    A turn is a run of loss tokens. A tool result (mask 0) ends it, and so does a new context: no token lies between a
    note (rollout.context) and the turn after it.
    values [1, 3, 9, 5], mask [1, 1, 0, 1] -> [2, 2, 2, 5].
    """
    starts = mask.int().diff(dim=-1, prepend=mask.new_zeros(len(mask), 1).int()) > 0
    if starts_context is not None:
        starts = starts | starts_context
    turn_ids = starts.cumsum(-1)  # (B, T) from 1; 0 before the first turn
    # An exception to the rule in update_policy: int() makes the host wait for the GPU, but a size must be an int.
    all_ids = torch.arange(int(turn_ids.max()) + 1, device=mask.device)  # (turns + 1,)
    is_in = (turn_ids[..., None] == all_ids) & mask[..., None]  # (B, T, turns + 1)
    # Not scatter_add: on a GPU its order of summation is not fixed, so a run could not be repeated.
    sums = torch.where(is_in, values[..., None], 0.0).sum(1)  # (B, turns + 1)
    means = sums / is_in.sum(1).clamp(min=1)
    return means.gather(1, turn_ids)


def aggregate(token_loss: Tensor, mask: Tensor, aggregation: str, denominator: float | None) -> Tensor:
    """Aggregate token losses (B, T) to a scalar: the sum of AGGREGATIONS[aggregation], divided by `denominator`.

    denominator: see `policy_loss`; None = the count of these rows, at least 1.
    """
    # torch.where, not a product: 0 * inf would be NaN, and the gradient of a masked token must be exactly 0.
    row_sums, _ = sums_and_counts(torch.where(mask.bool(), token_loss, 0.0), mask, aggregation)
    if denominator is None:
        denominator = loss_denominator(mask, aggregation).clamp(min=1)
    return row_sums.sum() / denominator


def loss_denominator(mask: Tensor, aggregation: str) -> Tensor:
    """Return the share of the given rows in the global count, 0-dim: loss tokens, or sequences with at least one.

    mask [[1, 1], [0, 0]] -> 2 for token_mean, 1 for the sequence means.
    """
    _, counts = sums_and_counts(torch.zeros_like(mask, dtype=torch.float32), mask, aggregation)
    return counts.sum()


def sums_and_counts(losses: Tensor, mask: Tensor, aggregation: str) -> tuple[Tensor, Tensor]:
    """Return each row's sum and count, (B,) each. Raises UserError if a custom aggregation returns other shapes."""
    option = f"loss.aggregation={aggregation}"
    returned = call_named("loss.aggregation", aggregation, AGGREGATIONS, losses, mask)
    sums, counts = checked_instance(returned, f"{option}: the returned value", tuple, length=2)
    shape = (len(mask),)
    checked_tensor(sums, f"{option}: the rows' sums", shape)
    checked_tensor(counts, f"{option}: the rows' counts", shape)
    # A row without loss tokens only fills an empty micro-batch, so it must not count: not even under an aggregation
    # that gives every row the same count.
    return sums, torch.where(mask.bool().any(-1), counts, 0)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "token_mean": lambda losses, mask: (losses.sum(-1), mask.sum(-1)),
    "sequence_mean_token_sum": lambda losses, mask: (losses.sum(-1), mask.sum(-1) > 0),
    "sequence_mean_token_mean": lambda losses, mask: (losses.sum(-1) / mask.sum(-1).clamp(min=1), mask.sum(-1) > 0),
}
"""Losses (0 where the mask is 0) and mask, (B, T) each -> each row's sum and its share of the denominator, (B,)."""


def token_moments(values: Tensor) -> Tensor:
    """Return count, sum and sum of squares of the loss tokens' values (L,), as (3,) float64.

    Add them up over micro-batches and ranks for `mean_and_std`.
    """
    values = values.detach().double()
    return torch.stack([values.new_full((), values.numel()), values.sum(), values.square().sum()])


def mean_and_std(moments: Tensor) -> tuple[float, float]:
    """Return (mean, unbiased standard deviation) from `token_moments`. The deviation of a single token is 1.

    Entropies 1 and 3 -> (2, 1.414).
    """
    count, total, squares = moments.tolist()
    if count < 2:
        return total, 1.0
    mean = total / count
    variance = max((squares - count * mean * mean) / (count - 1), 0.0)
    return mean, variance**0.5


def token_means(per_token: dict[str, Tensor], mask: Tensor) -> Metrics:
    """Return the mean of each (B, T) tensor over the loss tokens. With weight 0, rows without any add nothing."""
    metrics = Metrics()
    num_tokens = mask.sum().double()
    for name, values in per_token.items():
        total = torch.where(mask, values.float(), 0.0).sum()
        metrics.mean(name, total / num_tokens.clamp(min=1), weight=num_tokens)
    return metrics


ENTROPY_STEP = 0.001
"""Change of the entropy coefficient per training step, with loss.entropy_target."""


class EntropyTarget:
    """The entropy bonus that holds the policy's entropy at `loss.entropy_target`; a constant bonus without a target.

    After a step with less entropy than the target the bonus's coefficient grows by ENTROPY_STEP. After one with more it
    falls by as much, but never below 0. Target 0.3, coefficient 0, entropies 0.2, 0.2, 0.4 -> 0.001, 0.002, 0.001.
    """

    def __init__(self, cfg: LossConfig, entropies: Iterable[float] = ()):
        """entropies: mean entropy (nats) of each step that a resumed run has done before."""
        self.loss_cfg = cfg
        """The options of the loss, with the coefficient for the next step."""
        for entropy in entropies:
            self.add(entropy)

    def add(self, entropy: float | None) -> None:
        """Take the mean entropy (nats) of a step; None if the step updated nothing."""
        if self.loss_cfg.entropy_target is None or entropy is None:
            return
        change = math.copysign(ENTROPY_STEP, self.loss_cfg.entropy_target - entropy)
        self.loss_cfg = replace(self.loss_cfg, entropy_coefficient=max(self.loss_cfg.entropy_coefficient + change, 0.0))
