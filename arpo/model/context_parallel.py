"""Ulysses (Jacobs et al., arXiv 2309.14509): the N tokens of a micro-batch are spread over the P ranks of a group.

Outside of attention each rank works on N / P tokens, and computes the loss of these. Two all-to-alls around attention
exchange tokens for heads. The first gives each rank all N tokens of H / P heads, and the second N / P tokens of all H
heads. So P GPUs together train a row that is too long for a single GPU. Attention sees all rows, with the usual masks.

    tokens 0 1 2 3 on rank 0, 4 5 6 7 on rank 1   ->   heads 0 1 of tokens 0..7 on rank 0, heads 2 3 on rank 1
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from arpo.batch import MicroBatch, index_of
from arpo.errors import UserError
from arpo.model.attention import register

PREFIX = "ulysses_"


@dataclass(kw_only=True)
class LocalBatch(MicroBatch):
    """A rank's share of a MicroBatch: N / P tokens, and the loss mask of the tokens predicted from this share.

    `paths` still describes all tokens, with padding to a multiple of P.
    """

    group: dist.ProcessGroup

    def attention_options(self) -> dict[str, Any]:
        return {"paths": self.paths.for_one_pass(), "group": self.group}


def local_shares(micros: list[MicroBatch], group: dist.ProcessGroup | None) -> list[MicroBatch]:
    """Return this rank's shares of micro-batches. All ranks of the group pass the same. Without a group, return all."""
    return micros if group is None else [local_share(micro, group) for micro in micros]


def local_share(micro: MicroBatch, group: dist.ProcessGroup) -> LocalBatch:
    """Return this rank's share of a micro-batch. The micro-batch must still be on the CPU (`index_of`).

    Padding at the end counts as rows of one token, which no other token attends to.
    """
    num_ranks = dist.get_world_size(group)
    rank = dist.get_rank(group)
    num_tokens = micro.input_ids.shape[1]
    padding = -num_tokens % num_ranks
    input_ids = F.pad(micro.input_ids, (0, padding))
    position_ids = F.pad(micro.position_ids, (0, padding))

    # ---- this rank's tokens, and the loss tokens that they predict
    num_local = input_ids.shape[1] // num_ranks
    local = slice(rank * num_local, (rank + 1) * num_local)
    num_without_padding = max(0, min(local.stop, num_tokens) - local.start)
    predict_from = micro.predict_from - local.start
    loss_mask = micro.loss_mask & (predict_from >= 0) & (predict_from < num_local)
    changed = {
        "input_ids": input_ids[:, local],
        "paths": micro.paths.padded(padding),
        "position_ids": position_ids[:, local],
        "predict_from": predict_from * loss_mask,
        "loss_mask": loss_mask,
        "loss_index": index_of(loss_mask),
        "num_row_tokens": micro.num_row_tokens * num_without_padding // num_tokens,
        "rollout_logprobs": micro.rollout_logprobs * loss_mask,
    }
    # MicroBatch's fields suffice for a TreeBatch, too. But the head then scores a shared token once per row.
    unchanged = {field.name: getattr(micro, field.name) for field in fields(MicroBatch)}
    return LocalBatch(**unchanged | changed, group=group)


def ulysses(attention: str) -> str:
    """Register attention with the two all-to-alls, and return its name in transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = register(attention)
    inner = ALL_ATTENTION_FUNCTIONS[name]

    def attend(module, query, key, value, attention_mask, *, group: dist.ProcessGroup, **options):
        query, key, value = (Exchange.apply(x, group, True) for x in (query, key, value))  # (1, H / P, N, head size)
        out, weights = inner(module, query, key, value, None, **options)  # (1, N, H / P, head size)
        out = Exchange.apply(out.transpose(1, 2), group, False)  # (1, H, N / P, head size)
        return out.transpose(1, 2).contiguous(), weights

    ALL_ATTENTION_FUNCTIONS.register(PREFIX + name, torch.compiler.disable(attend))
    return PREFIX + name


def check_model(config: Any, num_ranks: int) -> None:
    """Raise UserError if the ranks cannot have equal numbers of heads, or if a layer does not have full attention."""
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if heads % num_ranks or kv_heads % num_ranks:
        fits = [str(n) for n in range(1, kv_heads + 1) if not heads % n and not kv_heads % n]
        raise UserError(
            f"model.context_parallel={num_ranks}: {heads} heads and {kv_heads} key-value heads cannot be dealt out to "
            f"so many ranks; this model allows {', '.join(fits)}"
        )
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise UserError(
            f"model.context_parallel needs full attention in all layers, which {config.model_type} has not; set it to 1"
        )


class Exchange(torch.autograd.Function):
    """Exchange tokens for heads: (1, H, N / P, d), this rank's tokens, -> (1, H / P, N, d), this rank's heads.

    With `to_heads` False the way back. The backward pass goes in the other direction.
    """

    @staticmethod
    def forward(ctx, x, group, to_heads):
        ctx.group = group
        ctx.to_heads = to_heads
        return exchange(x, group, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return exchange(grad, ctx.group, not ctx.to_heads), None, None


def exchange(x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
    """Do the exchange of `Exchange`, without a gradient. Collective over the group."""
    num_ranks = dist.get_world_size(group)
    _, heads, tokens, size = x.shape
    if to_heads:
        send = x.reshape(num_ranks, heads // num_ranks, tokens, size)  # first dimension: the rank of these heads
    else:
        send = x.reshape(heads, num_ranks, tokens // num_ranks, size).transpose(0, 1)  # the rank of these tokens
    send = send.contiguous()
    received = torch.empty_like(send)  # first dimension: the sender
    dist.all_to_all_single(received, send, group=group)
    if to_heads:
        return received.transpose(0, 1).reshape(1, heads // num_ranks, tokens * num_ranks, size)
    return received.reshape(1, heads * num_ranks, tokens // num_ranks, size)
