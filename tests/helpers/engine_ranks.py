"""Run by test_engine.py under torchrun: FSDP2 shards -> engine, on every rank; prints rankN:ok.

A bucket of 40 KB makes several buckets, and one parameter (the embedding) that is larger than a bucket.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from arpo.config.sections import EngineConfig
from arpo.engine import Engine, SamplingSpec
from arpo.engine.weight_sync import BUCKET_BYTES, full_tensors


def main(folder: str) -> None:
    logging.disable_progress_bar()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)

    for bucket_bytes in (1, 40_000, 1 << 30):
        for dtype in (torch.float32, torch.bfloat16):
            stream = full_tensors(
                model.named_parameters(), dtype=dtype, device=torch.device("cpu"), bucket_bytes=bucket_bytes
            )
            gathered = dict(stream)
            assert list(gathered) == list(plain)
            assert all(torch.equal(gathered[name], plain[name].to(dtype)) for name in plain)

    cfg = EngineConfig(dtype="float32", kv_cache_gib=0.03, max_num_seqs=8, max_num_batched_tokens=512)
    random_state = torch.get_rng_state()
    engine = Engine(folder, cfg, max_model_len=128, seed=rank, load_weights=False)
    assert torch.equal(random_state, torch.get_rng_state()), "vLLM seeded the trainer's generator"
    BUCKET_BYTES["cpu"] = 40_000
    engine.sync_weights(model.named_parameters())

    # Different prompts and numbers of steps on the two ranks: the engines are independent.
    ids = list(range(20, 25 + 7 * rank))
    prompt_length = len(ids)
    engine.submit("a", ids, SamplingSpec(max_tokens=8 + 5 * rank, temperature=0.0))
    while engine.num_running:
        for chunk in engine.step():
            ids += chunk.token_ids
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.load_state_dict(plain, strict=False)
    with torch.no_grad():
        logits = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    assert ids[prompt_length:] == logits[prompt_length - 1 : -1].argmax(-1).tolist()

    engine.close()
    assert dist.is_initialized(), "the engine took the trainer's process group with it"
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"rank{rank}:ok\n")  # one write, so that the ranks' lines stay apart


main(sys.argv[1])
