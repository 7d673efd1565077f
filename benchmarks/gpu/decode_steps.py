"""Milliseconds of a decode step by the number of rows, and the GPU's part of the time.

    python benchmarks/gpu/decode_steps.py [--quick] [--shape 7b] [--rows 256 64 16 1]

All rows are seeded and have the same context; weights are random. `step` is the time from step to step. `gpu` is the
sum of all kernels, from torch's profiler, in separate steps. `host` = step - gpu: the GPU waits for Python in this
time. `ours` is the part of a step outside vLLM. `cost_model` is the estimate of benchmarks/shared/cost_model.py for an
H100. Last line: JSON; `ratio` = gpu / step at the most rows, which come first.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from arpo.config.sections import EngineConfig
from arpo.engine import Engine, SamplingSpec
from benchmarks.shared.children import print_so_far
from benchmarks.shared.cost_model import decode_seconds
from benchmarks.shared.hardware import HARDWARE
from benchmarks.shared.shapes import SHAPES, write_config

ON_GPU = torch.cuda.is_available()
WARM_UP = 8
"""Uncounted steps after the prefill."""


def submit(engine: Engine, num_rows: int, context: int, num_tokens: int) -> None:
    """Queue rows of different prompts, and do their prefill."""
    for i in range(num_rows):
        prompt = [1 + (i + j) % 1000 for j in range(context)]
        engine.submit(f"{i}", prompt, SamplingSpec(max_tokens=num_tokens, seed=i, num_entropy_tokens=20))
    begun: set[str] = set()
    while len(begun) < num_rows:
        begun |= {chunk.request_id for chunk in engine.step()}
    for _ in range(WARM_UP):
        engine.step()


def measure(engine: Engine, num_rows: int, context: int, num_steps: int) -> dict[str, float]:
    """Milliseconds of a step."""
    vllm = engine.llm.llm_engine
    inside = [0.0]
    step = vllm.step

    def timed() -> list:
        started = time.perf_counter()
        outputs = step()
        inside[0] += time.perf_counter() - started
        return outputs

    # the last rows are still in prefill while the first rows decode
    num_tokens = 2 * (WARM_UP + num_steps) + num_rows * context // 4096 + 64
    submit(engine, num_rows, context, num_tokens)
    vllm.step, started = timed, time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    step_ms = 1000 * (time.perf_counter() - started) / num_steps
    vllm.step = step
    activities = [ProfilerActivity.CUDA] if ON_GPU else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            engine.step()
    # a random model samples the end token with probability 1 / vocabulary
    assert engine.num_running > 0.95 * num_rows, f"{engine.num_running} of {num_rows} rows are left"
    gpu_ms = sum(event.self_device_time_total for event in profiler.key_averages()) / 1000 / num_steps
    engine.abort(list(engine.running))
    engine.reset_prefix_cache()
    return {"step": step_ms, "gpu": gpu_ms, "host": step_ms - gpu_ms, "ours": step_ms - 1000 * inside[0] / num_steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows, a short context, few steps")
    parser.add_argument("--shape", choices=SHAPES, default="7b" if ON_GPU else "tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 64, 16, 1], help="numbers of rows")
    parser.add_argument("--model-runner", choices=("v1", "v2"), default="v1", help="engine.model_runner")
    args = parser.parse_args()
    all_rows, context, num_steps = ([16, 1], 64, 8) if args.quick else (sorted(args.rows, reverse=True), 1500, 50)
    shape = SHAPES[args.shape]
    result = {"name": "decode_steps", "shape": args.shape, "runner": args.model_runner}
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, shape)
        cfg = EngineConfig(
            gpu_memory_utilization=0.9, kv_cache_gib=0.2, max_num_seqs=max(all_rows), model_runner=args.model_runner
        )
        engine = Engine(folder, cfg, max_model_len=4096, seed=0, load_weights=False)
        engine.state = "ready"  # random weights are as fast as others
    for num_rows in all_rows:
        found = measure(engine, num_rows, context, num_steps)
        model_ms = 1000 * decode_seconds(shape, HARDWARE["8xH100-80GB"], num_rows, num_rows * context)
        print(f"{num_rows:4} rows: " + ", ".join(f"{name} {ms:.2f}" for name, ms in found.items()), flush=True)
        result |= {f"{name}_ms_{num_rows}": ms for name, ms in (found | {"cost_model": model_ms}).items()}
        print_so_far(result)
    engine.close()
    most = all_rows[0]
    gpu = result[f"gpu_ms_{most}"]
    step = result[f"step_ms_{most}"]
    print(json.dumps(result | {"ratio": gpu / step, "ours": step, "baseline": gpu, "unit": f"ms, {most} rows"}))


if __name__ == "__main__":
    main()
