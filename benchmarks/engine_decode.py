"""Decoding with the engine's GPU defaults against each of them switched off.

    python benchmarks/engine_decode.py [--quick]            (0.6B parameters with random weights; --quick: 13M)

usual = CUDA graphs, asynchronous scheduling, noise of all rows in one kernel; eager = without graphs; synchronous =
without asynchronous scheduling; noise_loop = vLLM's noise, one request at a time; fp8 = quantised; v2 = vLLM's second
model runner. Each variant runs in a separate process. The CPU has neither graphs nor asynchronous scheduling. There
only the noise is compared: vLLM's (usual) against ours (noise_hook). Last line: JSON with tokens per second, and the
ratios usual / variant.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from weight_sync import write_config

from arpo.config.sections import EngineConfig
from arpo.engine import Engine, SamplingSpec
from arpo.engine.noise import install_noise_hook

ON_GPU = torch.cuda.is_available()
VARIANTS: dict[str, dict[str, str]] = {
    "usual": {},
    "eager": {"cuda_graphs": "never"},
    "synchronous": {"async_scheduling": "never"},
    "noise_loop": {},
    "fp8": {"quantization": "fp8"},
    "v2": {"model_runner": "v2"},
}


def tokens_per_second(variant: str, *, quick: bool) -> float:
    """Decode twice with every row seeded, and time the second pass."""
    num_rows, num_tokens = (16, 16) if quick and not ON_GPU else (256, 64 if quick else 256)
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, quick=quick)
        cfg = EngineConfig(max_num_seqs=num_rows, gpu_memory_utilization=0.5, **VARIANTS.get(variant, {}))
        engine = Engine(folder, cfg, max_model_len=1024, seed=0, load_weights=False)
        engine.state = "ready"  # random weights are as fast as others
        runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
        if variant == "noise_loop":
            sampler = runner.sampler.topk_topp_sampler
            sampler.forward = sampler.forward_native
        elif variant == "noise_hook":
            install_noise_hook(runner)
        for repeat in range(2):
            num_before = engine.stats.generated_tokens
            started = time.perf_counter()
            for i in range(num_rows):
                spec = SamplingSpec(max_tokens=num_tokens, seed=i, num_entropy_tokens=20)
                engine.submit(f"{repeat}-{i}", [1 + i % 1000] * 32, spec)
            while engine.num_running:
                engine.step()
            seconds = time.perf_counter() - started
        rate = (engine.stats.generated_tokens - num_before) / seconds
        engine.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--variant", help="measure this one alone, in this process")
    args = parser.parse_args()
    if args.variant:
        rate = tokens_per_second(args.variant, quick=args.quick)
        print(json.dumps({"name": "engine_decode", "variant": args.variant, "tokens_per_s": rate}))
        return
    rates = {}
    for variant in VARIANTS if ON_GPU else ("usual", "noise_hook"):
        with ProcessPoolExecutor(1, get_context("spawn" if ON_GPU else "fork")) as apart:
            rates[variant] = apart.submit(tokens_per_second, variant, quick=args.quick).result()
        print(f"{variant:12} {rates[variant]:9.0f} tokens/s", flush=True)
    ratios = {f"usual_against_{name}": rates["usual"] / rate for name, rate in rates.items() if name != "usual"}
    print(json.dumps({"name": "engine_decode", **{f"{n}_tokens_per_s": r for n, r in rates.items()}, **ratios}))


if __name__ == "__main__":
    main()
