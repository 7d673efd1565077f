"""Count how often our Python makes the host wait for a GPU, and time how long it keeps the engine from decoding.

    python benchmarks/host_waits.py [--quick]

Host waits are counted by line, on a simulated CUDA device (tests/fake_gpu) with a tiny model. Counted are an update of
m micro-batches (GRPO with KL and rollout correction, AEPO, a critic; limit 2 m + 10), and the engine's part of a decode
step (limit 1). This needs no GPU, and does not say how long a wait takes.

The time is measured on this machine: vLLM decodes 256 trajectories of a tiny model side by side, then 512. Ours is the
work of `rollout` and `Engine` around vLLM's step (submit, chunks, logprobs, entropies, the bookkeeping of turns). The
baseline is vLLM's step in the same run, with our hook in its sampler. `scheduler` is the part of it that a GPU does not
shorten: to schedule the step, to update the requests, and to process the outputs. On a CPU all are CPU seconds, so that
other processes do not count. The full run fails if ours exceeds LIMIT_OF_SCHEDULER of the scheduler's part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for the simulated device
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from fake_gpu.fake_cuda import CUDA, fake_cuda
from fake_gpu.trainer_step import TrainerStep
from helpers.models import build_tiny_model
from helpers.ranks import mesh_of_one
from helpers.updates import CASES

from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import Codec, TagsCodec
from arpo.sampling.sampler import rollout
from arpo.tools.base import ToolRunner
from arpo.trajectory import Prompt
from benchmarks.shared.tiny_model import LETTERS, write_model

NUM_SEQUENCES = 256
MANY_SEQUENCES = 512
LIMIT_OF_SCHEDULER = 0.3
"""Largest time of our work, as a share of vLLM's scheduler in the same run. Seen: 0.16 to 0.2, which is 5 of 29
microseconds for a row and step."""
SCHEDULER = ("schedule", "update_from_output", "process_outputs")
SIZES = {"quick": (16, 1), "full": (64, 3)}  # tokens of a trajectory; repeats
UPDATES = {"grpo": "everything in the loss", "aepo": "aepo", "critic": "gae"}
"""Name in the output -> name of the case in tests/helpers/updates.py."""


def waits_of_updates(folder: str) -> dict[str, tuple[int, Counter[str]]]:
    """Return case -> (number of micro-batches, waits by line) for one update of all models of the case."""
    waits_of = {}
    with mesh_of_one(), fake_cuda() as stalls:
        step = TrainerStep(Path(folder))
        for name, case in UPDATES.items():
            stages, [minibatch], _ = step.run(stalls, *CASES[case], layout="packed")
            waits = sum((stages[s].waits for s in ("critic 1", "update 1", "metrics") if s in stages), Counter())
            waits_of[name] = (len(minibatch.micros), waits)
    return waits_of


def waits_of_engine_step(engine: Engine) -> Counter[str]:
    """Return the waits by line of our work in a decode step: the sampler's hook, then a chunk for each request."""
    [gather] = engine.llm.collective_rpc(lambda worker: worker.model_runner.sampler.gather_logprobs)
    with fake_cuda() as stalls:
        logprobs = torch.randn(4, 2048, device=CUDA).log_softmax(-1)
        token_ids = torch.zeros(4, dtype=torch.int64, device=CUDA)
        stalls.clear()
        tensors = gather(logprobs, 1, token_ids)
        waits = Counter(stalls.waits)
        # vLLM itself transfers these with the sampled tokens, so `chunk` gets lists
        rows = tensors.logprobs.tolist()
        stalls.clear()
        engine.running |= {str(i): SimpleNamespace(**request_in_flight()) for i in range(4)}
        for i, row in enumerate(rows):
            engine.make_chunk(output_of(str(i), row))
        return waits + stalls.waits


def request_in_flight() -> dict:
    return {"spec": SimpleNamespace(num_entropy_tokens=20, num_top_logprobs=0), "num_prompt_tokens": 3, "num_tokens": 0}


def output_of(request_id: str, row: list[float]) -> SimpleNamespace:
    """Return an output of vLLM: one token, and the end of the request."""
    completion = SimpleNamespace(token_ids=[0], logprobs=[row], finish_reason="length", stop_reason=None)
    return SimpleNamespace(request_id=request_id, outputs=[completion], finished=True, num_cached_tokens=0)


