"""Time of one layer's attention, forward and backward, with each model.attention that this machine can run.

    python benchmarks/attention_backends.py [--quick]          (on the GPU if there is one)

Two micro-batches: long packed rows, and a tree. In the tree, rows share a prompt, and pairs of rows a longer prefix.
All backends compute the same; `difference` is the largest between their outputs. As in training, row lengths change
from repeat to repeat. So a kernel with a preparation for each shape (cuDNN, switched off in the trainer) pays for it.
Times are medians of alternating repeats, of one thread on the CPU. Backends that do not run here are listed with the
reason.

`ratio` = time of the tree with one mask over all tokens / with model.attention=auto. `tree_NAME`, `packed_NAME` = time
with sdpa, row by row / with NAME.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arpo.batch import MicroBatch, Row
from arpo.config.sections import ModelConfig
from arpo.errors import UserError
from arpo.model.attention import attention_backend, register
from arpo.tree import collate_tree

SIZES = {  # query heads, key-value heads, head size, rows, tokens of a row; cuda: Qwen2.5-7B
    "cuda": {"quick": (28, 4, 128, 4, 1000), "full": (28, 4, 128, 8, 4000)},
    "cpu": {"quick": (4, 2, 64, 4, 200), "full": (4, 2, 64, 8, 400)},
}
Attend = Callable[[MicroBatch, list[Tensor]], Tensor]
"""(micro-batch, [queries (1, H, N, d), keys (1, H / group, N, d), values]) -> (1, N, H, d)"""


def micro_batch(kind: str, num_rows: int, length: int, device: torch.device) -> MicroBatch:
    """Return a micro-batch. packed: rows share no token. tree: all rows share a quarter, every two rows a half."""
    rng = np.random.default_rng(length)
    parts = {"prompt": rng.integers(0, 1000, length // 4)}
    rows = []
    for i in range(num_rows):
        pair = parts.setdefault(f"pair {i // 2}", rng.integers(0, 1000, length // 4))
        response = rng.integers(0, 1000, length - 2 * len(pair) + i)
        if kind == "tree":
            prompt = parts["prompt"]
            response = np.concatenate([pair, response])
        else:
            # the first token differs between rows, so that nothing is shared
            prompt = np.array([1000 + i])
            response = np.concatenate([parts["prompt"], pair, response])
        rows.append(Row(prompt, response, np.ones(len(response), np.int64)))
    return collate_tree(rows, range(num_rows)).to(device)


def by_name(name: str) -> Attend:
    """Return the function that a layer calls with this model.attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[register(name)]
    return lambda micro, heads: attend(None, *heads, None, **micro.attention_options())[0]


def by_one_mask(micro: MicroBatch, heads: list[Tensor]) -> Tensor:
    """Call SDPA once, with a mask over all tokens of the micro-batch."""
    paths = micro.paths
    num_tokens = micro.input_ids.shape[1]
    seen = torch.zeros(num_tokens, num_tokens, dtype=torch.bool, device=micro.input_ids.device)
    for queries, keys in zip(seen.split(paths.num_queries), paths.keys.split(paths.num_keys), strict=True):
        causal = torch.ones(len(queries), len(keys), dtype=torch.bool, device=queries.device)
        queries[:, keys] = causal.tril(len(keys) - len(queries))
    query, key, value = heads
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2)


def by_cudnn(micro: MicroBatch, heads: list[Tensor]) -> Tensor:
    """Call SDPA row by row with cuDNN allowed, torch's default from Hopper on."""
    attend = by_name("sdpa")
    torch.backends.cuda.enable_cudnn_sdp(True)
    return attend(micro, heads)


def backends(device: torch.device, dtype: str) -> tuple[dict[str, Attend], dict[str, str]]:
    """Return (name -> backend for those that run here, name -> reason for the others)."""
    usable: dict[str, Attend] = {"one mask": by_one_mask, "sdpa": by_name("sdpa")}
    absent = {}
    for name in ("varlen", "flash_attention_2"):
        try:
            attention_backend(ModelConfig(attention=name, compute_dtype=dtype), device)
            usable[name] = by_name(name)
        except UserError as error:
            absent[name] = str(error)
    if device.type == "cuda":
        usable["sdpa_cudnn"] = by_cudnn
    else:
        absent["sdpa_cudnn"] = "needs a GPU"
    return usable, absent


def seconds(attend: Attend, micro: MicroBatch, heads: list[Tensor], weights: Tensor) -> tuple[float, Tensor]:
    """Return the seconds of forward and backward, and the output."""
    on_gpu = weights.is_cuda
    clock = time.perf_counter if on_gpu else time.process_time
    torch.cuda.synchronize() if on_gpu else None
    started = clock()
    out = attend(micro, heads)
    torch.autograd.grad(out, heads, weights)
    torch.cuda.synchronize() if on_gpu else None
    taken = clock() - started
    torch.backends.cuda.enable_cudnn_sdp(False)
    return taken, out.detach()


def measure(
    kind: str,
    usable: dict[str, Attend],
    *,
    size: tuple[int, int, int, int, int],
    device: torch.device,
    dtype: str,
    repeats: int,
) -> tuple[dict[str, float], float]:
    """Return name -> median seconds, and the largest difference of an output from sdpa's, over sdpa's maximum."""
    heads, kv_heads, head_size, num_rows, length = size
    times: dict[str, list[float]] = {name: [] for name in usable}
    difference = 0.0
    for repeat in range(repeats + 1):  # the first one warms up
        micro = micro_batch(kind, num_rows, length - 7 * repeat, device)
        num_tokens = micro.input_ids.shape[1]
        shapes = [(1, n, num_tokens, head_size) for n in (heads, kv_heads, kv_heads)] + [
            (1, num_tokens, heads, head_size)
        ]
        *inputs, weights = (torch.randn(shape, device=device, dtype=getattr(torch, dtype)) for shape in shapes)
        inputs = [x.requires_grad_() for x in inputs]
        outs = {}
        for name, attend in usable.items():
            taken, outs[name] = seconds(attend, micro, inputs, weights)
            times[name].append(taken)
        scale = outs["sdpa"].abs().max()
        difference = max(difference, *(float((out - outs["sdpa"]).abs().max() / scale) for out in outs.values()))
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter rows, fewer repeats")
    quick = parser.parse_args().quick
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    auto = attention_backend(ModelConfig(compute_dtype=dtype), device)
    size = SIZES[device.type]["quick" if quick else "full"]
    usable, absent = backends(device, dtype)
    result: dict[str, object] = {"name": "attention_backends"}
    differences = []
    for kind in ("packed", "tree"):
        times, difference = measure(kind, usable, size=size, device=device, dtype=dtype, repeats=2 if quick else 7)
        differences.append(difference)
        for name, taken in times.items():
            print(f"{kind:6} {name:18} {1000 * taken:9.2f} ms, sdpa / this {times['sdpa'] / taken:6.2f}")
            if name not in ("sdpa", "one mask"):
                result[f"{kind}_{name}"] = times["sdpa"] / taken
        if kind == "tree":
            result |= {"ratio": times["one mask"] / times[auto], "ours": 1000 * times[auto]}
            result |= {"baseline": 1000 * times["one mask"], "unit": "ms", "auto": auto}
    for name, reason in absent.items():
        print(f"{name}: {reason}")
    print(json.dumps(result | {"difference": max(differences), "device": device.type}))


if __name__ == "__main__":
    main()
