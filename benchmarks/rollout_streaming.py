"""Our streaming rollout against the lock-step schedule of the released code: same engine, same trajectories.

    python benchmarks/rollout_streaming.py [--quick] [--against REF]          (on the GPU if there is one)

64 trajectories (4 prompts x 16), three tool turns each, tool latencies log-uniform from 0.05 to 2 s. The model is
random, but the sampler returns prescribed tokens. So both schedules generate exactly the same trajectories with the
same stop strings, and every call takes the same time. Lock-step: all generate until all have stopped, then all calls
run side by side, then all continue.

No schedule can beat the bound, the larger of two times: the longest trajectory with its tool calls, decoded alone; and
all tokens decoded without any tool.

Also shown: tokens per second of the Engine's submit/step loop against vLLM's own `LLM.generate`, on the same requests
with the same sampling parameters; and on requests without logprobs, entropies, stop strings and seeds ("bare"). On a
CPU also against itself with vLLM's own RMSNorm (`norms_ratio`; arpo/engine/cpu_norms.py).

--against REF: only the streaming rollout, in turn with this code and with the code of a git ref. The ratio is REF /
here in CPU seconds of a rollout with tools that answer at once: above 1 the code here is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.config.sections import EngineConfig
from arpo.engine import Engine, SamplingSpec
from arpo.options import BranchingConfig, RolloutConfig
from arpo.protocol import Codec, TagsCodec
from arpo.sampling.sampler import rollout
from arpo.tools.base import Tool, ToolResult, ToolRunner
from arpo.trajectory import Group, Prompt
from benchmarks.shared.prescribed_tokens import PrescribedTokens
from benchmarks.shared.tiny_model import LETTERS, write_model
from benchmarks.shared.two_versions import rounds_of_both, serve_rounds
from benchmarks.shared.vllms_norms import vllms_norms

TOOL_TURNS = 3
LATENCY_S = (0.05, 2.0)
SIZES = {  # tokens of a turn from, to (log-uniform); repeats; rounds of each version
    "quick": (4, 12, 1, 2),
    "full": (32, 256, 3, 8),
}


class SlowTool(Tool):
    """Takes a time that depends on the argument alone: log-uniform over LATENCY_S, times `scale`."""

    tag = "search"
    scale = 1.0

    @staticmethod
    def latency_s(argument: str) -> float:
        digest = hashlib.blake2b(argument.encode(), digest_size=8).digest()
        low, high = map(math.log, LATENCY_S)
        return math.exp(low + (high - low) * int.from_bytes(digest) / 2**64)

    async def run(self, argument: str) -> ToolResult:
        await asyncio.sleep(self.scale * self.latency_s(argument))
        return ToolResult("nothing was found for this query", ok=True)

    async def aclose(self) -> None:
        """Do nothing: there is nothing to release."""


class TimedEngine(Engine):
    """Counts the seconds spent in `step`."""

    busy_s = 0.0

    def step(self):
        started = time.perf_counter()
        chunks = super().step()
        self.busy_s += time.perf_counter() - started
        return chunks


def lock_step(prompts: list[Prompt], engine: Engine, tools: ToolRunner, codec: Codec) -> None:
    """Generate, wait for all; call, wait for all."""
    contexts = {f"{p.prompt_id}|{i}": list(p.token_ids) for p in prompts for i in range(16)}
    active = list(contexts)
    for turn in range(TOOL_TURNS + 1):
        calls = {}
        for key in active:
            engine.submit(f"{key}|{turn}", contexts[key], spec_of(prompts[0], tools))
        while engine.num_running:
            for chunk in engine.step():
                key = chunk.request_id.rsplit("|", 1)[0]
                contexts[key] += chunk.token_ids
                if chunk.finish == "stop":
                    text = codec.decode(contexts[key])
                    calls[key] = text[text.rindex("<search>") + len("<search>") : text.rindex("</search>")]
        for key, argument in calls.items():
            tools.start(key, "search", argument)
        while tools.num_pending:
            for key, result in tools.collect(block=True):
                contexts[key] += codec.encode_result(result.text, 1000)[1]
        active = list(calls)
    assert not active


def spec_of(prompt: Prompt, tools: ToolRunner) -> SamplingSpec:
    """Return the sampling parameters of the rollout."""
    return SamplingSpec(
        max_tokens=2000, stop=tuple(f"</{tag}>" for tag in prompt.tools if tag in tools.tools), seed=7,
        num_entropy_tokens=BranchingConfig().entropy_tokens, num_chunk_tokens=BranchingConfig().entropy_tokens - 1,
    )  # fmt: skip


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def tokens_per_second(engine: Engine, prompts: list[Prompt], spec: SamplingSpec, repeats: int) -> dict[str, float]:
    """Measure in turn our loop, LLM.generate with the same sampling parameters, and bare requests.

    On a CPU in CPU seconds, as nothing waits: other processes do not count.
    """
    clock = time.perf_counter if engine.device.type == "cuda" else time.process_time
    requests = [(f"{p.prompt_id}|g{i}|0", list(p.token_ids)) for p in prompts for i in range(16)]
    rates: dict[str, list[float]] = {"ours": [], "generate": [], "bare": []}

    def ours() -> int:
        count = 0
        for request_id, ids in requests:
            engine.submit(request_id, ids, spec)
        while engine.num_running:
            count += sum(len(chunk.token_ids) for chunk in engine.step())
        return count

    def generate(params) -> int:
        outputs = engine.llm.generate([{"prompt_token_ids": ids} for _, ids in requests], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    bare = engine.sampling_params(spec)
    bare.logprobs = None
    bare.seed = None
    bare.stop = []
    bare.detokenize = False
    actions = {
        "ours": ours,
        "generate": lambda: generate(engine.sampling_params(spec)),
        "bare": lambda: generate(bare),
    }
    if engine.device.type == "cpu":
        rates["vllm_norms"] = []
        actions["vllm_norms"] = vllms_norms()(ours)
    for _ in range(repeats + 1):
        for name, action in actions.items():
            started = clock()
            count = action()
            rates[name].append(count / (clock() - started))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def longest_chain_s(groups: list[Group], seconds_per_token: float) -> float:
    """Return the seconds of the longest trajectory if it is decoded alone and its calls start at once."""
    return max(
        t.num_sampled_tokens * seconds_per_token + sum(SlowTool.latency_s(c.argument) for c in t.tool_calls)
        for group in groups
        for t in group.trajectories
    )


class Bench:
    """An engine with a small random model, a slow tool, and four prompts."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder)
            from transformers import AutoTokenizer

            self.codec = TagsCodec(AutoTokenizer.from_pretrained(folder))
            cfg = EngineConfig(kv_cache_gib=0.25, max_num_seqs=64, gpu_memory_utilization=0.3)
            self.engine = TimedEngine(folder, cfg, max_model_len=4096, seed=0)
        self.tool = SlowTool()
        self.tools = ToolRunner({"search": self.tool})
        rng = random.Random(0)
        texts = ["".join(rng.choices(LETTERS, k=200)) for _ in range(4)]
        ids = [tuple(self.codec.encode(text)) for text in texts]
        self.prompts = [Prompt(f"p{i}", [], [""], tools=("search",), token_ids=ids[i]) for i in range(4)]

    def prescribe(self, shortest: int, longest: int) -> None:
        """Let the engine sample the prescribed tokens from now on."""
        prescribed = PrescribedTokens(self.codec, shortest, longest, tool_turns=TOOL_TURNS)
        self.engine.llm.collective_rpc(prescribed.install)

    def streaming(self, scale: float, num_prompts: int = 4, group_size: int = 16) -> list[Group]:
        self.engine.reset_prefix_cache()
        self.tool.scale = scale
        cfg = RolloutConfig(group_size, max_response_tokens=2500, max_tool_calls=TOOL_TURNS)
        return rollout(
            self.prompts[:num_prompts],
            self.engine,
            self.tools,
            self.codec,
            cfg=cfg,
            branching=BranchingConfig("none", num_initial_rollouts=group_size),
            seed=0,
        )

    def lock_step(self) -> None:
        self.engine.reset_prefix_cache()
        self.tool.scale = 1.0
        lock_step(self.prompts, self.engine, self.tools, self.codec)

    def round(self) -> dict[str, float]:
        """Measure a rollout whose tools answer at once, and one whose tools are slow."""
        cpu_started = time.process_time()
        engine_s = seconds(lambda: self.streaming(0.0))
        cpu_s = time.process_time() - cpu_started
        return {"cpu": cpu_s, "engine": engine_s, "slow_tools": seconds(lambda: self.streaming(1.0))}

    def close(self) -> None:
        self.tools.close()
        self.engine.close()