class MeasuredEngine(Engine):
    """Measures the seconds and the number of calls of vLLM's own functions, by name."""

    clock = staticmethod(time.perf_counter if torch.cuda.is_available() else time.process_time)

    def make_llm(self, *args, **kwargs):
        llm = super().make_llm(*args, **kwargs)
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        vllm = llm.llm_engine
        scheduler = vllm.engine_core.engine_core.scheduler
        self.measure(vllm, "step", "add_request")
        self.measure(scheduler, "schedule", "update_from_output")
        self.measure(vllm.output_processor, "process_outputs")
        return llm

    def measure(self, owner: object, *names: str) -> None:
        for name in names:
            setattr(owner, name, self.timed(name, getattr(owner, name)))

    def timed(self, name: str, function: Callable) -> Callable:
        def measured(*args, **kwargs):
            started = self.clock()
            result = function(*args, **kwargs)
            self.seconds[name] += self.clock() - started
            self.calls[name] += 1
            return result

        return measured


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a decode step."""

    ours: float
    vllm: float
    scheduler: float
    """The part of vLLM's that a GPU does not shorten."""


def decode(engine: MeasuredEngine, codec: Codec, *, num_sequences: int, num_tokens: int, repeats: int) -> StepTimes:
    """Return the times of the repeat with the median time of our work."""
    tools = ToolRunner({})
    rng = random.Random(0)
    times = []
    # Short enough for one step of prefill: vLLM on a CPU cannot cut the prompt of a request that has a seed.
    ids = [tuple(codec.encode("".join(rng.choices(LETTERS, k=16)))) for _ in range(16)]
    prompts = [Prompt(f"p{i}", [], [""], tools=(), token_ids=ids[i]) for i in range(16)]
    group_size = num_sequences // len(prompts)
    cfg = RolloutConfig(group_size, max_response_tokens=num_tokens, answer_reserve_tokens=8)
    no_branches = BranchingConfig("none", group_size)
    for repeat in range(repeats + 1):
        engine.reset_prefix_cache()
        engine.seconds.clear()
        engine.calls.clear()
        started = engine.clock()
        groups = rollout(prompts, engine, tools, codec, cfg=cfg, branching=no_branches, seed=repeat)
        total = engine.clock() - started
        assert sum(len(group.trajectories) for group in groups) == num_sequences
        seconds = engine.seconds
        ms_per_step = 1000 / engine.calls["step"]
        times.append(
            StepTimes(
                ours=ms_per_step * (total - seconds["step"] - seconds["add_request"]),
                vllm=ms_per_step * seconds["step"],
                scheduler=ms_per_step * sum(seconds[name] for name in SCHEDULER),
            )
        )
    tools.close()
    return sorted(times[1:], key=lambda step: step.ours)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter trajectories, one repeat: under a minute")
    is_quick = parser.parse_args().quick
    num_tokens, repeats = SIZES["quick" if is_quick else "full"]
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_model(f"{folder}/trainer")
        updates = waits_of_updates(f"{folder}/trainer")
        write_model(f"{folder}/engine")
        from transformers import AutoTokenizer

        codec = TagsCodec(AutoTokenizer.from_pretrained(f"{folder}/engine"))
        cfg = EngineConfig(kv_cache_gib=0.5, max_num_seqs=MANY_SEQUENCES, gpu_memory_utilization=0.3)
        engine = MeasuredEngine(f"{folder}/engine", cfg, max_model_len=1024, seed=0)
    step = decode(engine, codec, num_sequences=NUM_SEQUENCES, num_tokens=num_tokens, repeats=repeats)
    large_step = decode(engine, codec, num_sequences=MANY_SEQUENCES, num_tokens=num_tokens, repeats=repeats)
    engine_waits = waits_of_engine_step(engine)
    engine.close()

    for name, (m, waits) in updates.items():
        print(f"update, {name}: {waits.total()} host waits for {m} micro-batches (limit {2 * m + 10})")
        print(*(f"    {count} {line}" for line, count in waits.items()), sep="\n")
    print(f"engine step: {engine_waits.total()} host waits (limit 1)", *engine_waits)
    row_us = 1000 * step.ours / NUM_SEQUENCES
    share = step.ours / step.scheduler
    print(f"decode step of {NUM_SEQUENCES} sequences: ours {step.ours:.2f} ms, vLLM {step.vllm:.2f} ms")
    print(f"ours: {row_us:.1f} us for a row, {share:.2f} of vLLM's scheduler (limit {LIMIT_OF_SCHEDULER})")
    result = {
        "name": "host_waits",
        "ratio": step.vllm / step.ours,
        "ours": step.ours,
        "baseline": step.vllm,
        "unit": "ms per decode step",
        "row_us": row_us,
        "of_scheduler": share,
        "host_ms_512": large_step.ours + large_step.scheduler,
    }
    for name, (m, waits) in updates.items():
        result |= {f"waits_{name}": waits.total(), f"limit_{name}": 2 * m + 10}
    print(json.dumps(result | {"waits_engine_step": engine_waits.total()}))
    if share > LIMIT_OF_SCHEDULER and not is_quick:
        sys.exit(
            f"error: our work takes {share:.2f} of the time of vLLM's scheduler; the limit is {LIMIT_OF_SCHEDULER}"
        )


if __name__ == "__main__":
    main()
