"""Estimate of what fits and how long a step takes, for five model sizes on 1 to 128 nodes.

    python benchmarks/scaling.py [--hardware 8xH100-80GB] [--config configs/qwen2.5_7b.yaml] [--quick]
    python benchmarks/scaling.py --hardware 1xRTX4090-24GB --nodes 1 --config configs/gsm8k.yaml --model.lora_rank 32

Every number is an estimate, by the formulas and assumptions of benchmarks/shared/cost_model.py. The assumptions are
printed; no GPU was measured. On the CPU it measures the bytes of parameters, gradients, optimizer state and activations
of a tiny model (last line; ratio = predicted / measured).

With --config FILE ... it estimates a run of train_rl.py with these files, their model, and any flags of train_rl.py: a
step, and the hours and the disk of all steps, validations and saves. Responses are assumed within the config's limits,
and tool calls only if it has tools. Exit code 1, with a warning, if the step cannot fit. Without --config, all sizes
take the defaults of train_rl.py (the paper's 7B recipe).

If one of the files is called ...sft.yaml, the step is a step of train_sft.py, and the hours are those of the entire run
(--conversations: number in the file; --conversation_tokens: their mean length, which decides the time).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.errors import UserError
from arpo.options import RolloutConfig
from arpo.start.load import run_or_exit
from arpo.start.memory import FP32, GIB
from benchmarks.shared.cost_model import (
    SftWorkload,
    Workload,
    activation_bytes,
    memory,
    misfits,
    seconds,
    sft_memory,
    sft_seconds,
)
from benchmarks.shared.hardware import HARDWARE, Hardware
from benchmarks.shared.recipe import DISK_GB_S, Recipe, checkpoint_bytes, disk_bytes, export_bytes, hours, recipe_of
from benchmarks.shared.shapes import MODELS, OTHER_MODELS, Shape, shape_from_json

if TYPE_CHECKING:
    from train_rl import RLConfig

# ---------------------------------------------------------------------------------------------------------- tables

COLUMNS = ("model", "nodes", "prompts", "train GiB", "rollout GiB", "KV GiB", "rollout s (tail)", "logprobs s")
COLUMNS += ("update s (comm)", "sync s", "step s")
RUN_COLUMNS = ("nodes", "steps: hours", "validations: hours", "saves: hours", "hours in all")
SFT_COLUMNS = ("model", "nodes", "conversations", "train GiB", "step s (comm)", "steps", "hours")
KNOWN_CONVERSATIONS = {"dongguanting/ARPO-SFT-54K": 54_000}
"""Data set -> its conversations, about."""


def row(name: str, shape: Shape, work: Workload, hw: Hardware, nodes: int) -> str:
    num_gpus = nodes * hw.gpus_per_node
    m = memory(shape, work, hw)
    reasons = misfits(shape, work, hw, num_gpus)
    cells = [name, str(nodes), str(work.num_prompts), *(f"{x / GIB:.0f}" for x in (m.training, m.rollout, m.kv_cache))]
    if reasons:
        return f"| {' | '.join(cells)} | does not fit: {'; '.join(reasons)} |"
    s = seconds(shape, work, hw, num_gpus)
    cells += [f"{s.rollout:.0f} ({s.tail:.0f})", f"{s.old_logprobs:.0f}", f"{s.update:.0f} ({s.collectives:.0f})"]
    return f"| {' | '.join([*cells, f'{s.sync:.1f}', f'{s.step:.0f}'])} |"


def table(models: dict[str, Shape], work: Workload, hw: Hardware, all_nodes: list[int]) -> list[str]:
    """Return the lines of the table. If a GPU would have less than one prompt, prompts and mini-batches are scaled
    up."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name, shape in models.items():
        for nodes in all_nodes:
            num_gpus = nodes * hw.gpus_per_node
            factor = max(1, math.ceil(num_gpus / work.num_prompts))
            per_minibatch = factor * work.num_prompts_per_minibatch
            grown = replace(work, num_prompts=factor * work.num_prompts, num_prompts_per_minibatch=per_minibatch)
            lines.append(row(name, shape, work=grown, hw=hw, nodes=nodes))
    return lines


