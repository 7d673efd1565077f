"""Computes logprobs and entropies from hidden states, a chunk of tokens at a time.

The (tokens, vocab) logits of one 16k-token micro-batch with a 152k vocabulary are 10 GB in float32, and autograd wants
several copies. Here they exist for `chunk_tokens` tokens only, in forward and again (recomputed) in backward.
`sampled_and_entropy` is the sampler's side: vLLM has a step's logits, or their log-softmax, anyway.

Legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CACHED_LOGITS = 1 << 20
"""Logits, in float32, that stay in a CPU's caches while one pass after the other goes over them."""
WIDENED = 4096
"""Rows or columns of a half-precision matrix that are widened at a time, on a CPU."""


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 1024
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and the entropy (nats) of p = softmax(hidden @ weight.T / temperature), (N,) float32 each.

    hidden (N, D), weight (V, D), targets (N,) int64. Both outputs have exact gradients; softmax runs in float32
    whatever the inputs' dtype. N = 0 still gives (zero) gradients. The entropy is the policy's own at temperature 1.
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
    """Return `token_logprobs`, and the scores (N, R): the gradient of log p(target) by the hidden state, projected.

    directions (D, R) is the projection: scores = (d log p(target) / d hidden) @ directions, without a gradient of their
    own. They cost R / D of what the logits cost. None = no scores.
    """
    assert hidden.ndim == 2 and weight.ndim == 2 and targets.shape == hidden.shape[:1], (hidden.shape, targets.shape)
    projected = None
    if directions is not None:  # in the weight's dtype: widened, a vocabulary of 152k would take another 2 GB
        projected = matmul(weight.detach(), directions.to(weight.dtype)) / temperature  # (V, R)
    return _ChunkedHead.apply(hidden, weight, targets, projected, float(temperature), int(chunk_tokens))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b as float32, whatever their dtype: logits of 20 in bfloat16 are wrong by up to 0.06.

    CUDA's matmul gives its accumulator. A CPU's rounds it, so there the factors are widened, a part at a time of the
    longer side, which is the vocabulary.
    """
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    product = torch.empty(len(a), b.shape[1], dtype=torch.float32)
    if len(a) > b.shape[1]:
        whole = b.float()
        for rows, out in zip(a.split(WIDENED), product.split(WIDENED), strict=True):
            torch.mm(rows.float(), whole, out=out)
        return product
    whole = a.float()
    for columns, out in zip(b.split(WIDENED, dim=1), product.split(WIDENED, dim=1), strict=True):
        out.copy_(whole @ columns.float())
    return product


def blocks(logits: Tensor) -> list[slice]:
    """Cut the rows of (N, V) logits for the dozen passes over them: on a CPU into blocks that its caches hold."""
    size = max(1, len(logits) if logits.is_cuda else CACHED_LOGITS // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, projected, temperature, chunk_tokens):
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, log_normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        scores = None if projected is None else projected[targets]  # (N, R)
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = matmul(hidden[part], weight.t())  # (chunk, V)
            for rows in blocks(logits):
                at = slice(start + rows.start, min(start + rows.stop, start + len(logits)))
                logprobs[at], entropy[at], log_normalizer[at], expected = chunk_statistics(
                    logits[rows], targets[at], temperature, projected
                )
                if scores is not None:
                    scores[at] -= expected
            del logits  # before the next chunk's, which would be there beside them
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)  # most losses use only one of the two outputs
        if scores is not None:
            ctx.mark_non_differentiable(scores)
        return logprobs, entropy, scores

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _):
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        learns = ctx.needs_input_grad[1]  # not with LoRA, and then half of the work is saved
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if learns else None
        for start in range(0, len(hidden), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            logits = matmul(hidden[part], weight.t())
            of_tokens = targets, log_normalizer, entropy, grad_logprobs, grad_entropy
            parts = blocks(logits)
            grad_logits = logits  # a block's gradient takes its place
            if len(parts) > 1 and logits.dtype != weight.dtype:  # of bfloat16 on a CPU
                grad_logits = torch.empty_like(logits, dtype=weight.dtype)
            for rows in parts:
                of_rows = (values if values is None else values[part][rows] for values in of_tokens)
                grad = chunk_gradient(logits[rows], *of_rows, ctx.temperature, weight.dtype)
                if len(grad) == len(logits):
                    grad_logits = grad
                else:
                    grad_logits[rows] = grad
            grad_hidden[part] = grad_logits @ weight
            if learns:
                grad_weight += matmul(grad_logits.t(), hidden[part])
            del logits, grad, grad_logits  # before the next chunk's, which would be there beside them
        return grad_hidden, grad_weight.to(weight.dtype) if learns else None, None, None, None, None


def chunk_statistics(
    logits: Tensor, targets: Tensor, temperature: float, projected: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return logprobs of the targets, entropies, log normalizers, (N,) each, and the mean of `projected` (V, R) under
    the distribution, (N, R). The (N, V) logits may be overwritten."""
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
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the (N, V) gradient of the logits, which it may overwrite. With z = logits / temperature, p = softmax(z):

    d log p(y) / dz = onehot(y) - p;    dH / dz = -p * (log p + H), H the entropy of p
    """
    logits = logits.float()
    if temperature != 1.0:
        logits.div_(temperature)
    log_p = logits.sub_(log_normalizer[:, None])
    # z = logits / temperature: the inner derivative, on (N,) instead of (N, V)
    grad_logprobs, grad_entropy = (g if g is None else g[:, None] / temperature for g in (grad_logprobs, grad_entropy))
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

    The sampled logprob is that of softmax(logits / T), where log-softmax stands in for the logits: they differ by a
    constant per row. Greedy sampling (T = 0) reports the distribution at T = 1.
    """
    sampled = logprobs.gather(-1, token_ids.unsqueeze(-1))  # (N, 1)
    if temperature not in (0, 1):
        sampled = sampled / temperature - torch.logsumexp(logprobs / temperature, dim=-1, keepdim=True)
    entropy = -(logprobs.exp() * logprobs).sum(-1, keepdim=True)
    return torch.cat([sampled, entropy, logprobs.topk(num_top, dim=-1).values], dim=-1)


def sampled_and_entropy_on_cpu(
    logits: Tensor, token_ids: Tensor, num_top: int, temperature: float, measured: Tensor
) -> Tensor:
    """Return the same from (N, V) float32 logits; all but the sampled logprob is NaN in rows that are not `measured`,
    (M,) int64. Few rows at a time stay in a CPU's caches.
    """
    temperature = temperature or 1.0
    size = max(1, CACHED_LOGITS // logits.shape[1])
    tempered = (part / temperature for part in logits.split(size))
    normalizers = torch.cat([part.logsumexp(-1, keepdim=True) for part in tempered])
    sampled = logits.gather(-1, token_ids.unsqueeze(-1)) / temperature - normalizers  # (N, 1)
    found = torch.cat([sampled, logits.new_full((len(logits), 1 + num_top), torch.nan)], dim=-1)
    for rows in measured.split(size):
        found[rows, 1:] = sampled_and_entropy(logits[rows].log_softmax(-1), token_ids[rows], num_top, 1.0)[:, 1:]
    return found
