"""Speed of the update on Qwen2.5's shapes with random weights, as a share of the device's rate for matrix products.

    python benchmarks/update_mfu.py [--quick] [--shape 135m|0.5b|0.6b|1.5b|4b|7b]          (on the GPU if there is one)

One rank, or the ranks of torchrun. FSDP2, float32 master weights, bfloat16 compute (float32 on the CPU), each layer
recomputed, chunked head, one packed micro-batch on each rank. FLOPs are the model FLOPs of PaLM (appendix B): 2 per
weight and token forward, 4 backward, the head for loss tokens only, causal attention within rows. Recomputation does
not count. `ratio` = this rate / the rate of one large matrix product in the same dtype, measured in the same run.
`compile_ratio` = time of the step / its time with model.compile=layers. `optimizer_s` = seconds of clipping and AdamW,
or a text if the training state does not fit. Each number is printed as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arpo.batch import MicroBatch, Row, collate
from arpo.config.sections import ModelConfig, OptimConfig
from arpo.model import Policy
from arpo.model.optim import build_optimizer, clip_grad_norm
from arpo.model.policy import attention_implementation, reshard_all, shard
from arpo.ranks import Ranks, init_ranks
from benchmarks.shared.children import print_so_far
from benchmarks.shared.shapes import SHAPES, Shape, config_of

DATASHEET_TFLOPS = {"H200": 989, "H100": 989, "A100": 312}  # dense bfloat16; the SXM parts

STATE_BYTES = 16
"""Per parameter: weight, gradient and two moments in float32."""

PUBLISHED = {("0.6b", 1): 11_900, ("4b", 8): 26_000}
"""(shape, number of H100s) -> tokens per second of prime-rl's trainer on rows of 16,384 tokens, from its repository."""


def build_policy(shape: Shape, cfg: ModelConfig, ranks: Ranks) -> Policy:
    """Return a policy as `load_policy` does, but with small random weights."""
    from transformers import AutoModelForCausalLM

    config = config_of(shape)
    config._attn_implementation = attention_implementation(cfg, ranks.device)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = Policy(hf).train()
    shard(policy, hf, cfg, ranks.mesh, ranks.device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            local = parameter.to_local()
            local.normal_(0, 0.02) if parameter.ndim > 1 else local.fill_(1.0)
    return policy


def one_micro(num_rows: int, num_prompt: int, num_response: int, shape: Shape, device: torch.device) -> MicroBatch:
    rng = np.random.default_rng(0)
    ids = lambda n: rng.integers(0, shape.vocab, n)  # noqa: E731
    rows = [Row(ids(num_prompt), ids(num_response), np.ones(num_response, np.int64)) for _ in range(num_rows)]
    return collate(rows, range(num_rows)).to(device)


def flops(shape: Shape, num_rows: int, num_prompt: int, num_response: int) -> float:
    """Return the model FLOPs of forward and backward of one micro-batch."""
    q = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    # weights of a layer: attention, then MLP
    per_layer = 2 * shape.hidden * (q + kv) + 3 * shape.hidden * shape.intermediate
    length = num_prompt + num_response
    matrices = 2 * shape.layers * per_layer * num_rows * length
    attention = 2 * 2 * shape.layers * q * num_rows * length**2 / 2  # QK and PV, the causal half
    head = 2 * shape.hidden * shape.vocab * num_rows * num_response
    return 3 * (matrices + attention + head)


def seconds(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds, after two warm-ups."""
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def matmul_tflops(device: torch.device, dtype: torch.dtype, repeats: int) -> float:
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, device, repeats) / 1e12


def optimizer_seconds(policy: Policy, step: Callable[[], None], device: torch.device, repeats: int) -> float | str:
    """Return the seconds of clipping and AdamW, or a text: the training state may not fit on one GPU."""
    state = STATE_BYTES * sum(parameter.to_local().numel() for parameter in policy.parameters())
    if device.type == "cuda" and state > torch.cuda.get_device_properties(device).total_memory:
        return f"not measured: the training state is {state / 2**30:.0f} GiB"

    def action() -> None:
        clip_grad_norm(policy, 1.0)
        optimizer.step()

    try:
        optimizer = build_optimizer(policy, OptimConfig())  # allocates the moments
        step()
        return seconds(action, device, repeats)
    except torch.OutOfMemoryError:
        return "out of memory"


def measure(name: str, ranks: Ranks, repeats: int, row_tokens: int) -> dict:
    shape = SHAPES[name]
    device = ranks.device
    sizes = {"tiny": (2, 32, 96), "135m": (8, 100, 156)}.get(name, (4, 512, 3584))
    sizes = (1, row_tokens // 16, row_tokens - row_tokens // 16) if row_tokens else sizes
    cfg = ModelConfig(compute_dtype="bfloat16" if device.type == "cuda" else "float32")
    dtype = getattr(torch, cfg.compute_dtype)
    peak = matmul_tflops(device, dtype, repeats)
    policy = build_policy(shape, cfg, ranks)
    micro = one_micro(*sizes, shape, device)

    def step() -> None:
        policy.zero_grad()
        logprobs, _ = policy(micro)
        logprobs.sum().backward()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_s = seconds(step, device, repeats)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    rate = flops(shape, *sizes) / step_s / 1e12
    result = {
        "name": "update_mfu",
        "ratio": rate / peak,
        "ours": rate,
        "baseline": peak,
        "unit": f"TFLOP/s, {name}",
        "shape": name,
        "step_s": step_s,
        "tokens_per_s": ranks.world_size * micro.input_ids.numel() / step_s,
        "attention": policy.hf.config._attn_implementation,
        "peak_gib": memory,
    }
    if device.type == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
        datasheet = [tflops for part, tflops in DATASHEET_TFLOPS.items() if part in result["gpu"]]
        if datasheet:
            result["datasheet_mfu"] = rate / datasheet[0]
        if row_tokens == 16_384 and (name, ranks.world_size) in PUBLISHED:
            result["prime_rl_tokens_per_s"] = PUBLISHED[name, ranks.world_size]
    if ranks.is_main:
        print_so_far(result)
    reshard_all(policy)
    result["optimizer_s"] = optimizer_seconds(policy, step, device, repeats)
    if ranks.is_main:
        print_so_far(result)
    # Last, because layers that cannot be compiled cannot compute any more.
    for layer in policy.hf.model.layers:
        layer.compile(dynamic=True)
    result["compile_ratio"] = step_s / seconds(step, device, repeats)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="on a GPU the 0.5B shape, else a tiny one; few repeats")
    parser.add_argument("--shape", choices=SHAPES, help="default: 1.5b on a GPU, else tiny")
    parser.add_argument("--row-tokens", type=int, default=0, help="one row of so many tokens")
    parser.add_argument("--hsdp", action="store_true", help="under torchrun: two copies, each over half of the ranks")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    ranks = init_ranks(shard_size=num_ranks // 2 if args.hsdp else 0)
    shape = args.shape or (("0.5b" if args.quick else "1.5b") if on_gpu else "tiny")
    result = measure(shape, ranks, repeats=3 if args.quick else 7, row_tokens=args.row_tokens)
    ranks.close()
    if not ranks.is_main:
        return
    print(f"{shape} with {result['attention']}: {result['tokens_per_s']:.0f} tokens/s, {result['peak_gib']:.1f} GiB")
    print(f"{result['ours']:.3g} of {result['baseline']:.3g} TFLOP/s that a matrix product reaches")
    print(f"with model.compile=layers {result['compile_ratio']:.2f} times as fast")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
