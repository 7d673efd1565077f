"""Export of a live policy or a checkpoint to a Hugging Face folder, or to LoRA adapters in peft's format."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import nn

from arpo.checkpoint.checkpoints import NotWritten, errors_of_all_ranks, verify
from arpo.checkpoint.safe_reader import SafeReader
from arpo.config.bounded import read_yaml
from arpo.config.sections import ModelConfig
from arpo.engine.weight_sync import full_tensors
from arpo.errors import UserError
from arpo.model import Policy, lora
from arpo.model.loading import OTHER_PARTS, build_on_meta, folder_name, materialize, read_weights, weight_files

MAX_FILE_BYTES = 4 << 30


def export_hf(policy: Policy, folder: Path, *, source: str, link: Path | None = None) -> None:
    """Write safetensors (adapters merged), configs and tokenizer. Collective; rank 0 holds one file at a time.

    All but the weights comes from the model folder `source`, and so does the dtype. `link` becomes a symbolic link to
    the folder, so that a run's newest export has a stable name. Raises NotWritten, on all ranks.
    """
    device = next(policy.parameters()).device
    tensors = full_tensors(policy.hf_parameters(), dtype=source_dtype(source), device=device)
    problem = [""]
    if dist.get_rank() == 0:
        try:
            write_hf(tensors, folder, source)
            if link:
                point_to(folder, link)
        except (OSError, SafetensorError) as error:
            problem = [f"{folder}: cannot write the export ({' '.join(str(error).split())[:300]})"]
    for _ in tensors:  # rank 0 needs the other ranks' shards, and they need rank 0's
        pass
    dist.broadcast_object_list(problem)
    if problem[0]:
        raise NotWritten(problem[0])


def point_to(folder: Path, link: Path) -> None:
    """Make `link` a symbolic link to the folder, in the place of one to another folder."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(folder, link.parent))
    temporary.rename(link)


def export_checkpoint(checkpoint: Path, folder: Path, *, model: str = "", adapter: bool = False) -> None:
    """Make a Hugging Face folder of a checkpoint of any number of ranks, in one process without a process group.

    model: the folder that the run started from, if it has moved since. adapter: write only the LoRA adapters, in peft's
    format. Raises UserError.
    """
    if problem := verify(checkpoint):
        raise UserError(f"{checkpoint}: {problem}; choose another checkpoint (RUN/checkpoints/step_N)")
    if folder.exists():
        raise UserError(f"{folder}: exists already; choose another folder")
    cfg = model_of_run(checkpoint, model)
    if adapter and not cfg.lora_rank:
        raise UserError(f"{checkpoint}: its run trained all weights (model.lora_rank=0); leave --adapter out")
    hf, trained = load_checkpoint(checkpoint, cfg, base=not adapter)
    if adapter:
        lora.write_adapter(trained, folder, base=cfg.path, rank=cfg.lora_rank, alpha=cfg.lora_alpha)
    else:
        dtype = source_dtype(cfg.path)
        write_hf(((name, p.detach().to(dtype)) for name, p in lora.merged_parameters(hf)), folder, cfg.path)


def load_checkpoint(checkpoint: Path, cfg: ModelConfig, *, base: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the model on the CPU, and its trained parameters. base: of a LoRA run, read the other weights too."""
    hf = build_on_meta(cfg.path, "sdpa")
    if cfg.lora_rank:
        lora.add_lora(hf, cfg)
    materialize(hf, torch.device("cpu"))
    hf.tie_weights()  # plain tensors lose it on the way out of meta
    if cfg.lora_rank and base:
        read_weights(lora.base_parameters(hf), cfg.path)
    trained = {name: p.detach() for name, p in hf.named_parameters() if p.requires_grad}
    what = f"{checkpoint}: cannot be loaded; is {cfg.path} the model that the run started with?"
    with errors_of_all_ranks(what), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is meant
        dcp.load({"model": trained}, storage_reader=SafeReader(checkpoint), no_dist=True)  # in place
    return hf, trained


def model_of_run(checkpoint: Path, model: str) -> ModelConfig:
    """Return the model section of RUN/config.yaml, with `model`, if given, as its path. Raises UserError."""
    import yaml

    file = checkpoint.resolve().parent.parent / "config.yaml"
    if file.exists():
        try:
            section = read_yaml(file)["model"]
            known = {f.name for f in fields(ModelConfig)}
            cfg = ModelConfig(**{name: value for name, value in section.items() if name in known})
        except (OSError, yaml.YAMLError, AttributeError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file}: cannot be read ({reason}); move it away, and pass --model FOLDER") from None
        return replace(cfg, path=model or cfg.path)
    if not model:
        raise UserError(f"{file} is missing, which names the run's model; pass --model FOLDER")
    return ModelConfig(path=model)


def write_hf(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, source: str) -> None:
    """Write whole tensors by name, and all else from `source` (of a vision-language model its vision tower too), to a
    folder that then replaces `folder`."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if config.get_text_config() is not config:
            tensors = with_other_parts(tensors, source, config)
            for file in weight_files(source)[0].parent.glob("*processor_config.json"):  # of images
                shutil.copy(file, temporary)
        write_safetensors(tensors, temporary)
        config.dtype = source_dtype(source)
        config.save_pretrained(temporary)
        with contextlib.suppress(OSError):  # a model folder need not have one
            GenerationConfig.from_pretrained(source).save_pretrained(temporary)
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(temporary)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def with_other_parts(
    tensors: Iterable[tuple[str, torch.Tensor]], source: str, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a text model by their names in its vision-language model, and then that model's others."""
    for name, tensor in tensors:
        yield folder_name(name, config), tensor
    for file in weight_files(source):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                if name.startswith(OTHER_PARTS):
                    yield name, weights.get_tensor(name)


def write_safetensors(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write model.safetensors, or files of at most MAX_FILE_BYTES and their index; holds one in memory at a time."""
    from safetensors.torch import save_file

    parts: list[list[str]] = []
    part: dict[str, torch.Tensor] = {}
    num_bytes = total_bytes = 0

    def flush() -> None:
        file = folder / f"{len(parts)}.safetensors"
        save_file(part, file, metadata={"format": "pt"})
        file.chmod(folder.stat().st_mode & 0o666)  # as the umask says; save_file keeps it from everybody else
        parts.append(list(part))
        part.clear()

    for name, tensor in tensors:
        if part and num_bytes + tensor.nbytes > MAX_FILE_BYTES:
            flush()
            num_bytes = 0
        part[name] = tensor.to("cpu", copy=True)  # out of the buffer that several tensors came in
        num_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    weight_map = {}
    for number, names in enumerate(parts):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(parts) == 1:
        return
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def source_dtype(source: str) -> torch.dtype:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    return config.dtype or config.get_text_config().dtype or torch.float32
