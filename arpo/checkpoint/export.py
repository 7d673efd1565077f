"""Export of a live policy to a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from arpo.checkpoint.checkpoints import NotWritten
from arpo.data.hub import model_folder
from arpo.data.model_folder import weight_files
from arpo.engine.weight_sync import full_tensors
from arpo.model import Policy
from arpo.model.loading import OTHER_PARTS, folder_name

MAX_FILE_BYTES = 4 << 30
UNCHANGED = (
    "config.json", "generation_config.json", "*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template.*", "*.jinja", "additional_chat_templates/*.jinja", "*processor_config.json", "LICENSE*",
)  # fmt: skip
"""Patterns of the files of a model folder that training does not change."""


def whole_weights(policy: Policy, source: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy's weights by name, adapters merged, in the dtype of the folder `source`. Collective."""
    device = next(policy.parameters()).device
    return full_tensors(policy.hf_parameters(), dtype=source_dtype(source), device=device)


def write_export(
    weights: Iterable[tuple[str, torch.Tensor]],
    folder: Path,
    *,
    source: str,
    link: Path | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write safetensors, configs and tokenizer: the weights of rank 0, and all else from the model folder `source`.

    `link` becomes a symbolic link to the folder, so that a run's newest export has a stable name. Collective over the
    group of all ranks; rank 0 holds one file at a time. Raises NotWritten, on all ranks.
    """
    problem = [""]
    if dist.get_rank() == 0:
        try:
            write_hf(weights, folder, source)
            if link:
                point_to(folder, link)
        except (OSError, SafetensorError) as error:
            problem = [f"{folder}: cannot write the export ({' '.join(str(error).split())[:300]})"]
    for _ in weights:  # where they are gathered, rank 0 needs the other ranks' shards, and they need rank 0's
        pass
    dist.broadcast_object_list(problem, group=group)
    if problem[0]:
        raise NotWritten(problem[0])


def point_to(folder: Path, link: Path) -> None:
    """Make `link` a symbolic link to the folder, in the place of one to another folder."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(folder, link.parent))
    temporary.rename(link)


def write_hf(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, source: str) -> None:
    """Replace `folder` by one of these tensors, and all else from `source` (a vision tower too, if it has one).

    Configs, tokenizer and chat template are copied byte by byte. To load and save them anew would change what nobody
    changed (transformers 5 writes tokenizers that 4 cannot read), and refuses generation configs that it reads.
    """
    from transformers import AutoConfig

    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if config.get_text_config() is not config:
            tensors = with_other_parts(tensors, source, config)
        write_safetensors(tensors, temporary)
        copy_unchanged(model_folder(source), temporary)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def copy_unchanged(source: Path, folder: Path) -> None:
    """Copy the files that training does not change; no code, no card, no optimizer's state, and no adapter."""
    for file in {file for pattern in UNCHANGED for file in source.glob(pattern) if file.is_file()}:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


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
