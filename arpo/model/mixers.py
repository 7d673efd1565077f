"""What the layers of a model mix tokens with, each of which must keep to its row, or the model is refused.

Attention does by itself (attention.py). What runs along the tokens, a short convolution or a recurrence (gated delta),
gets one row at a time, from the prompt's first token on: of a tree, each path from the root to a leaf, gathered. What
comes out for the row's own tokens is kept; what rows share was kept with the first of them, and is equal in all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from arpo.batch import MicroBatch, RowPaths
from arpo.errors import UserError
from arpo.model.attention import gathered

ATTENTION = {"full_attention", "sliding_attention"}
ALONG_TOKENS = {"conv", "linear_attention"}
"""Kinds of layers (layer_types in config.json) that get one row at a time."""


def check_layers(hf: nn.Module, path: str) -> None:
    """Raise UserError for a model whose rows would see each other, or whose weights are not named as we read them."""
    kinds = layer_kinds(hf)
    if any("Experts" in type(module).__name__ for module in hf.modules()):
        reason = "is a mixture of experts"
    elif not kinds:
        reason = "does not have its layers in model.layers"
    elif others := set(kinds) - ATTENTION - ALONG_TOKENS:
        reason = f"has layers of the kind {', '.join(sorted(others))}"
    elif not all(map(keeps_to_rows, kinds, hf.base_model.layers)) or (hf._is_stateful and not ALONG_TOKENS & {*kinds}):
        reason = "has layers that do not attend by the common interface of transformers"
    else:
        return
    raise UserError(
        f"model.path={path}: {type(hf).__name__} {reason}, which is not supported; docs/scale.md lists what is"
    )


def layer_kinds(hf: nn.Module) -> list[str]:
    """Return the kind of each layer, as config.json calls it (layer_types)."""
    layers = getattr(hf.base_model, "layers", None) or []
    kinds = getattr(hf.config, "layer_types", None) or ["full_attention"] * len(layers)
    return kinds[: len(layers)]


def mixers_of(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that take an attention mask, so that they mix tokens."""
    return [m for m in layer.children() if "attention_mask" in inspect.signature(m.forward).parameters]


def keeps_to_rows(kind: str, layer: nn.Module) -> bool:
    """Return whether one module mixes tokens, and, if it is attention, takes what attention by rows needs."""
    mixers = mixers_of(layer)
    options = [p for m in mixers for p in inspect.signature(m.forward).parameters.values() if p.kind is p.VAR_KEYWORD]
    return len(mixers) == 1 and (kind in ALONG_TOKENS or bool(options))


def run_by_rows(hf: nn.Module) -> None:
    """Let what runs along the tokens see one row at a time, given as its attention mask (`masks`)."""
    for kind, layer in zip(layer_kinds(hf), hf.base_model.layers, strict=True):
        if kind in ALONG_TOKENS:
            [mixer] = mixers_of(layer)
            mixer.forward = torch.compiler.disable(by_rows(mixer.forward))


def by_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward_rows(hidden_states: Tensor, attention_mask: RowPaths, **_: Any) -> Tensor:
        rows = gathered(hidden_states, attention_mask.keys, dim=1).split(attention_mask.num_keys, dim=1)
        outs = [forward(row)[:, -n:] for row, n in zip(rows, attention_mask.num_queries, strict=True)]
        return torch.cat(outs, dim=1)

    return forward_rows


def masks(backbone: nn.Module, micro: MicroBatch) -> Any:
    """Return the attention mask of a model: None, or by kind of layer the rows of those that run along the tokens."""
    kinds = set(getattr(backbone.config, "layer_types", None) or [])
    if not kinds & ALONG_TOKENS:
        return None
    return {kind: micro.paths if kind in ALONG_TOKENS else None for kind in kinds}