def compare(size: str, ref: str) -> None:
    """Measure the code here and at `ref` in turns."""
    arguments = ["--serve", *(["--quick"] if size == "quick" else [])]
    here, there = rounds_of_both("benchmarks/rollout_streaming.py", arguments, ref, SIZES[size][3])
    result: dict[str, float | str] = {"name": "rollout_streaming_against", "against": ref}
    for name in here[0]:
        ours, baseline = (statistics.median(r[name] for r in rounds) for rounds in (here, there))
        pairs = sorted(b[name] / a[name] for a, b in zip(here, there, strict=True))
        spread = f"{pairs[0]:.3f} to {pairs[-1]:.3f}"
        print(f"{name}: here {ours:.3f} s, {ref} {baseline:.3f} s; {ref} / here by round {spread}")
        result |= {f"{name}_ratio": statistics.median(pairs)}
        if name == "cpu":
            result |= {"ratio": result["cpu_ratio"], "ours": ours, "baseline": baseline, "unit": "CPU s"}
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter turns, one repeat: under a minute")
    parser.add_argument("--against", metavar="REF", help="compare with the code of a git ref")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = "quick" if args.quick else "full"
    if args.against:
        compare(size, args.against)
        return
    shortest, longest, repeats, _ = SIZES[size]
    bench = Bench()
    if args.serve:
        bench.prescribe(shortest, longest)
        bench.streaming(0.0)  # warm
        serve_rounds(bench.round)
        bench.close()
        return
    engine = bench.engine
    spec = SamplingSpec(
        32 if args.quick else 128, stop=("</search>",), seed=7, num_entropy_tokens=20, num_chunk_tokens=19
    )
    rates = tokens_per_second(engine, bench.prompts, spec=spec, repeats=repeats)
    bench.prescribe(shortest, longest)
    groups = bench.streaming(0.0)  # warm
    num_tokens = sum(t.num_sampled_tokens for group in groups for t in group.trajectories)
    num_first = groups[0].trajectories[0].num_sampled_tokens
    times: dict[str, list[float]] = {name: [] for name in ("token", "engine", "ours", "lockstep", "idle")}
    for _ in range(repeats):
        times["token"].append(seconds(lambda: bench.streaming(0.0, num_prompts=1, group_size=1)) / num_first)
        times["engine"].append(seconds(lambda: bench.streaming(0.0)))
        busy = engine.busy_s
        times["ours"].append(seconds(lambda: bench.streaming(1.0)))
        times["idle"].append(1 - (engine.busy_s - busy) / times["ours"][-1])
        times["lockstep"].append(seconds(bench.lock_step))
    bench.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours_s = medians["ours"]
    lock_step_s = medians["lockstep"]
    chain_s = longest_chain_s(groups, medians["token"])
    bound_s = max(chain_s, medians["engine"])
    print(
        f"{num_tokens} tokens in 64 trajectories; longest chain {chain_s:.2f} s, engine alone {medians['engine']:.2f} s"
    )
    print(f"lock-step {lock_step_s:.2f} s, ours {ours_s:.2f} s = {ours_s / bound_s:.2f} x bound")
    print(f"engine idle {medians['idle']:.0%} of ours")
    print("tokens/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    result = {
        "name": "rollout_streaming",
        "ratio": lock_step_s / ours_s,
        "ours": ours_s,
        "baseline": lock_step_s,
        "unit": "s",
        "bound": bound_s,
        "ours_over_bound": ours_s / bound_s,
        "idle_share": medians["idle"],
        "generate_ratio": rates["ours"] / rates["generate"],
        "bare_ratio": rates["ours"] / rates["bare"],
    }
    if "vllm_norms" in rates:
        result["norms_ratio"] = rates["ours"] / rates["vllm_norms"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
