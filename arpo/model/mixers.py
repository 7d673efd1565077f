"""Token mixers of a model's layers: attention, convolution, recurrence. Each must stay within a row.

A model with any other kind of layer is refused. Attention by rows is in attention.py. A short convolution or a
recurrence (gated delta) gets one row at a time, from the prompt's first token on; in a tree, the path from the root to
a leaf. Only the outputs of tokens that the row computes itself are kept. Outputs of shared tokens were kept with an
earlier row, and are equal.
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
"""Kinds of layers (layer_types in config.json) with a convolution or recurrence, which get one row at a time."""


def check_layers(hf: nn.Module, path: str) -> None:
    """Raise UserError for a model whose rows would see each other, or with unsupported names of weights."""
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
    """Return the kind of each layer (layer_types in config.json)."""
    layers = getattr(hf.base_model, "layers", None) or []
    kinds = getattr(hf.config, "layer_types", None) or ["full_attention"] * len(layers)
    return kinds[: len(layers)]


def mixers_of(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that mix tokens: those with an argument `attention_mask`."""
    return [module for module in layer.children() if "attention_mask" in inspect.signature(module.forward).parameters]


def keeps_to_rows(kind: str, layer: nn.Module) -> bool:
    """Return True if exactly one module mixes tokens. Attention must also pass on further options (`paths`)."""
    mixers = mixers_of(layer)
    if len(mixers) != 1:
        return False
    parameters = inspect.signature(mixers[0].forward).parameters.values()
    return kind in ALONG_TOKENS or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def run_by_rows(hf: nn.Module) -> None:
    """Make convolutions and recurrences run on one row at a time. `masks` passes the rows on as attention mask."""
    for kind, layer in zip(layer_kinds(hf), hf.base_model.layers, strict=True):
        if kind in ALONG_TOKENS:
            [mixer] = mixers_of(layer)
            mixer.forward = torch.compiler.disable(by_rows(mixer.forward))


def by_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `forward`, applied to one row after the other."""

    def forward_rows(hidden_states: Tensor, attention_mask: RowPaths, **_: Any) -> Tensor:
        paths = attention_mask
        rows = gathered(hidden_states, paths.keys, dim=1).split(paths.num_keys, dim=1)
        # Only the last `num_queries` outputs are the row's: the tokens before them are shared with an earlier row.
        outs = [forward(row)[:, -num:] for row, num in zip(rows, paths.num_queries, strict=True)]
        return torch.cat(outs, dim=1)

    return forward_rows


def masks(backbone: nn.Module, micro: MicroBatch) -> Any:
    """Return the attention mask to pass to the model: kind of layer -> rows, or None if all layers are attention."""
    kinds = set(getattr(backbone.config, "layer_types", None) or [])
    if not kinds & ALONG_TOKENS:
        return None
    return {kind: micro.paths if kind in ALONG_TOKENS else None for kind in kinds}