def load_rl(argv: list[str]) -> RLConfig:
    """Return the config of these files and flags. Raises UserError like train_rl.py."""
    from arpo.start.load import load_config
    from train_rl import RLConfig

    try:
        return load_config(RLConfig, argv)
    except UserError as error:
        if "num_conversations_per_step" in str(error):
            raise UserError(f"{error}; for SFT name it ...sft.yaml, and scaling.py estimates train_sft.py") from None
        raise


def from_config(argv: list[str]) -> tuple[str, Workload]:
    """Return (model path, workload) of these config files and flags. Raises UserError like train_rl.py."""
    cfg = load_rl(argv)
    return cfg.model.path, workload_of(cfg)


def workload_of(cfg: RLConfig) -> Workload:
    from arpo.update import first_update_computes_old_logprobs

    return Workload(
        num_prompts=cfg.data.num_prompts_per_step,
        group_size=cfg.rollout.group_size,
        max_prompt_tokens=cfg.data.max_prompt_tokens,
        max_response_tokens=cfg.rollout.max_response_tokens,
        num_prompts_per_minibatch=cfg.update.num_prompts_per_minibatch,
        num_epochs=cfg.update.num_epochs,
        max_tokens_per_microbatch=cfg.update.max_tokens_per_microbatch,
        recompute_every_n_layers=cfg.model.recompute_every_n_layers,
        reference=cfg.loss.kl_coefficient > 0 and not cfg.loss.offload_reference,
        critic=cfg.advantage.needs_critic,
        first_update_computes_old_logprobs=first_update_computes_old_logprobs(cfg.loss),
        max_num_seqs=cfg.engine.max_num_seqs,
        gpu_memory_utilization=cfg.engine.gpu_memory_utilization,
        shard_gpus=cfg.model.shard_size,
        lora=cfg.model.lora_rank > 0,
        offload=cfg.optim.offload,
        tree_token_ratio=1.0 if cfg.update.layout == "packed" else Workload.tree_token_ratio,
        **lengths(cfg.data.max_prompt_tokens, cfg.rollout, num_tools=len(cfg.tools.names)),
    )


