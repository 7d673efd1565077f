"""Computes logprobs and entropies from hidden states, a chunk of tokens at a time.

The logits (tokens, vocabulary) of a micro-batch of 16k tokens with a vocabulary of 152k take 10 GB in float32, and
autograd needs several copies. Here logits exist for `chunk_tokens` tokens only: in the forward pass, and again
(recomputed) in the backward pass. `sampled_and_entropy` is for vLLM's side, which has a step's logits or their
log-softmax anyway.

Legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CACHED_LOGITS = 1 << 20
"""Number of float32 logits that fit into a CPU's caches, so that several passes over them are fast."""
WIDENED = 4096
"""Rows or columns of a half-precision matrix that a CPU converts to float32 at a time."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 1024
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and the entropy (nats) of p = softmax(hidden @ weight.T / temperature), (N,) float32 each.

    hidden (N, D), weight (V, D), targets (N,) int64. Both outputs have exact gradients. The softmax is in float32,
    whatever the dtype of the inputs. N = 0 still gives gradients, which are 0. At temperature 1 the entropy is that of
    the policy itself.
    """
    logprobs, entropies, _ = scored_logprobs(
        hidden, weight, targets, None, temperature=temperature, chunk_tokens=chunk_tokens
    )
    return logprobs, entropies


def scored_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    directions: Tensor | None,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `token_logprobs` and the scores (N, R) = (d log p(target) / d hidden) @ directions.

    directions (D, R) projects the gradient; None = no scores. The scores are not differentiable, and cost R / D of the
    logits' cost.
    """
    assert hidden.ndim == 2 and weight.ndim == 2 and targets.shape == hidden.shape[:1], (hidden.shape, targets.shape)
    projected = None
    if directions is not None:
        # In the weight's dtype: a float32 copy for a vocabulary of 152k would take another 2 GB.
        projected = matmul(weight.detach(), directions.to(weight.dtype)) / temperature  # (V, R)
    return _ChunkedHead.apply(hidden, weight, targets, projected, float(temperature), int(chunk_tokens))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b as float32, whatever their dtype. (Logits of 20 in bfloat16 would be wrong by up to 0.06.)

    CUDA's matmul can return its float32 accumulator. A CPU's rounds it. So on a CPU the factors are converted to
    float32 first; the longer one, which has the vocabulary, a part at a time.
    """
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    product = torch.empty(len(a), b.shape[1], dtype=torch.float32)
    if len(a) > b.shape[1]:
        b = b.float()
        for rows, out in zip(a.split(WIDENED), product.split(WIDENED), strict=True):
            torch.mm(rows.float(), b, out=out)
        return product
    a = a.float()
    for columns, out in zip(b.split(WIDENED, dim=1), product.split(WIDENED, dim=1), strict=True):
        out.copy_(a @ columns.float())
    return product


