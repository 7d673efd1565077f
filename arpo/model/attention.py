"""Attention in micro-batches, row by row, so that no mask over all tokens exists, and no work is done for nothing.

The queries of a row are the tokens that it has for itself; its keys are its whole path, from the prompt's first token
to its own last. In flat packing both are the row. In a tree (tree.py) a row begins with tokens of an earlier one, which
are its keys, but are computed once. Two rows a b c d e and a b c x, as a tree of the tokens a b c d e x:

    queries   0 1 2 3 4 | 5             consecutive, row after row
    keys      0 1 2 3 4 | 0 1 2 5       gathered where rows share tokens
    causal    the last query of a row sees all its keys, the one before all but the last, ...

The kernel is SDPA once for each row, or flash-attn's for rows of many lengths, once for all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arpo.batch import RowPaths
from arpo.errors import UserError
from arpo.options import UpdateConfig
from arpo.run_options import ModelConfig
from arpo.tree import check_attention

BY_ROW = {"sdpa": "rows_by_sdpa", "flash_attention_2": "rows_by_fa2"}
"""model.attention -> our name for it in transformers (which would treat a name with "flash" in it on its own)."""


def attention_backend(cfg: ModelConfig, device: torch.device) -> str:
    """Return model.attention with "auto" decided. Raises UserError for one that cannot work here."""
    from transformers.utils import is_flash_attn_2_available

    flash = device.type == "cuda" and is_flash_attn_2_available()
    if flash and cfg.compute_dtype == "float32":  # for which flash-attn has no kernels
        if cfg.attention == "flash_attention_2":
            raise UserError("model.attention=flash_attention_2 needs model.compute_dtype=bfloat16; set it, or use sdpa")
        flash = False
    attention = cfg.attention
    if attention == "auto":
        attention = "flash_attention_2" if flash else "sdpa"
    if attention == "flex_attention" and device.type != "cuda":
        raise UserError("model.attention=flex_attention needs a GPU; use sdpa")
    if attention == "flash_attention_2" and not flash:
        raise UserError("model.attention=flash_attention_2 needs a GPU and the flash-attn package; use auto or sdpa")
    return attention


def resolve_layout(cfg: UpdateConfig, models: list[ModelConfig], group_size: int, device: torch.device) -> UpdateConfig:
    """Return `cfg` with layout "auto" decided, by the config.json of all models that will read the micro-batches.

    Without branches a group still shares its prompt. Raises UserError where layout is "tree" and a model cannot do it.
    """
    from transformers import AutoConfig

    if cfg.layout == "packed" or (cfg.layout == "auto" and group_size == 1):
        return replace(cfg, layout="packed")
    try:
        for model in models:
            config = AutoConfig.from_pretrained(model.path)
            config._attn_implementation = attention_backend(model, device)
            check_attention(config)
    except (UserError, OSError, ValueError) as error:  # OSError, ValueError: no config that transformers can read
        if cfg.layout == "tree" and isinstance(error, UserError):
            raise
        return replace(cfg, layout="packed")  # what is wrong with the config is the loader's to say
    return replace(cfg, layout="tree")


def register(attention: str) -> str:
    """Teach transformers to attend row by row, and return the name for its configs."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for kernel, attend in (("sdpa", attend_by_sdpa), ("flash_attention_2", attend_by_flash)):
        # torch.compile would compile it anew for each batch, whose rows are other ones.
        ALL_ATTENTION_FUNCTIONS.register(BY_ROW[kernel], torch.compiler.disable(attend))
    return BY_ROW.get(attention, attention)


def attend_by_sdpa(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask, *, paths: RowPaths, **options: Any
) -> tuple[Tensor, None]:
    """Attend by transformers' interface: queries (1, H, N, d), keys and values (1, H / group, N, d) -> (1, N, H, d)."""
    scale, dropout, window = read_options(options)
    keys, values = (gathered(x, paths.keys, dim=2).split(paths.num_keys, dim=2) for x in (key, value))
    outs = []
    for row, (q, k, v) in enumerate(zip(query.split(paths.num_queries, dim=2), keys, values, strict=True)):
        mask = paths.mask(row, window, like=q)
        if mask is not None and q.is_cuda:  # else a GPU would fall back to writing all scores down
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        outs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2), None


def attend_by_flash(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask, *, paths: RowPaths, **options: Any
) -> tuple[Tensor, None]:
    """Attend as `attend_by_sdpa` does, with flash-attn, whose causal mask ends at the last key as ours does."""
    from flash_attn import flash_attn_varlen_func

    scale, dropout, window = read_options(options)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, d)
    out = flash_attn_varlen_func(
        query,
        gathered(key, paths.keys, dim=0),
        gathered(value, paths.keys, dim=0),
        *(starts(lengths, query.device) for lengths in (paths.num_queries, paths.num_keys)),
        max(paths.num_queries),
        max(paths.num_keys),
        dropout_p=dropout,
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
    )
    return out[None], None


def read_options(options: dict[str, Any]) -> tuple[float | None, float, int | None]:
    """Return scale, dropout and sliding window of the layer; other options are not known here."""
    unknown = {name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None}
    assert not unknown, f"attention by rows does not know {', '.join(unknown)}"
    return options.get("scaling"), options.get("dropout", 0.0), options.get("sliding_window")


def gathered(x: Tensor, index: Tensor | None, dim: int) -> Tensor:
    """Return x at `index`; the gradients of a token that many rows see are summed in float32."""
    return x if index is None else x.float().index_select(dim, index).to(x.dtype)


def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return cu_seqlens, (rows + 1,) int32. [3, 2] -> [0, 3, 5]"""
    return F.pad(torch.tensor(lengths, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32), (1, 0))
