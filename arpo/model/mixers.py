"""What the layers of a model mix tokens with: attention by rows is exact, all else is refused."""

from __future__ import annotations

import inspect

from torch import nn

from arpo.errors import UserError

ATTENTION = {"full_attention", "sliding_attention"}


def check_layers(hf: nn.Module, path: str) -> None:
    """Raise UserError for a model whose rows would see each other, or whose weights are not named as we read them."""
    kinds = layer_kinds(hf)
    if any("Experts" in type(module).__name__ for module in hf.modules()):
        reason = "is a mixture of experts"
    elif not kinds:
        reason = "does not have its layers in model.layers"
    elif others := set(kinds) - ATTENTION:
        reason = f"has layers of the kind {', '.join(sorted(others))}"
    elif hf._is_stateful or not all(attends_by_rows(layer) for layer in hf.base_model.layers):
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


def attends_by_rows(layer: nn.Module) -> bool:
    """Return whether one module of the layer takes an attention mask, and hands on what attention by rows needs."""
    mixers = [m for m in layer.children() if "attention_mask" in inspect.signature(m.forward).parameters]
    return len(mixers) == 1 and any(
        p.kind is p.VAR_KEYWORD for p in inspect.signature(mixers[0].forward).parameters.values()
    )
