"""Loads a model folder into sharded parameters: built on the meta device, filled from safetensors slice by slice.

    hf = build_on_meta(path, "sdpa")       # no memory for parameters
    ... fully_shard ...
    materialize(hf, device)                # memory for this rank's shards
    read_weights(dict(hf.named_parameters()), path)

No rank ever holds, or reads, more than its own rows of a weight.
"""

from __future__ import annotations

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
"""Begins the names of the text model's weights in the folder of a vision-language model; elsewhere it is "model."."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROWS = 8192
"""Rows of the head that are compared at a time."""
OTHER_PARTS = ("model.visual.", "mtp.")
"""Begin the names of what the text model has not: the vision tower, and heads that predict further tokens."""


def build_on_meta(path: str, attention: str, *, max_model_len: int = 0) -> nn.Module:
    """Return the transformers model of the folder's config, float32, its parameters without memory.

    max_model_len: see `settled_config`. Raises UserError for a model that transformers does not know, or that
    read_weights or head.py cannot handle.
    """
    from transformers import AutoModelForCausalLM

    try:
        config = settled_config(path, max_model_len=max_model_len)
        if quantization := getattr(config, "quantization_config", None):
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
        if isinstance(module, nn.Dropout):  # one that the config does not set
            module.p = 0.0
        if list(module.buffers(recurse=False)) and not type(module).__name__.endswith("RotaryEmbedding"):
            raise UserError(f"model.path={path}: {type(hf).__name__} has buffers in {name}, which is not supported")
    run_by_rows(hf)
    return hf


def check_head(hf: nn.Module) -> None:
    """Raise UserError where logits are not hidden states times lm_head.weight, perhaps over `logits_divisor`."""
    extras = {"final_logit_softcapping": (None,), "logit_scale": (None, 1.0)}
    for name, neutral in extras.items():
        if (value := getattr(hf.config, name, None)) not in neutral:
            raise UserError(f"model.path: {type(hf).__name__} has {name}={value} in its head, which is not supported")
    if not isinstance(getattr(hf, "lm_head", None), nn.Linear) or hf.lm_head.bias is not None:
        raise UserError(f"model.path: {type(hf).__name__} has no lm_head that is one matrix; it is not supported")


def logits_divisor(hf: nn.Module) -> float:
    """Return what the model divides its logits by, as Granite does; the head takes it as a temperature."""
    return getattr(hf.config, "logits_scaling", None) or 1.0


def materialize(model: nn.Module, device: torch.device, *, parameter_device: torch.device | None = None) -> None:
    """Give memory to parameters (of arbitrary content), and compute buffers, on `device`.

    parameter_device: the device of the shards, if it is another one (CPU offload).
    """
    model.to_empty(device=parameter_device or device)
    for module in model.modules():
        if list(module.buffers(recurse=False)):
            fresh = type(module)(module.config).to(device)  # RoPE frequencies: no file has them
            for name, buffer in fresh.named_buffers(recurse=False):
                module.register_buffer(name, buffer, persistent=False)


def read_weights(parameters: Mapping[str, torch.Tensor], path: str) -> None:
    """Fill parameters (or shards of them), given by their names in the checkpoint, each rank its own rows.

    Raises UserError where a file is broken, and, before anything is read, where a weight is missing, unknown or of
    another shape; the same on every rank.
    """
    from safetensors import SafetensorError, safe_open

    file = Path(path)
    try:
        shapes: dict[Path, dict[str, tuple[int, ...]]] = {}
        for file in weight_files(path):
            with safe_open(file, "pt") as tensors:
                shapes[file] = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        check_once(shapes, path)
        found = {text_name(name): shape for part in shapes.values() for name, shape in part.items()}
        check_weights(parameters, found, path)
        if HEAD in found and HEAD not in parameters and is_tied(path):  # a critic has none, tied or not
            check_tied_head(shapes, path)
        for file, names in shapes.items():
            for name in names:
                if (parameter := parameters.get(text_name(name))) is None:
                    continue
                # One handle per weight: what it has mapped counts as this process's memory until it is closed.
                with safe_open(file, "pt") as tensors, torch.no_grad():
                    copy_rows(parameter, tensors.get_slice(name))
    except (OSError, SafetensorError) as error:
        reason = f"{file.name}: {' '.join(str(error).split())[:300]}"
        raise UserError(f"model.path={path}: cannot load the weights ({reason}); copy or save them again") from None


def check_weights(parameters: Mapping[str, torch.Tensor], found: Mapping[str, tuple[int, ...]], path: str) -> None:
    """Compare names and shapes. A tied head may be there all the same, and old files hold RoPE's frequencies."""
    if missing := sorted(parameters.keys() - found.keys()):
        raise UserError(
            f"model.path={path}: {len(missing)} weights are missing, {missing[0]} first; was it saved completely?"
        )
    unknown = sorted(
        name
        for name in found.keys() - parameters.keys()
        if name != HEAD and "rotary_emb." not in name and not name.startswith(OTHER_PARTS)
    )
    if unknown:
        raise UserError(
            f"model.path={path}: {len(unknown)} weights are not in the model of its config.json, {unknown[0]} first; "
            "do they belong together?"
        )
    for name, parameter in parameters.items():
        if found[name] != tuple(parameter.shape):
            raise UserError(
                f"model.path={path}: {name} has shape {found[name]}, config.json says {tuple(parameter.shape)}; "
                "do they belong together?"
            )


