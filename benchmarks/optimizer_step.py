"""AdamW over a rank's shards: tensor by tensor (torch's default for FSDP2's shards), in lists (foreach), and fused.

    python benchmarks/optimizer_step.py [--quick]          (on the GPU if there is one)

The shards have the sizes of a rank of 8 with Qwen2.5-7B (339 DTensors, 0.95 G numbers; on a CPU a hundredth), in
float32, with random gradients. Each kind does a step from the same start. Then the parameters must agree to rounding.
After this check several steps are timed. `ratio` = tensor by tensor / fused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arpo.ranks import Ranks, init_ranks

NUM_RANKS = 8
NUM_LAYERS = 28
HIDDEN = 3584
INTERMEDIATE = 18_944
KV = 512
VOCAB = 152_064
LAYER = [(HIDDEN, HIDDEN), (HIDDEN,), (KV, HIDDEN), (KV,), (KV, HIDDEN), (KV,), (HIDDEN, HIDDEN),
         (INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (HIDDEN,), (HIDDEN,)]  # fmt: skip
SHAPES = [(VOCAB, HIDDEN), (VOCAB, HIDDEN), (HIDDEN,), *LAYER * NUM_LAYERS]
KINDS = {"tensor by tensor": {"foreach": False, "fused": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def shards(ranks: Ranks, *, shrink: int) -> list[torch.nn.Parameter]:
    """Return one rank's rows of all parameters, with gradients. Both sides of a matrix are divided by `shrink`."""
    generator = torch.Generator(ranks.device).manual_seed(0)

    def numbers(*size: int) -> DTensor:
        local = torch.randn(size, generator=generator, device=ranks.device)
        return DTensor.from_local(local, ranks.mesh, [Shard(0)], run_check=False)

    parameters = []
    for rows, *columns in SHAPES:
        size = (rows // NUM_RANKS // shrink, *(width // shrink for width in columns))
        parameter = torch.nn.Parameter(numbers(*size))
        parameter.grad = numbers(*size)
        parameters.append(parameter)
    return parameters


def measure(ranks: Ranks, kind: str, *, shrink: int, num_steps: int) -> tuple[float, float, int]:
    """Return (median milliseconds of a step, weighted sum after the first step, number of elements)."""
    parameters = shards(ranks, shrink=shrink)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, **KINDS[kind])
    optimizer.step()
    sums = torch.stack([p.detach().to_local().double().abs().sum() for p in parameters])
    fingerprint = float((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())
    milliseconds = []
    for _ in range(num_steps):
        synchronize(ranks)
        started = time.perf_counter()
        optimizer.step()
        synchronize(ranks)
        milliseconds.append(1000 * (time.perf_counter() - started))
    return statistics.median(milliseconds), fingerprint, sum(p.to_local().numel() for p in parameters)


def synchronize(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps")
    args = parser.parse_args()
    ranks = init_ranks()
    shrink = 1 if ranks.device.type == "cuda" else 10
    results = {kind: measure(ranks, kind, shrink=shrink, num_steps=3 if args.quick else 10) for kind in KINDS}
    slow_ms, fingerprint, size = results["tensor by tensor"]
    for kind, (milliseconds, other_fingerprint, _) in results.items():
        assert abs(other_fingerprint - fingerprint) < 1e-5 * abs(fingerprint), results
        print(f"{kind:16}  {milliseconds:8.1f} ms")
    fused_ms = results["fused"][0]
    result = {
        "name": "optimizer_step",
        "ratio": slow_ms / fused_ms,
        "ours": fused_ms,
        "baseline": slow_ms,
        "unit": "ms",
        "foreach_ratio": slow_ms / results["foreach"][0],
        "numbers": size,
        "device": ranks.device.type,
    }
    ranks.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