def recipe_lines(recipe: Recipe, shape: Shape, work: Workload, hw: Hardware, all_nodes: list[int]) -> list[str]:
    """Return the table of the run's hours and the line of its disk."""
    lines = []
    if recipe.num_steps:
        lines += [f"| {' | '.join(RUN_COLUMNS)} |", "|" + "---|" * len(RUN_COLUMNS)]
        for nodes in all_nodes:
            if misfits(shape, work, hw, nodes * hw.gpus_per_node):
                continue
            h = hours(shape, work, recipe, hw=hw, num_gpus=nodes * hw.gpus_per_node)
            cells = [str(nodes), f"{recipe.num_steps}: {h.steps:.1f}", f"{recipe.num_validations}: {h.validations:.1f}"]
            cells += [f"{recipe.num_saves}: {h.saves:.1f}", f"{h.total:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append(f"hours of saves at {DISK_GB_S:g} GB/s; not counted: starts, and validations of unknown length")
    else:
        lines.append("hours: unknown, because data.train is not here; pass --run.num_steps N")
    state = checkpoint_bytes(shape, recipe) / 1e9
    export = export_bytes(shape) / 1e9 if recipe.num_exports else 0
    stays, peak = (number / 1e9 for number in disk_bytes(shape, recipe))
    lines.append(
        f"disk: {stays:.0f} GB, and {peak:.0f} GB during a save (a checkpoint has {state:.1f} GB of state and "
        f"{export:.1f} GB of export; run.keep_checkpoints={recipe.keep_checkpoints})"
    )
    return lines


def is_of_sft(paths: list[str]) -> bool:
    """Whether the files are for train_sft.py, which their names say: configs/sft.yaml, configs/demo_sft.yaml."""
    return any(Path(path).stem.endswith("sft") for path in paths)


def sft_from_config(argv: list[str], num_conversations: int) -> tuple[str, SftWorkload, int]:
    """(model path, what the files say of the step, steps of the run; 0 if that is not known).

    num_conversations: those of the file; 0 = as many as the papers' data set has, if it is that one. Raises UserError
    like train_sft.py.
    """
    from arpo.start.load import load_config
    from train_sft import SFTConfig

    cfg = load_config(SFTConfig, argv)
    work = SftWorkload(
        model=cfg.model,
        num_conversations=cfg.data.num_conversations_per_step,
        max_tokens_per_microbatch=cfg.data.max_tokens_per_microbatch,
        offload=cfg.optim.offload,
    )
    num_conversations = num_conversations or KNOWN_CONVERSATIONS.get(cfg.data.train, 0)
    of_epochs = cfg.run.num_epochs * (num_conversations // cfg.data.num_conversations_per_step)
    return cfg.model.path, work, cfg.run.num_steps or of_epochs


def sft_table(name: str, shape: Shape, work: SftWorkload, hw: Hardware, nodes: list[int], num_steps: int) -> list[str]:
    """Return a line for each number of nodes."""
    lines = [f"| {' | '.join(SFT_COLUMNS)} |", "|" + "---|" * len(SFT_COLUMNS)]
    training = sft_memory(shape, work, hw).training / GIB
    for num_nodes in nodes:
        cells = [name, str(num_nodes), str(work.num_conversations), f"{training:.0f}"]
        if training > hw.memory_gib:
            lines.append(
                f"| {' | '.join(cells)} | does not fit: training needs {training:.0f} of {hw.memory_gib} GiB |"
            )
            continue
        step, exposed = sft_seconds(shape, work, hw, num_nodes * hw.gpus_per_node)
        hours = f"{num_steps * step / 3600:.1f}" if num_steps else "?"
        cells += [f"{step:.2f} ({exposed:.2f})", str(num_steps or "?"), hours]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def lengths(max_prompt_tokens: int, rollout: RolloutConfig, *, num_tools: int) -> dict[str, float]:
    """Return the assumed lengths of trajectories: the defaults of Workload, cut to the limits of the config."""
    num_calls = rollout.max_tool_calls if num_tools else 0
    room = rollout.max_response_tokens if rollout.context == "append" else rollout.max_trajectory_tokens
    results = min(Workload.result_tokens, num_calls * rollout.max_result_tokens)
    shrink = min(1.0, room / (Workload.sampled_tokens + results))  # an average response must fit
    return {
        "prompt_tokens": min(Workload.prompt_tokens, max_prompt_tokens),
        "sampled_tokens": shrink * Workload.sampled_tokens,
        "result_tokens": shrink * results,
        "longest_sampled_tokens": min(Workload.longest_sampled_tokens, room),
        "longest_tool_seconds": Workload.longest_tool_seconds * min(1.0, num_calls / RolloutConfig.max_tool_calls),
    }


def shape_of(path: str) -> Shape:
    """Return the shape of a folder with config.json, or of a path that contains the name of a model we know."""
    if (Path(path) / "config.json").exists():
        c = json.loads((Path(path) / "config.json").read_text())
        return shape_from_json(c)
    # compare letters and digits only: runs/qwen2.5_7b-sft/hf is a Qwen2.5-7B
    separators = re.compile(r"[^a-z0-9]")
    shapes = MODELS | OTHER_MODELS
    matching = [name for name in shapes if separators.sub("", name.lower()) in separators.sub("", path.lower())]
    if not matching:
        raise UserError(f"model.path={path}: no folder with config.json; say --model {'|'.join(shapes)}, or a folder")
    return shapes[matching[0]]


# ----------------------------------------------------------------------------------------- measured on this machine


def measure(shape: Shape, num_tokens: int) -> dict[str, tuple[float, float]]:
    """Return name -> (predicted, measured) bytes of a training step of a float32 Qwen3 of this shape on one rank."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers}
    heads = {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
    config = Qwen3Config(**sizes, **heads, vocab_size=shape.vocab, tie_word_embeddings=shape.tied)
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(num_tokens)[None] % shape.vocab
    weight_storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weight_storages:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    hidden.sum().backward()
    model.lm_head.weight.grad = torch.zeros_like(model.lm_head.weight)
    optimizer.step()
    states = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    weights = FP32 * shape.parameters
    return {
        "parameters": (weights, sum(p.nbytes for p in model.parameters())),
        "gradients": (weights, sum(p.grad.nbytes for p in model.parameters())),
        "optimizer": (2 * weights, sum(t.nbytes for t in states)),
        "activations": (activation_bytes(shape, num_tokens, FP32, every=0), sum(saved.values())),
    }


def estimate_sft(args: argparse.Namespace, flags: list[str], hw: Hardware) -> None:
    """Print the table of train_sft.py's step. Ends with a warning if it fits nowhere. Raises UserError."""
    path, work, num_steps = sft_from_config([*args.config, *flags], args.conversations)
    work = replace(work, conversation_tokens=args.conversation_tokens)
    path = args.model or path
    lines = sft_table(path, shape_of(path), work, hw=hw, nodes=args.nodes, num_steps=num_steps)
    print(f"{args.hardware}: {hw}\n{work}\n")
    print("\n".join(lines))
    if not num_steps:
        print("\nsteps and hours: pass --conversations N, or --run.num_steps in a file")
    if all("does not fit" in line for line in lines[2:]):
        sys.exit(
            f"warning: {' '.join(args.config)} does not fit on {args.hardware}; lower data.max_tokens_per_microbatch"
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hardware", choices=HARDWARE, default="8xH100-80GB")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--config", nargs="+", help="estimate this run only, for its own model, or --model")
    parser.add_argument("--model", help="a model's folder, or its name, where the config's model.path is not there yet")
    parser.add_argument("--conversations", type=int, default=0, help="SFT: conversations of the training file")
    parser.add_argument(
        "--conversation_tokens", type=float, default=SftWorkload.conversation_tokens, help="SFT: their mean length"
    )
    parser.add_argument("--quick", action="store_true", help="measure a smaller model")
    args, flags = parser.parse_known_args(argv)
    if flags and not args.config:
        parser.error(f"unrecognized arguments: {' '.join(flags)}; flags of train_rl.py need --config FILE")
    hw = HARDWARE[args.hardware]
    if args.config and is_of_sft(args.config):
        estimate_sft(args, flags, hw)
        return
    work = Workload()
    models = MODELS
    if args.config:
        cfg = load_rl([*args.config, *flags])
        work = workload_of(cfg)
        path = args.model or cfg.model.path
        models = {path: shape_of(path)}
    print(f"{args.hardware}: {hw}\n{work}\n")
    print("\n".join(table(models, work, hw, args.nodes)))
    if args.config:
        recipe = recipe_of(cfg)
        print("", *recipe_lines(recipe, models[path], work, hw=hw, all_nodes=args.nodes), "", sep="\n")
    if args.quick:
        sizes = {"hidden": 128, "intermediate": 512, "layers": 4, "heads": 4, "vocab": 2048}
    else:
        sizes = {"hidden": 256, "intermediate": 1024, "layers": 8, "heads": 8, "vocab": 8192}
    shape = Shape(**sizes, kv_heads=2, head_dim=32, qk_norm=True)
    bytes_of = measure(shape, num_tokens=256 if args.quick else 1024)
    for name, (predicted, measured) in bytes_of.items():
        print(f"{name}: predicted {predicted / 2**20:.2f} MiB, measured {measured / 2**20:.2f} MiB")
    ours, baseline = (sum(values) / GIB for values in zip(*bytes_of.values(), strict=True))
    print(json.dumps({"name": "scaling", "ratio": ours / baseline, "ours": ours, "baseline": baseline, "unit": "GiB"}))
    if args.config:
        shape = models[path]
        reasons = [misfits(shape, work, hw, nodes * hw.gpus_per_node) for nodes in args.nodes]
        if all(reasons):
            where = f"{args.nodes[0]} node(s) of {args.hardware}"
            sys.exit(f"warning: {' '.join(args.config)} does not fit on {where}: {'; '.join(reasons[0])}")


if __name__ == "__main__":
    run_or_exit(main, None)