def check_once(names: Mapping[Path, Iterable[str]], path: str) -> None:
    """Raise UserError where a weight stands in two files: which of them is the model?"""
    seen: dict[str, Path] = {}
    for file, its_names in names.items():
        for name in its_names:
            if (other := seen.setdefault(name, file)) != file:
                raise UserError(
                    f"model.path={path}: {name} is in {other.name} and in {file.name}; which of them is the model's? "
                    "Move the other file out of the folder"
                )


def is_tied(path: str) -> bool:
    """Return whether the folder's config ties the head to the embeddings."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return bool(config.get_text_config().tie_word_embeddings)


def check_tied_head(names: Mapping[Path, Iterable[str]], path: str) -> None:
    """Raise UserError where a head is stored that the config ties to the embeddings, and has other values: neither the
    trainer nor vLLM would load it."""
    from safetensors import safe_open

    of = {text_name(name): (file, name) for file, its_names in names.items() for name in its_names}
    (head_file, head_name), (embedding_file, embedding_name) = of[HEAD], of[EMBEDDING]
    with safe_open(head_file, "pt") as heads, safe_open(embedding_file, "pt") as embeddings:
        head, embedding = heads.get_slice(head_name), embeddings.get_slice(embedding_name)
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
    """Return the name that a weight of a folder has in the text model."""
    return "model." + name.removeprefix(TEXT) if name.startswith(TEXT) else name


def folder_name(name: str, config: Any) -> str:
    """Return the name that a weight of the text model has in a folder of this config, and for vLLM's class for it."""
    is_part = config.get_text_config() is not config
    return TEXT + name.removeprefix("model.") if is_part and name.startswith("model.") else name


def copy_rows(parameter: torch.Tensor, weight) -> None:
    """Copy this rank's rows (of dimension 0) of `weight`, a tensor or a safetensors slice, into the parameter.

    FSDP2 cuts like torch.chunk, 5 rows on 2 ranks: [0, 3) and [3, 5).
    """
    local, start = parameter, 0
    if isinstance(parameter, DTensor):
        local, mesh = parameter.to_local(), parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                assert placement.dim == 0, parameter.placements
                start = mesh.get_local_rank(dim) * -(-parameter.shape[0] // mesh.size(dim))
    if len(local):
        local.copy_(weight[start : start + len(local)])  # casts
