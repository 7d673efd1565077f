"""Attention in micro-batches, row by row. So there is no mask over all tokens, and no work on masked pairs.

The queries of a row are the tokens that are computed for this row. The keys are the full path, from the prompt's first
token to the row's last. In flat packing both are the entire row. In a tree (tree.py) a row may begin with tokens of an
earlier row. Shared tokens are among the keys of both rows, but are computed only once. Two rows a b c d e and a b c x,
as the tree a b c d e x:

    queries   0 1 2 3 4 | 5             consecutive, row after row
    keys      0 1 2 3 4 | 0 1 2 5       gathered if rows share tokens
    causal    a row's last query sees all keys of the row, the query before all but the last key, ...

The kernel is SDPA, called once per row, or a kernel for rows of many lengths, called once for all rows: torch's
varlen_attn, or that of the flash-attn package. Both are FlashAttention 2. Its causal mask aligns the last query with
the last key, as needed here (torch: aten/src/ATen/native/transformers/cuda/flash_attn/mask.h).
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
"""model.attention -> its name in transformers. The names avoid "flash", which transformers treats specially."""


def attention_backend(cfg: ModelConfig, device: torch.device) -> str:
    """Return model.attention, with "auto" resolved. Raises UserError if it cannot work on this device."""
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
    """Return True if FlashAttention's kernels run on this device. They need half precision.

    Not on AMD: how its kernels align causal masks is untested with trees.
    """
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def resolve_layout(cfg: UpdateConfig, group_size: int) -> UpdateConfig:
    """Return `cfg` with layout "auto" resolved."""
    if cfg.layout != "auto":
        return cfg
    # A tree pays even without branches, because the trajectories of a group share the prompt.
    return replace(cfg, layout="packed" if group_size == 1 else "tree")


def register(attention: str) -> str:
    """Register attention by rows with transformers, and return its name for a model's config."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # From Hopper on, SDPA prefers cuDNN. It plans again for each shape (up to a second), and each row has another
    # length. vLLM switches it off in its process, too, so without this line SFT would use another kernel than RL.
    torch.backends.cuda.enable_cudnn_sdp(False)
    kernels = {"sdpa": attend_by_sdpa, "varlen": attend_by_varlen, "flash_attention_2": attend_by_flash_attn}
    for kernel, attend in kernels.items():
        # torch.compile would compile it again for each batch, since the rows differ.
        ALL_ATTENTION_FUNCTIONS.register(BY_ROW[kernel], torch.compiler.disable(with_rows_only(attend)))
    return BY_ROW[attention]


def with_rows_only(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Return `attend` with the signature that transformers calls.

    It raises UserError in a layer that does not pass on `paths`, or that has a mask.
    """

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
    """Attend with SDPA, row by row. queries (1, H, N, d), keys and values (1, H / group, N, d) -> (1, N, H, d)."""
    queries = query.split(paths.num_queries, dim=2)
    keys = gathered(key, paths.keys, dim=2).split(paths.num_keys, dim=2)
    values = gathered(value, paths.keys, dim=2).split(paths.num_keys, dim=2)
    outs = []
    for row, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        mask = paths.mask(row, window, like=q)
        if q.is_cuda and (mask is not None or q.dtype == torch.float32):
            # On a GPU only the flash kernel supports grouped heads, but neither masks nor float32. Repeated heads
            # allow the memory-efficient kernel, which supports both. Any other would write all scores to memory.
            k = repeated(k, q.shape[1], dim=1)
            v = repeated(v, q.shape[1], dim=1)
        outs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2)


def attend_by_varlen(
    query: Tensor, key: Tensor, value: Tensor, paths: RowPaths, scale: float | None, window: int | None
) -> Tensor:
    """Attend like `attend_by_sdpa`, with torch's varlen_attn.

    Not yet run on a GPU: tests/fake_gpu calls the real function with fake kernels.
    """
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, d)
    key = gathered(key, paths.keys, dim=0)
    value = gathered(value, paths.keys, dim=0)
    if not varlen_groups_heads():
        key = repeated(key, query.shape[1], dim=1)
        value = repeated(value, query.shape[1], dim=1)
    out = varlen_attn(
        query,
        key,
        value,
        paths.query_starts,
        paths.key_starts,
        max(paths.num_queries),
        max(paths.num_keys),
        scale=scale,
        window_size=(window - 1 if window else -1, 0),  # number of keys before and after the query's position
        **({"enable_gqa": True} if varlen_groups_heads() else {}),
    )
    return out[None]


@functools.cache
def varlen_groups_heads() -> bool:
    """Return True if varlen_attn supports queries that share key-value heads (from torch 2.12 on)."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend_by_flash_attn(
    query: Tensor, key: Tensor, value: Tensor, paths: RowPaths, scale: float | None, window: int | None
) -> Tensor:
    """Attend like `attend_by_sdpa`, with the flash-attn package."""
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
    """Return x at `index` (None = all). Gradients of a token in several rows are summed in float32."""
    return x if index is None else x.float().index_select(dim, index).to(x.dtype)


def repeated(x: Tensor, num_heads: int, dim: int) -> Tensor:
    """Return keys or values with each head repeated, so that there are `num_heads`, one for each query head."""
    return x.repeat_interleave(num_heads // x.shape[dim], dim=dim)
