"""Ulysses (Jacobs et al., arXiv 2309.14509): the tokens of a micro-batch spread over the P ranks of a group.

Everything but attention works on a rank's own N / P tokens, and its loss is theirs. Around attention two
all-to-alls trade places: a rank gets all N tokens of H / P heads, and gives back its own tokens of all H heads. So a
row that no GPU could hold alone is trained on P of them, and the block-diagonal mask of packed rows stays what it is.

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
class PartBatch(MicroBatch):
    """One rank's part of a MicroBatch: its own tokens, and a loss mask of those that they predict. `paths` are still of
    all tokens, padded to a multiple of the group."""

    group: dist.ProcessGroup

    def attention_options(self) -> dict[str, Any]:
        return {"paths": self.paths.for_one_pass(), "group": self.group}


def spread(micros: list[MicroBatch], group: dist.ProcessGroup | None) -> list[MicroBatch]:
    """Return this rank's parts of micro-batches that all ranks of the group have; all of them if there is no group."""
    return micros if group is None else [part_of(micro, group) for micro in micros]


def part_of(micro: MicroBatch, group: dist.ProcessGroup) -> PartBatch:
    """Return this rank's part of a micro-batch on the CPU. Padding, at the end, counts as rows of one token, which no
    other token sees."""
    num_ranks, rank, num_tokens = dist.get_world_size(group), dist.get_rank(group), micro.input_ids.shape[1]
    padding = -num_tokens % num_ranks
    input_ids, position_ids = (F.pad(ids, (0, padding)) for ids in (micro.input_ids, micro.position_ids))
    num_own = input_ids.shape[1] // num_ranks
    own = slice(rank * num_own, (rank + 1) * num_own)
    predict_from = micro.predict_from - own.start
    num_real = max(0, min(own.stop, num_tokens) - own.start)
    loss_mask = micro.loss_mask & (predict_from >= 0) & (predict_from < num_own)
    changed = {
        "input_ids": input_ids[:, own],
        "paths": micro.paths.padded(padding),
        "position_ids": position_ids[:, own],
        "predict_from": predict_from * loss_mask,
        "loss_mask": loss_mask,
        "loss_index": index_of(loss_mask),
        "num_row_tokens": micro.num_row_tokens * num_real // num_tokens,
        "rollout_logprobs": micro.rollout_logprobs * loss_mask,
    }
    # Of a tree too the (B, T) fields are enough; only the head scores what rows share once for each of them then.
    whole = {field.name: getattr(micro, field.name) for field in fields(MicroBatch)}
    return PartBatch(**whole | changed, group=group)


def ulysses(attention: str) -> str:
    """Make attention work on parts, and return its name in transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = register(attention)
    inner = ALL_ATTENTION_FUNCTIONS[name]

    def attend(module, query, key, value, attention_mask, *, group: dist.ProcessGroup, **options):
        query, key, value = (Exchange.apply(x, group, True) for x in (query, key, value))
        out, weights = inner(module, query, key, value, None, **options)  # (1, N, H / P, head size)
        return Exchange.apply(out.transpose(1, 2), group, False).transpose(1, 2).contiguous(), weights

    ALL_ATTENTION_FUNCTIONS.register(PREFIX + name, torch.compiler.disable(attend))
    return PREFIX + name


def check_model(config: Any, num_ranks: int) -> None:
    """Raise UserError where the heads cannot be dealt out evenly, or a layer does not attend to its whole row."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
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
    """Exchange tokens for heads: (1, H, N / P, d), own tokens of all heads, -> (1, H / P, N, d), all tokens of own
    heads; or the way back."""

    @staticmethod
    def forward(ctx, x, group, to_heads):
        ctx.group, ctx.to_heads = group, to_heads
        return exchange(x, group, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return exchange(grad, ctx.group, not ctx.to_heads), None, None


def exchange(x: torch.Tensor, group: dist.ProcessGroup, to_heads: bool) -> torch.Tensor:
    num_ranks = dist.get_world_size(group)
    _, heads, tokens, size = x.shape
    if to_heads:
        send = x.reshape(num_ranks, heads // num_ranks, tokens, size)  # by destination: whose heads
    else:
        send = x.reshape(heads, num_ranks, tokens // num_ranks, size).transpose(0, 1)  # by destination: whose tokens
    send = send.contiguous()
    received = torch.empty_like(send)  # by source
    dist.all_to_all_single(received, send, group=group)
    if to_heads:
        return received.transpose(0, 1).reshape(1, heads // num_ranks, tokens * num_ranks, size)
    return received.reshape(1, heads * num_ranks, tokens // num_ranks, size)
