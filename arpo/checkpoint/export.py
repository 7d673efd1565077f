"""Export of a policy in training to a Hugging Face folder."""

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
    "config.json",
    "generation_config.json",
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    "*.jinja",
    "additional_chat_templates/*.jinja",
    "*processor_config.json",
    "LICENSE*",
)
"""Patterns of files in a model folder. Training does not change them."""


def why_no_end(source: str, tokenizer) -> str:
    """Return a line for the log if transformers' generate() would not stop after an answer of an export; or "".

    source: the model folder whose files an export copies. (vLLM stops at the tokenizer's end token in any case.)
    """
    folder = model_folder(source)
    # transformers reads config.json only for a folder without generation_config.json.
    file = next(f for f in (folder / "generation_config.json", folder / "config.json") if f.exists())
    ends = json.loads(file.read_bytes()).get("eos_token_id")
    if ends is None or tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends]):
        return ""
    return (
        f"warning: {file}: eos_token_id is {ends}, but an answer ends with {tokenizer.eos_token}, which is "
        f"{tokenizer.eos_token_id}: transformers' generate() would not stop there; add it to the file"
    )


def full_weights(policy: Policy, source: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy's full weights by name, adapters merged, in the dtype of the folder `source`. Collective."""
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
    """Write safetensors with the weights, and configs and tokenizer from the model folder `source`.

    link: becomes a symbolic link to the folder, a stable name for a run's newest export. Collective over the group of
    all ranks. Rank 0 writes, with one file at a time in memory. If it fails, all ranks raise NotWritten.
    """
    problem = [""]
    if dist.get_rank() == 0:
        try:
            write_hf(weights, folder, source)
            if link:
                point_to(folder, link)
        except (OSError, SafetensorError) as error:
            problem = [f"{folder}: cannot write the export ({' '.join(str(error).split())[:300]})"]
    for _ in weights:
        pass  # Gathering a weight is collective, so all ranks must consume the iterator. Rank 0 may have failed midway.
    dist.broadcast_object_list(problem, group=group)
    if problem[0]:
        raise NotWritten(problem[0])


def point_to(folder: Path, link: Path) -> None:
    """Make `link` a symbolic link to the folder. It may replace a link to another folder."""
    temporary = link.with_name(link.name + ".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(folder, link.parent))
    temporary.rename(link)


def write_hf(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, source: str) -> None:
    """Replace `folder` by a model folder with these tensors.

    All other files come from `source`, and so do the weights of a vision tower.
    Configs, tokenizer and chat template are copied byte by byte. Loading and saving would change them (transformers 5
    writes tokenizers that version 4 cannot read), and fails for some valid generation configs.
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
    """Copy the files of UNCHANGED: no code, no model card, no optimizer state, no adapter."""
    for file in {file for pattern in UNCHANGED for file in source.glob(pattern) if file.is_file()}:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def with_other_parts(
    tensors: Iterable[tuple[str, torch.Tensor]], source: str, config: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a text model's tensors by their names in the vision-language model, then that model's other tensors."""
    for name, tensor in tensors:
        yield folder_name(name, config), tensor
    for file in weight_files(source):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                if name.startswith(OTHER_PARTS):
                    yield name, weights.get_tensor(name)


def write_safetensors(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write model.safetensors, or several files of at most MAX_FILE_BYTES and an index. Keeps one file in memory."""
    from safetensors.torch import save_file

    names_by_file: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    num_bytes = 0
    total_bytes = 0

    def flush() -> None:
        file = folder / f"{len(names_by_file)}.safetensors"
        save_file(pending, file, metadata={"format": "pt"})
        file.chmod(folder.stat().st_mode & 0o666)  # follow the umask; save_file gives access to the owner only
        names_by_file.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and num_bytes + tensor.nbytes > MAX_FILE_BYTES:
            flush()
            num_bytes = 0
        # A copy, since the tensor may be a view into a buffer of several tensors.
        pending[name] = tensor.to("cpu", copy=True)
        num_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    weight_map = {}
    num_files = len(names_by_file)
    for index, names in enumerate(names_by_file):
        file = "model.safetensors" if num_files == 1 else f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
        (folder / f"{index}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if num_files == 1:
        return
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def source_dtype(source: str) -> torch.dtype:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    return config.dtype or config.get_text_config().dtype or torch.float32
