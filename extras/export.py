"""Make a Hugging Face folder of a checkpoint of any number of ranks, in one process; or LoRA adapters in peft's format.

python -m extras.export RUN/checkpoints/step_000100 OUT [--adapter] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import json
import warnings
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import arpo.checkpoint.manifest as manifest
from arpo.checkpoint.checkpoints import errors_of_all_ranks, verify
from arpo.checkpoint.export import source_dtype, write_hf
from arpo.checkpoint.safe_reader import SafeReader
from arpo.config.exits import exit_with
from arpo.config.sections import ModelConfig
from arpo.errors import UserError
from arpo.log.settings import CONFIG, settings_of
from arpo.model import lora
from arpo.model.loading import build_on_meta, folder_name, materialize, read_weights


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
        write_adapter(trained, folder, base=cfg.path, rank=cfg.lora_rank, alpha=cfg.lora_alpha)
    else:
        dtype = source_dtype(cfg.path)
        write_hf(((name, p.detach().to(dtype)) for name, p in lora.merged_parameters(hf)), folder, cfg.path)


def load_checkpoint(checkpoint: Path, cfg: ModelConfig, *, base: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the model on the CPU, and its trained parameters. base: of a LoRA run, read the other weights too."""
    hf = build_on_meta(cfg.path, "sdpa")
    if cfg.lora_rank:
        lora.add_lora(hf, cfg)
    materialize(hf, torch.device("cpu"))
    hf.tie_weights()  # plain tensors lose the tie on the way out of meta
    if cfg.lora_rank and base:
        read_weights(lora.base_parameters(hf), cfg.path)
    trained = {name: p.detach() for name, p in hf.named_parameters() if p.requires_grad}
    what = f"{checkpoint}: cannot be loaded; is {cfg.path} the model that the run started with?"
    with errors_of_all_ranks(what), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is meant
        dcp.load({"model": trained}, storage_reader=SafeReader(checkpoint), no_dist=True)  # in place
    return hf, trained


def model_of_run(checkpoint: Path, model: str) -> ModelConfig:
    """Return the run's model section at the checkpoint's step, with `model`, if given, as path. Raises UserError."""
    run = checkpoint.resolve().parent.parent
    file = run / CONFIG
    if file.exists():
        # The run may have continued with another lora_alpha, which every weight of the export depends on.
        try:
            settings = settings_of(run, manifest.step_of(checkpoint.resolve()))
            known = {f"model.{f.name}": f.name for f in fields(ModelConfig)}
            cfg = ModelConfig(**{known[key]: value for key, value in settings.items() if key in known})
        except (UserError, AttributeError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file}: cannot be read ({reason}); move it away, and pass --model FOLDER") from None
        return replace(cfg, path=model or cfg.path)
    if not model:
        raise UserError(f"{file} is missing, which names the run's model; pass --model FOLDER")
    return ModelConfig(path=model)


def write_adapter(adapters: dict[str, torch.Tensor], folder: Path, *, base: str, rank: int, alpha: float) -> None:
    """Write adapters (our names -> whole tensors) as peft does: adapter_config.json, adapter_model.safetensors.

    The names are those of the folder `base`. For a vision-language folder they are not ours, and vLLM and peft leave
    out adapters whose names the model lacks, without an error.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig

    folder.mkdir(parents=True)
    of_base = AutoConfig.from_pretrained(base, trust_remote_code=False)
    names = {name: f"base_model.model.{folder_name(name, of_base)}.weight" for name in adapters}
    state = {names[name]: tensor.contiguous() for name, tensor in adapters.items()}
    file = folder / "adapter_model.safetensors"
    save_file(state, file, metadata={"format": "pt"})
    file.chmod(folder.stat().st_mode & 0o666)  # as the umask says; save_file keeps it from everybody else
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-2] for name in adapters}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step_000100")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--adapter", action="store_true", help="only the LoRA adapters, in peft's format")
    parser.add_argument("--model", default="", help="folder with config and tokenizer, if they have moved")
    args = parser.parse_args()
    try:
        export_checkpoint(args.checkpoint, args.out, model=args.model, adapter=args.adapter)
    except UserError as error:
        exit_with(error)
    print(args.out)


if __name__ == "__main__":
    main()
