"""train_rl.py from end to end on this machine: two steps and a save, a kill, and the same command again.

    python benchmarks/gpu/run_rl.py [--quick] [--shape small|0.5b] [--ranks N] [train_rl.py's own flags]

A model with random weights learns to say e and a, with Python and a local search as tools. The run is killed (-9) in
the third step, and continues from the checkpoint of the second step to the fourth. The script fails if the run does not
continue, or if the two parts do not log each step once. Last line: JSON with the seconds until the first step (cold,
before any compilation, and warm); time/*, memory and the trainer's difference from vLLM (mismatch/kl) of the last step;
and the size of vLLM's KV cache against the estimate in the run's first lines.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from arpo.log import read_metrics
from benchmarks.shared.children import child_environment
from benchmarks.shared.shapes import SHAPES, config_of
from benchmarks.shared.tiny_model import TAGS, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
ON_GPU = torch.cuda.is_available()
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(c in "ea" for c in solution_str) / max(len(solution_str), 1)
"""
CONFIG = """
run: {num_steps: 4, validate_every: 2, save_every: 2, dump_every: 2}
data: {num_prompts_per_step: 16, max_prompt_tokens: 256, num_valid_prompts: 8}
engine: {max_num_seqs: 128, gpu_memory_utilization: 0.4, kv_cache_gib: 0.05}
rollout: {group_size: 8, max_tool_calls: 2, max_result_tokens: 64, max_response_tokens: 1024}
branching: {selector: arpo, num_initial_rollouts: 4, entropy_tokens: 4}
tools: {search: {backend: local, mode: live}}
update: {num_prompts_per_minibatch: 8, max_tokens_per_microbatch: 8192}
"""
QUICK = ("--rollout.max_response_tokens", "96", "--data.num_prompts_per_step", "4", "--rollout.group_size", "4")
QUICK += ("--update.num_prompts_per_minibatch", "2", "--rollout.answer_reserve_tokens", "8")
QUICK += ("--branching.num_initial_rollouts", "2", "--data.num_valid_prompts", "2")
LIMIT_S = 540.0
STARTED = re.compile(r"vLLM started in (\d+) s: KV cache of (\d+)k tokens, attention (\w+), CUDA graphs of (\d+)")
COMPUTED = re.compile(r"KV cache about [\d.]+ = (\d+)k tokens")


def write_world(folder: Path, shape_name: str) -> list[str]:
    """Write model, prompts, corpus, reward and config; return the arguments of train_rl.py."""
    from transformers import AutoModelForCausalLM

    shape = SHAPES[shape_name]
    model = folder / "model"
    tokenizer = write_tokenizer(model, shape.vocab)
    config = config_of(shape)
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    config.initializer_range = 0.2 if shape_name == "small" else 0.02
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if shape_name == "small":  # its logits are large enough to matter: it calls tools all the time
        with torch.no_grad():
            hf.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(TAGS)] *= 3
    hf.save_pretrained(model)
    rows = [{"prompt": f"say e {i}", "answer": "e", "data_source": "toy"} for i in range(64)]
    for name in ("train.jsonl", "valid.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "corpus.jsonl").write_text('{"title": "e", "text": "eeee"}\n{"title": "a", "text": "aaaa"}\n')
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.yaml").write_text(CONFIG)
    places = {"run.dir": "runs", "model.path": "model", "data.train": "train.jsonl", "data.valid": "valid.jsonl"}
    places |= {"tools.search.corpus": "corpus.jsonl", "reward.file": "reward.py"}
    flags = [part for name, place in places.items() for part in (f"--{name}", str(folder / place))]
    if not ON_GPU:
        flags += ["--engine.dtype", "float32", "--model.compute_dtype", "float32"]
    return [str(folder / "config.yaml"), "--run.name", "run", *flags]


def launch(folder: Path, num_ranks: int, argv: list[str], *, kill_after_step: int = 0) -> tuple[str, float]:
    """Run train_rl.py to the end, or kill the run after a logged step. Return output and seconds of the start."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    env = child_environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    log = folder / "log"
    metrics = folder / "runs" / "run" / "metrics.jsonl"
    started = time.monotonic()
    start_s = 0.0
    log.unlink(missing_ok=True)
    with log.open("ab") as output:  # at its end: vLLM opens it once more
        command = [*torchrun, "train_rl.py", *argv]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True)
    try:
        while process.poll() is None:
            assert time.monotonic() - started < LIMIT_S, f"no end within {LIMIT_S:.0f} s"
            start_s = start_s or ("layout, from step" in log.read_text(errors="replace")) * (time.monotonic() - started)
            if kill_after_step and metrics.exists() and f'"step": {kill_after_step},' in metrics.read_text():
                break
            time.sleep(0.1)
        else:
            assert process.returncode == 0 and not kill_after_step, f"code {process.returncode}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks end with torchrun
            process.wait()
        text = log.read_text(errors="replace")
        print(text, flush=True)
    return text, start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short responses, small groups")
    parser.add_argument("--shape", choices=("small", "0.5b"), default="small")
    parser.add_argument("--ranks", type=int, default=1, help="0 = all GPUs, two on a machine without")
    args, flags = parser.parse_known_args()
    num_ranks = args.ranks or torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [*write_world(folder, args.shape), *(QUICK if args.quick else ()), *flags]
        first, cold_s = launch(folder, num_ranks, argv, kill_after_step=3)
        second, warm_s = launch(folder, num_ranks, argv)
        rows = [row for row in read_metrics(folder / "runs" / "run") if row["step"]]
    assert "from step 2" in second and [row["step"] for row in rows] == [1, 2, 3, 4], [row["step"] for row in rows]
    result = {"name": "run_rl", "shape": args.shape, "ranks": num_ranks, "cold_start_s": cold_s, "warm_start_s": warm_s}
    last = rows[-1]
    wanted = ("time/", "memory/", "mismatch/kl", "tokens/", "reward/mean", "tools/all/calls")
    result |= {name: value for name, value in last.items() if name.startswith(wanted)}
    if found := STARTED.search(first):
        result |= {"vllm_start_s": int(found[1]), "kv_k_tokens": int(found[2]), "attention": found[3]}
        result["graph_sizes"] = int(found[4])
    if (computed := COMPUTED.search(first)) and found:
        result["kv_found_over_computed"] = int(found[2]) / int(computed[1])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
