"""Loads a model folder into sharded parameters. The model is built on the meta device, and filled from safetensors.

    hf = build_on_meta(path, "sdpa")       # no memory for parameters
    ... fully_shard ...
    materialize(hf, device)                # memory for this rank's shards
    read_weights(dict(hf.named_parameters()), path)

A rank reads and stores only its rows of a weight.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from arpo.data.model_folder import weight_files
from arpo.errors import UserError
from arpo.model.mixers import check_layers, run_by_rows
from arpo.model.settled import settled_config

TEXT = "model.language_model."
"""Prefix of the text model's weights in the folder of a vision-language model. In other folders it is "model."."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROWS = 8192
"""Number of rows of the head that are compared at a time."""
OTHER_PARTS = ("model.visual.", "mtp.")
"""Prefixes of weights that the text model does not have: vision tower, and heads that predict further tokens."""


def build_on_meta(path: str, attention: str, *, max_model_len: int = 0) -> nn.Module:
    """Return the transformers model of the folder's config, in float32, on the meta device (without memory).

    max_model_len: see `settled_config`. Raises UserError for a model that transformers, `read_weights` or head.py does
    not support.
    """
    from transformers import AutoModelForCausalLM

    try:
        config = settled_config(path, max_model_len=max_model_len)
        quantization = getattr(config, "quantization_config", None)
        if quantization:
            method = quantization.get("quant_method", "quantized")
            raise UserError(f"model.path={path}: {method} weights cannot be trained; use the model in bfloat16")
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise UserError(f"model.path={path}: cannot build the model ({' '.join(str(error).split())[:300]})") from None
    check_layers(hf, path)
    check_head(hf)
    for name, module in hf.named_modules():
        if isinstance(module, nn.Dropout):  # a dropout that the config does not set
            module.p = 0.0
        if list(module.buffers(recurse=False)) and not type(module).__name__.endswith("RotaryEmbedding"):
            raise UserError(f"model.path={path}: {type(hf).__name__} has buffers in {name}, which is not supported")
    run_by_rows(hf)
    return hf


def check_head(hf: nn.Module) -> None:
    """Raise UserError unless logits = hidden states @ lm_head.weight.T / `logits_divisor`."""
    if not isinstance(getattr(hf, "lm_head", None), nn.Linear) or hf.lm_head.bias is not None:
        raise UserError(f"model.path: {type(hf).__name__} has no lm_head that is one matrix; it is not supported")
    logits_divisor(hf)  # which raises


class FixedStates(nn.Module):
    """Stands for a decoder: returns given hidden states."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **options: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


def logits_divisor(hf: nn.Module) -> float:
    """Return the divisor of the model's logits; 1 for most models. The caller multiplies the temperature by it.

    It is measured with the model's own forward pass, whose decoder and lm_head are replaced. Configs have no common
    field for it: `logits_scaling` divides in Granite and multiplies in HyperCLOVAX, `logit_scale` multiplies in Cohere
    (vllm-project/vllm PR 52158). Raises UserError for a head that does more than divide, like soft capping.
    """
    hidden = torch.tensor([[[-100.0, -1.0, 1.0, 100.0]]])
    model = copy.copy(hf)
    model.__dict__["_modules"] = {hf.base_model_prefix: FixedStates(hidden), "lm_head": nn.Identity()}
    try:
        logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
    except (AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"model.path: {type(hf).__name__} computes its logits from more than hidden states ({error}), which is not "
            "supported"
        ) from None
    divisors = hidden / logits
    divisor = divisors.mean().item()
    if not (math.isfinite(divisor) and divisor > 0 and torch.allclose(divisors, torch.tensor(divisor))):
        raise UserError(
            f"model.path: {type(hf).__name__} does more with its logits than to divide them (soft capping, say), which "
            "is not supported"
        )
    return divisor


def materialize(model: nn.Module, device: torch.device, *, parameter_device: torch.device | None = None) -> None:
    """Give memory with arbitrary content to the parameters, and compute the buffers, on `device`.

    parameter_device: device of the parameters, if it is another one (CPU offload).
    """
    model.to_empty(device=parameter_device or device)
    for module in model.modules():
        if list(module.buffers(recurse=False)):
            # RoPE frequencies. They are in no file, so they are computed again.
            with_buffers = type(module)(module.config).to(device)
            for name, buffer in with_buffers.named_buffers(recurse=False):
                module.register_buffer(name, buffer, persistent=False)


def read_weights(parameters: Mapping[str, torch.Tensor], path: str) -> None:
    """Fill parameters, given by name in the model folder. Each rank reads its rows of a sharded parameter.

    Raises UserError, the same on every rank, if a file is broken; and before anything is read, if a weight is missing,
    unknown or of another shape.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    try:
        shapes: dict[Path, dict[str, tuple[int, ...]]] = {}
        for file in weight_files(path):
            with safe_open(file, "pt") as tensors:
                shapes[file] = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        check_once(shapes, path)
        stored = {text_name(name): shape for of_file in shapes.values() for name, shape in of_file.items()}
        check_weights(parameters, stored, path)
        # A head that is stored, but not a parameter, is tied; or this is a critic, which needs no head.
        if HEAD in stored and HEAD not in parameters and is_tied(path):
            check_tied_head(shapes, path)
        for file, names in shapes.items():
            for name in names:
                parameter = parameters.get(text_name(name))
                if parameter is None:
                    continue
                # A handle per weight, because mapped memory counts as this process's memory until the handle is closed.
                with safe_open(file, "pt") as tensors, torch.no_grad():
                    copy_rows(parameter, tensors.get_slice(name))
    except (OSError, SafetensorError) as error:
        reason = f"{file.name}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"model.path={path}: cannot load the weights ({reason}); copy or save them again") from None


