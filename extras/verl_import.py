"""Imports the released code's checkpoints (verl, FSDP) to Hugging Face folders. Every script can start from these.

    python -m extras.verl_import RUN/global_step_100/actor OUT [--model FOLDER]

The folder holds one file per rank, model_world_size_W_rank_R.pt: parameter names -> the rank's shard, as a DTensor over
the mesh ("fsdp",) or ("ddp", "fsdp"), or a plain tensor. Config and tokenizer lie in its huggingface/, or in FOLDER.
"""

from __future__ import annotations

import argparse
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from arpo.checkpoint.export import source_dtype, write_hf
from arpo.config.exits import exit_with
from arpo.errors import UserError
from arpo.model.loading import build_on_meta

FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
SAFE_CLASSES = [DTensor, DTensorSpec, TensorMeta, DeviceMesh, Shard, Replicate, Partial]


def import_verl(actor: Path, folder: Path, *, model: str = "") -> None:
    """Write the checkpoint's weights to `folder`. Raises UserError for missing or mixed ranks, shapes or names that are
    not the model's, or a pickle that holds more than tensors."""
    if folder.exists():
        raise UserError(f"{folder}: exists already; choose another folder")
    files = rank_files(actor)
    source = model or str(actor / "huggingface")
    if not (Path(source) / "config.json").exists() and (not model or Path(model).is_dir()):
        raise UserError(f"{source}: no config.json; pass --model FOLDER, the model that the run started from")
    shards = [load_rank(file) for file in files]
    expected = {name: tuple(p.shape) for name, p in build_on_meta(source, "sdpa").named_parameters()}
    for name in expected:
        if absent := [file.name for file, shard in zip(files, shards, strict=True) if name not in shard]:
            raise UserError(f"{actor}: {name} is not in {absent[0]}; is it a checkpoint of {source}?")
    for name in sorted(shards[0].keys() - expected.keys()):
        if name != "lm_head.weight" and "rotary_emb." not in name:
            raise UserError(f"{actor}: {name} is not in the model of {source}; pass --model FOLDER of the right one")

    dtype = source_dtype(source)
    parts = ((name, [shard[name] for shard in shards]) for name in expected)
    write_hf(((n, join(part, expected[n], f"{actor}: {n}").to(dtype)) for n, part in parts), folder, source)


def rank_files(actor: Path) -> list[Path]:
    """Return the files of all ranks, by rank. Raises UserError if some are missing, or world sizes are mixed."""
    found = {match: path for path in actor.glob("model_world_size_*.pt") if (match := FILE.fullmatch(path.name))}
    if not found:
        raise UserError(f"{actor}: no model_world_size_W_rank_R.pt; give the folder RUN/global_step_N/actor")
    sizes = sorted({int(match[1]) for match in found})
    if len(sizes) > 1:
        raise UserError(f"{actor}: files of world sizes {sizes} lie together; move those of the older run away")
    by_rank = {int(match[2]): path for match, path in found.items()}
    if absent := sorted(set(range(sizes[0])) - by_rank.keys()):
        raise UserError(
            f"{actor}: model_world_size_{sizes[0]}_rank_{absent[0]}.pt is missing ({len(absent)} of {sizes[0]} files "
            "are); copy it from the node that wrote it"
        )
    return [by_rank[rank] for rank in range(sizes[0])]


def load_rank(file: Path) -> dict[str, Any]:
    """Return tensors or DTensors by name, mapped from the file. Unpickles nothing but tensors and their sharding."""
    try:
        with torch.serialization.safe_globals(SAFE_CLASSES):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # whose words advise to load it as a program
        raise UserError(f"{file}: cannot be read as weights; it is damaged, or holds more than tensors") from None
    except Exception as error:  # torch raises whatever its unpickler meets
        raise UserError(f"{file}: cannot be read as weights ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(state, dict):
        raise UserError(f"{file}: holds a {type(state).__name__}, not a state dict")
    return state


def join(shards: list[Any], shape: tuple[int, ...], what: str) -> torch.Tensor:
    """Return the whole tensor. Plain shards are either whole on every rank, or cut along dimension 0."""
    if all(isinstance(shard, DTensor) for shard in shards):
        whole = join_dtensors(shards, what)
    elif tuple(shards[0].shape) == shape:
        whole = shards[0]
    else:
        whole = torch.cat(shards)
    if tuple(whole.shape) != shape:
        raise UserError(f"{what} has shape {tuple(whole.shape)}, the config says {shape}; pass --model FOLDER")
    return whole


def join_dtensors(shards: list[DTensor], what: str) -> torch.Tensor:
    """Concatenate shards, given by rank, along the mesh's one sharded dimension. Of copies the first is taken."""
    sharded = [dim for dim, placement in enumerate(shards[0].placements) if isinstance(placement, Shard)]
    if len(sharded) > 1 or any(isinstance(placement, Partial) for placement in shards[0].placements):
        raise UserError(f"{what} is cut by {shards[0].placements}; only FSDP and DDP x FSDP are supported")
    if not sharded:
        return shards[0].to_local()
    ranks = shards[0].device_mesh.mesh  # (ddp, fsdp) or (fsdp,): the rank at each place
    if ranks.numel() != len(shards):
        raise UserError(
            f"{what} was cut for {ranks.numel()} ranks, and here are {len(shards)} files; use those of one run"
        )
    line = ranks.movedim(sharded[0], -1).reshape(-1, ranks.shape[sharded[0]])[0]
    return torch.cat([shards[rank].to_local() for rank in line.tolist()], dim=shards[0].placements[sharded[0]].dim)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.verl_import", description=__doc__.splitlines()[0])
    parser.add_argument("actor", type=Path, help="RUN/global_step_100/actor")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--model", default="", help="folder with config and tokenizer, if they have moved")
    args = parser.parse_args()
    try:
        import_verl(args.actor, args.out, model=args.model)
    except UserError as error:
        exit_with(error)
    print(args.out)


if __name__ == "__main__":
    main()