def blocks(logits: Tensor) -> list[slice]:
    """Cut the rows of (N, V) logits into blocks. On a CPU a block fits into the caches: a dozen passes read it."""
    size = max(1, len(logits) if logits.is_cuda else CACHED_LOGITS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


class _ChunkedHead(torch.autograd.Function):
    """`scored_logprobs`, with `projected` = directions in the vocabulary's space, (V, R), or None."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, projected, temperature, chunk_tokens):
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        log_normalizer = torch.empty_like(logprobs)
        # d log p(y) / d hidden = weight[y] - E[weight], so the score is projected[y] - E[projected].
        scores = None if projected is None else projected[targets]  # (N, R)
        for start in range(0, len(hidden), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = matmul(hidden[chunk], weight.t())  # (chunk, V)
            for rows in blocks(logits):
                # the block's position among all N tokens
                block = slice(start + rows.start, min(start + rows.stop, start + len(logits)))
                logprobs[block], entropy[block], log_normalizer[block], expected = chunk_statistics(
                    logits[rows], targets[block], temperature, projected
                )
                if scores is not None:
                    scores[block] -= expected
            del logits  # now, because two chunks' logits must not exist at the same time
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.temperature = temperature
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)  # the gradient of an unused output is None: most losses use one of the two
        if scores is not None:
            ctx.mark_non_differentiable(scores)
        return logprobs, entropy, scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _):
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        weight_is_trained = ctx.needs_input_grad[1]  # False with LoRA, which saves half of the work
        grad_weight = None
        if weight_is_trained:
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, len(hidden), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logits = matmul(hidden[chunk], weight.t())
            of_tokens = targets, log_normalizer, entropy, grad_logprobs, grad_entropy
            all_rows = blocks(logits)
            grad_logits = logits  # each block's gradient overwrites its logits
            if len(all_rows) > 1 and logits.dtype != weight.dtype:  # bfloat16 on a CPU
                grad_logits = torch.empty_like(logits, dtype=weight.dtype)
            for rows in all_rows:
                of_rows = (values if values is None else values[chunk][rows] for values in of_tokens)
                grad = chunk_gradient(logits[rows], *of_rows, temperature=ctx.temperature, dtype=weight.dtype)
                if len(grad) == len(logits):
                    grad_logits = grad
                else:
                    grad_logits[rows] = grad
            grad_hidden[chunk] = grad_logits @ weight
            if weight_is_trained:
                grad_weight += matmul(grad_logits.t(), hidden[chunk])
            del logits, grad, grad_logits  # now, because two chunks' must not exist at the same time
        if weight_is_trained:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def chunk_statistics(
    logits: Tensor, targets: Tensor, temperature: float, projected: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return (logprobs of the targets, entropies, log normalizers, E[projected]) of (N, V) logits.

    The first three are (N,). E[projected] is the mean of `projected` (V, R) under the distribution, (N, R). The logits
    may be overwritten.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits.div_(temperature)
    log_normalizer = logits.logsumexp(-1)
    log_p = logits.sub_(log_normalizer[:, None])
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    probs = log_p.exp()
    expected = None if projected is None else probs @ projected
    return logprobs, -probs.mul_(log_p).sum(-1), log_normalizer, expected


def chunk_gradient(
    logits: Tensor,
    targets: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    *,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient with respect to the logits, (N, V). The logits may be overwritten. With
    z = logits / temperature and p = softmax(z):

    d log p(y) / dz = onehot(y) - p;    dH / dz = -p * (log p + H), H the entropy of p
    """
    logits = logits.float()
    if temperature != 1.0:
        logits.div_(temperature)
    log_p = logits.sub_(log_normalizer[:, None])
    # The inner derivative of z = logits / temperature, applied to (N,) instead of (N, V).
    if grad_logprobs is not None:
        grad_logprobs = grad_logprobs[:, None] / temperature
    if grad_entropy is not None:
        grad_entropy = grad_entropy[:, None] / temperature
    if grad_entropy is None:
        grad = log_p.exp_().mul_(-grad_logprobs)
    else:
        coefficient = -grad_entropy * entropy[:, None]
        if grad_logprobs is not None:
            coefficient = coefficient - grad_logprobs
        probs = log_p.exp()
        grad = log_p.mul_(-grad_entropy).add_(coefficient).mul_(probs)
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], grad_logprobs)
    return grad.to(dtype)


def sampled_and_entropy(logprobs: Tensor, token_ids: Tensor, num_top: int, temperature: float) -> Tensor:
    """Return (N, 2 + num_top): [sampled logprob, entropy, top 1, ..., top K] of (N, V) log-softmax at temperature 1.

    The sampled logprob is under softmax(logits / T). Log-softmax may take the place of the logits, since they differ by
    a constant per row. Greedy sampling (T = 0) reports the distribution at T = 1.
    """
    sampled = logprobs.gather(-1, token_ids.unsqueeze(-1))  # (N, 1)
    if temperature not in (0, 1):
        sampled = sampled / temperature - torch.logsumexp(logprobs / temperature, dim=-1, keepdim=True)
    entropy = -(logprobs.exp() * logprobs).sum(-1, keepdim=True)
    return torch.cat([sampled, entropy, logprobs.topk(num_top, dim=-1).values], dim=-1)


def sampled_and_entropy_on_cpu(
    logits: Tensor, token_ids: Tensor, num_top: int, temperature: float, measured: Tensor
) -> Tensor:
    """Return `sampled_and_entropy` from (N, V) float32 logits, a few rows at a time, which fit into a CPU's caches.

    Entropy and top logprobs are computed in the rows `measured`, (M,) int64, and are NaN in the others.
    """
    temperature = temperature or 1.0
    size = max(1, CACHED_LOGITS // logits.shape[1])
    tempered = (rows / temperature for rows in logits.split(size))
    normalizers = torch.cat([rows.logsumexp(-1, keepdim=True) for rows in tempered])
    sampled = logits.gather(-1, token_ids.unsqueeze(-1)) / temperature - normalizers  # (N, 1)
    outputs = torch.cat([sampled, logits.new_full((len(logits), 1 + num_top), torch.nan)], dim=-1)
    for rows in measured.split(size):
        outputs[rows, 1:] = sampled_and_entropy(logits[rows].log_softmax(-1), token_ids[rows], num_top, 1.0)[:, 1:]
    return outputs
