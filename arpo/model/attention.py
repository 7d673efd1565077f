"""Attention in micro-batches, row by row, so that no mask over all tokens exists, and no work is done for nothing.

The queries of a row are the tokens that it has for itself; its keys are its whole path, from the prompt's first token
to its own last. In flat packing both are the row. In a tree (tree.py) a row begins with tokens of an earlier one, which
are its keys, but are computed once. Two rows a b c d e and a b c x, as a tree of the tokens a b c d e x:

    queries   0 1 2 3 4 | 5             consecutive, row after row
    keys      0 1 2 3 4 | 0 1 2 5       gathered where rows share tokens
    causal    the last query of a row sees all its keys, the one before all but the last, ...

The kernel is SDPA once for each row, or one for rows of many lengths, once for all: torch's own (varlen_attn) or that
of the flash-attn package. Both are FlashAttention 2, whose causal mask ends at the last query and the last key, as ours
does (torch: aten/src/ATen/native/transformers/cuda/flash_attn/mask.h).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arpo.batch import RowPaths
from arpo.config.sections import ModelConfig, UpdateConfig
from arpo.errors import UserError

BY_ROW = {"sdpa": "rows_by_sdpa", "varlen": "rows_by_varlen", "flash_attention_2": "rows_by_fa2"}
"""model.attention -> our name for it in transformers (which would treat a name with "flash" in it on its own)."""


def attention_backend(cfg: ModelConfig, device: torch.device) -> str:
    """Return model.attention with "auto" decided. Raises UserError for one that cannot work here."""
    from transformers.utils import is_flash_attn_2_available

    attention = cfg.attention
    if attention == "auto":
        return "varlen" if cfg.compute_dtype == "bfloat16" and has_flash_kernels(device) else "sdpa"
    if attention == "sdpa":
        return attention
    if device.type != "cuda":
        raise UserError(f"model.attention={attention} needs a GPU; use auto or sdpa")
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError("model.attention=flash_attention_2 needs the flash-attn package; use auto or sdpa")
    if cfg.compute_dtype == "float32":
        raise UserError(f"model.attention={attention} needs model.compute_dtype=bfloat16; set it, or use sdpa")
    if not has_flash_kernels(device):
        raise UserError(
            f"model.attention={attention} needs a GPU of compute capability 8.0 (A100) or newer; use auto or sdpa"
        )
    return attention


def has_flash_kernels(device: torch.device) -> bool:
    """Return whether FlashAttention's kernels, which know half precision only, run on this device.

    AMD's align causal masks in a way that nobody has tried here with trees.
    """
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def resolve_layout(cfg: UpdateConfig, group_size: int) -> UpdateConfig:
    """Return `cfg` with layout "auto" decided. Without branches a group still shares its prompt."""
    if cfg.layout != "auto":
        return cfg
    return replace(cfg, layout="packed" if group_size == 1 else "tree")


def register(attention: str) -> str:
    """Teach transformers to attend row by row, and return the name for its configs."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # From Hopper on SDPA prefers cuDNN, which plans anew for each shape (up to a second), and each row has another
    # length. vLLM switches it off for its process anyway: without this, SFT would run another kernel than RL does.
    torch.backends.cuda.enable_cudnn_sdp(False)
    kernels = {"sdpa": attend_by_sdpa, "varlen": attend_by_varlen, "flash_attention_2": attend_by_flash_attn}
    for kernel, attend in kernels.items():
        # torch.compile would compile it anew for each batch, whose rows are other ones.
        ALL_ATTENTION_FUNCTIONS.register(BY_ROW[kernel], torch.compiler.disable(with_rows_only(attend)))
    return BY_ROW[attention]


def with_rows_only(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Return `attend` as transformers calls it, for layers that pass on the rows, and have no mask of their own. Others
    raise UserError."""

    def attend_rows(module, query, key, value, attention_mask, *, paths: RowPaths | None = None, **options: Any):
        if paths is None or attention_mask is not None:
            raise UserError(f"model.path: {type(module).__name__} cannot attend row by row, so it is not supported")
        unknown = {name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None}
        assert not unknown, f"attention by rows does not know {', '.join(unknown)}"
        assert not options.get("dropout"), "settled_config has switched it off"
        return attend(query, key, value, paths, options.get("scaling"), options.get("sliding_window")), None

    return attend_rows


def attend_by_sdpa(
    query: Tensor, key: Tensor, value: Tensor, paths: RowPaths, scale: float | None, window: int | None
) -> Tensor:
    """Return (1, N, H, d) of queries (1, H, N, d), keys and values (1, H / group, N, d)."""
    keys, values = (gathered(x, paths.keys, dim=2).split(paths.num_keys, dim=2) for x in (key, value))
    outs = []
    for row, (q, k, v) in enumerate(zip(query.split(paths.num_queries, dim=2), keys, values, strict=True)):
        mask = paths.mask(row, window, like=q)
        if q.is_cuda and (mask is not None or q.dtype == torch.float32):
            # Of the GPU's kernels only flash's knows grouped heads, and it takes no masks and no float32. The
            # memory-efficient one takes both, and without it all scores would be written down.
            k, v = (repeated(x, q.shape[1], dim=1) for x in (k, v))
        outs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2)


def attend_by_varlen(
    query: Tensor, key: Tensor, value: Tensor, paths: RowPaths, scale: float | None, window: int | None
) -> Tensor:
    """Attend as `attend_by_sdpa` does, by torch's varlen_attn.

    Not yet run on a GPU: tests/fake_gpu calls the real function, over kernels of its own.
    """
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, d)
    key, value = (gathered(x, paths.keys, dim=0) for x in (key, value))
    if not varlen_groups_heads():
        key, value = (repeated(x, query.shape[1], dim=1) for x in (key, value))
    out = varlen_attn(
        query,
        key,
        value,
        paths.query_starts,
        paths.key_starts,
        max(paths.num_queries),
        max(paths.num_keys),
        scale=scale,
        window_size=(window - 1 if window else -1, 0),  # keys before the query's own, and after it: causal
        **({"enable_gqa": True} if varlen_groups_heads() else {}),
    )
    return out[None]


@functools.cache
def varlen_groups_heads() -> bool:
    """Return whether varlen_attn knows queries that share key-value heads, as it does from torch 2.12 on."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend_by_flash_attn(
    query: Tensor, key: Tensor, value: Tensor, paths: RowPaths, scale: float | None, window: int | None
) -> Tensor:
    """Attend as `attend_by_sdpa` does, with the flash-attn package."""
    from flash_attn import flash_attn_varlen_func

    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, d)
    out = flash_attn_varlen_func(
        query,
        gathered(key, paths.keys, dim=0),
        gathered(value, paths.keys, dim=0),
        paths.query_starts,
        paths.key_starts,
        max(paths.num_queries),
        max(paths.num_keys),
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
    )
    return out[None]


def gathered(x: Tensor, index: Tensor | None, dim: int) -> Tensor:
    """Return x at `index`; the gradients of a token that many rows see are summed in float32."""
    return x if index is None else x.float().index_select(dim, index).to(x.dtype)


def repeated(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """Return keys or values with each head as often as queries share it."""
    return x.repeat_interleave(num_heads // x.shape[dim], dim=dim)