def check_weights(parameters: Mapping[str, torch.Tensor], stored: Mapping[str, tuple[int, ...]], path: str) -> None:
    """Raise UserError if names and shapes of the stored weights are not those of the parameters.

    Two kinds of further weights are allowed: a tied head, and RoPE's frequencies in old files.
    """
    missing = sorted(parameters.keys() - stored.keys())
    if missing:
        raise UserError(
            f"model.path={path}: {len(missing)} weights are missing, {missing[0]} first; was it saved completely?"
        )
    unknown = sorted(
        name
        for name in stored.keys() - parameters.keys()
        if name != HEAD and "rotary_emb." not in name and not name.startswith(OTHER_PARTS)
    )
    if unknown:
        raise UserError(
            f"model.path={path}: {len(unknown)} weights are not in the model of its config.json, {unknown[0]} first; "
            "do they belong together?"
        )
    for name, parameter in parameters.items():
        if stored[name] != tuple(parameter.shape):
            raise UserError(
                f"model.path={path}: {name} has shape {stored[name]}, config.json says {tuple(parameter.shape)}; "
                "do they belong together?"
            )


def check_once(names: Mapping[Path, Iterable[str]], path: str) -> None:
    """Raise UserError if a weight is in two files, since the model's file is then unknown. `names` are by file."""
    first_files: dict[str, Path] = {}
    for file, names_of_file in names.items():
        for name in names_of_file:
            other = first_files.setdefault(name, file)
            if other != file:
                raise UserError(
                    f"model.path={path}: {name} is in {other.name} and in {file.name}; which of them is the model's? "
                    "Move the other file out of the folder"
                )


def is_tied(path: str) -> bool:
    """Return True if the folder's config ties the head to the embeddings."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return bool(config.get_text_config().tie_word_embeddings)


def check_tied_head(names: Mapping[Path, Iterable[str]], path: str) -> None:
    """Raise UserError if the config ties the head to the embeddings, but the stored head has other values.

    Neither the trainer nor vLLM would load such a head.
    """
    from safetensors import safe_open

    places = {text_name(name): (file, name) for file, names_of_file in names.items() for name in names_of_file}
    head_file, head_name = places[HEAD]
    embedding_file, embedding_name = places[EMBEDDING]
    with safe_open(head_file, "pt") as heads, safe_open(embedding_file, "pt") as embeddings:
        head = heads.get_slice(head_name)
        embedding = embeddings.get_slice(embedding_name)
        num_rows = head.get_shape()[0]
        same = head.get_shape() == embedding.get_shape() and all(
            torch.equal(head[start : start + ROWS], embedding[start : start + ROWS])
            for start in range(0, num_rows, ROWS)
        )
    if not same:
        raise UserError(
            f"model.path={path}: {HEAD} is not the embeddings, to which config.json ties it; set tie_word_embeddings "
            f"to false there, or take {HEAD} out of {head_file.name}"
        )


def text_name(name: str) -> str:
    """Return the name in the text model of a weight of a model folder."""
    return "model." + name.removeprefix(TEXT) if name.startswith(TEXT) else name


def folder_name(name: str, config: Any) -> str:
    """Return the name of the text model's weight in a folder of this config, and in vLLM's class for it."""
    has_other_parts = config.get_text_config() is not config
    if has_other_parts and name.startswith("model."):
        return TEXT + name.removeprefix("model.")
    return name


def copy_rows(parameter: torch.Tensor, weight) -> None:
    """Copy this rank's rows (of dimension 0) of `weight`, a tensor or a safetensors slice, into the parameter.

    FSDP2 cuts like torch.chunk, 5 rows on 2 ranks: [0, 3) and [3, 5).
    """
    local = parameter
    start = 0
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        mesh = parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                assert placement.dim == 0, parameter.placements
                start = mesh.get_local_rank(dim) * -(-parameter.shape[0] // mesh.size(dim))
    if len(local):
        local.copy_(weight[start : start + len(local)])  # casts
