"""A trainer and its engine on the same GPUs: seconds and free memory at each turn of the cycle.

    python benchmarks/gpu/colocated.py [--quick] [--shape 7b] [--trained 0.5b]        (torchrun: the same on its ranks)

Three cycles of: sample, sleep, one update of 16,384 tokens, wake the weights, sync with the KV cache. The engine has
--shape with random weights. --trained is another shape for the trainer, if one GPU cannot hold the training state of
--shape (a 7B model needs 16 bytes per parameter). Then a ballast of the same size as the state of one rank of eight
takes the memory, and the engine gets random weights. The script also prints: the size of vLLM's KV cache against the
estimate of arpo/start/memory.py (`ratio` = measured / estimated), the memory torch cannot give back to vLLM, and the
speed of a checkpoint, of copies to pinned memory, and of an all-gather.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from arpo.checkpoint import Checkpoints
from arpo.checkpoint.snapshot import snapshot
from arpo.config.sections import EngineConfig, ModelConfig, OptimConfig
from arpo.engine import Engine, SamplingSpec
from arpo.engine.weight_sync import expected_parameters
from arpo.model.optim import build_optimizer, clip_grad_norm
from arpo.ranks import Ranks, init_ranks
from arpo.start.memory import engine_memory
from benchmarks.shared.children import print_so_far
from benchmarks.shared.shapes import SHAPES, write_config
from benchmarks.update_mfu import build_policy, one_micro

GIB = 2**30
ON_GPU = torch.cuda.is_available()
STATE_BYTES, RANKS_OF_A_NODE = 12, 8  # weight and two moments


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / GIB if ON_GPU else 0.0


def sample(engine: Engine, num_rows: int, num_tokens: int) -> None:
    for i in range(num_rows):
        engine.submit(f"{i}", [1 + i] * 32, SamplingSpec(max_tokens=num_tokens, seed=i))
    while engine.num_running:
        engine.step()


def random_weights(folder: str, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in expected_parameters(folder).items():
        yield name, torch.randn(parameter.shape, dtype=torch.bfloat16, device=device) * 0.02


def bandwidths(ranks: Ranks, num_bytes: int) -> dict[str, float]:
    """Return GB/s, measured at the second repeat: to and from pinned memory, and received per rank by an all-gather."""
    found = {}
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=ranks.device)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=ON_GPU)
    gathered = torch.empty(num_bytes * ranks.world_size, dtype=torch.uint8, device=ranks.device)
    actions = {
        "to_pinned": lambda: pinned.copy_(on_device),
        "from_pinned": lambda: on_device.copy_(pinned),
        "all_gather": lambda: dist.all_gather_into_tensor(gathered, on_device),
    }
    for name, action in actions.items():
        action()
        moved = num_bytes * (ranks.world_size - 1) if name == "all_gather" else num_bytes
        found[f"{name}_gb_s"] = moved / seconds(action) / 1e9
    return found


def checkpoint_speed(policy, optimizer, ranks: Ranks) -> float:
    """Return GB/s of all ranks together, into a temporary folder in runs/; 0 if the disk is too small."""
    num_bytes = STATE_BYTES * sum(p.numel() for p in policy.parameters())
    Path("runs").mkdir(exist_ok=True)
    if ranks.from_rank_0(shutil.disk_usage("runs").free < 1.2 * num_bytes):
        return 0.0
    folder = Path(ranks.from_rank_0(tempfile.mkdtemp(dir="runs")))
    try:
        return num_bytes / seconds(lambda: Checkpoints(folder, ranks).write(1, snapshot(policy, optimizer))) / 1e9
    finally:
        ranks.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def kv_tokens(engine: Engine, shape_name: str, cfg: EngineConfig) -> dict[str, float]:
    """Return the tokens of vLLM's KV cache ("ours"), and the estimate made at the start of a run."""
    cache = engine.llm.llm_engine.vllm_config.cache_config
    found = float(cache.num_gpu_blocks * cache.block_size)
    total = torch.cuda.get_device_properties(0).total_memory if ON_GPU else 0
    memory = engine_memory(SHAPES[shape_name].sizes, cfg, total)
    computed = memory.kv_tokens if ON_GPU else cfg.kv_cache_gib * GIB / memory.kv_bytes_per_token
    return {"ratio": found / computed, "ours": found, "baseline": computed, "unit": "tokens of KV cache"}


def measure(ranks: Ranks, folder: str, args: argparse.Namespace) -> dict[str, float]:
    name = args.shape
    trained = args.trained or args.shape
    num_rows, num_tokens, row_tokens = (4, 8, 128) if args.quick else (256, 64, 4096)
    shape = SHAPES[trained]
    response = row_tokens - row_tokens // 8
    policy = build_policy(shape, ModelConfig(compute_dtype="bfloat16" if ON_GPU else "float32"), ranks)
    optimizer = build_optimizer(policy, OptimConfig())
    own_bytes, whole = (STATE_BYTES * SHAPES[n].parameters for n in (trained, name))
    ballast = torch.empty(max(whole // RANKS_OF_A_NODE - own_bytes, 0), dtype=torch.uint8, device=ranks.device)
    cfg = EngineConfig(gpu_memory_utilization=args.utilization, max_num_seqs=num_rows, kv_cache_gib=0.1)
    result = {"name": "colocated", "shape": name, "trained": trained, "ballast_gib": ballast.nbytes / GIB}
    start_s = time.perf_counter()
    engine = Engine(folder, cfg, max_model_len=5632, seed=ranks.rank, load_weights=False)
    result |= kv_tokens(engine, name, cfg) | {"start_s": time.perf_counter() - start_s}
    micro = one_micro(num_rows=4, num_prompt=row_tokens // 8, num_response=response, shape=shape, device=ranks.device)

    def update() -> None:
        logprobs, _ = policy(micro)
        logprobs.sum().backward()
        clip_grad_norm(policy, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def sync() -> None:
        engine.sync_weights(random_weights(folder, ranks.device) if args.trained else policy.hf_parameters())

    sync()
    turns = {"sample": lambda: sample(engine, num_rows, num_tokens), "sleep": engine.sleep, "update": update}
    turns |= {"wake": engine.wake_up, "sync": sync}
    for cycle in range(3):
        for turn, action in turns.items():
            result[f"{turn}_s"] = seconds(action)
            result[f"free_after_{turn}_gib"] = free_gib()
            if ranks.is_main:
                print_so_far(result)
            if turn == "update" and ON_GPU:
                torch.cuda.empty_cache()
                unused = (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) / GIB
                result[f"unused_after_update_{cycle + 1}_gib"] = unused
    result["update_tokens_per_s"] = ranks.world_size * micro.input_ids.numel() / result["update_s"]
    engine.close()
    del ballast
    result["checkpoint_gb_s"] = checkpoint_speed(policy, optimizer, ranks)
    return result | bandwidths(ranks, 2**20 if args.quick else 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows and tokens")
    parser.add_argument("--shape", choices=SHAPES, default="7b" if ON_GPU else "tiny")
    parser.add_argument("--trained", choices=SHAPES, help="default: the same")
    parser.add_argument("--utilization", type=float, default=0.7, help="vLLM's share of the GPU")
    args = parser.parse_args()
    ranks = init_ranks()
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, SHAPES[args.shape])
        result = measure(ranks, folder, args)
    ranks.close()
    if ranks.is_main:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
