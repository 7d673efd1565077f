"""A whole GRPO step on a CPU: TRL's GRPOTrainer against train_rl.py, on the same tiny model.

    python benchmarks/rl_step_vs_trl.py [--quick] [--environment build/trl]

Same prompts, group size, limit of completion tokens, sampling temperature and number of optimizer steps (one per
rollout); one process and one thread on each side, no tools, no KL, no gradient checkpointing, float32. A step lasts
from one optimizer step to the next: generation, reward, forward, backward. TRL generates with transformers (its vLLM
mode needs a GPU build or a server), ours with vLLM. Compared are seconds per 1000 generated tokens, counted on both
sides.

Two models. The first ends a completion at random, on average after half of the limit: real completions differ in length
too (`ratio`). The second hardly ever ends, so all completions have the length of the limit (`ratio_equal_lengths`).

TRL needs a separate virtual environment (a gigabyte). A run without --quick makes a missing environment.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TRL = "trl==1.16.0"
SIZES = {  # hidden, prompts per step, group size, completion tokens, steps measured after one for warm-up
    "quick": (128, 4, 8, 64, 2),
    "full": (256, 8, 8, 256, 3),
}
NUM_PROMPT_LETTERS = 64
MODELS = ("ends", "equal_lengths")


def make_environment(folder: Path) -> None:
    """Install TRL. Packages of our own environment get the same version."""
    print(f"making {folder} with {TRL}", flush=True)
    locked = ROOT / "requirements" / "cpu.txt"
    torch = next(line for line in locked.read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    if subprocess.run([*pip, "--no-deps", torch], capture_output=True).returncode:
        subprocess.run([*pip, "--no-deps", torch, "--index-url", "https://download.pytorch.org/whl/cpu"], check=True)
    subprocess.run([*pip, TRL, "--constraint", locked], check=True)


def write_world(folder: Path, hidden: int, mean_tokens: int) -> None:
    from benchmarks.shared.tiny_model import LETTERS, write_model

    for model in MODELS:
        write_model(str(folder / model), hidden=hidden)
    let_completions_end(folder / "ends", mean_tokens)
    rng = random.Random(0)
    texts = ["".join(rng.choices(LETTERS, k=NUM_PROMPT_LETTERS)) for _ in range(64)]
    rows = [{"prompt": text, "answer": "e", "data_source": "toy", "tools": []} for text in texts]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "corpus.jsonl").write_text('{"title": "e", "text": "e"}\n')
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(set(solution_str))\n"
    )


def let_completions_end(folder: Path, mean_tokens: int) -> None:
    """Give the end token of this random model the probability 1 / mean_tokens at each position."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.shared.tiny_model import VOCAB_SIZE

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        # large, so that dimension 0 of all final states is about the same
        model.model.embed_tokens.weight[:, 0] = 0.3
        states = model.model(torch.randint(VOCAB_SIZE, (8, 128))).last_hidden_state
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[model.config.eos_token_id, 0] = math.log(VOCAB_SIZE / mean_tokens) / states[..., 0].mean()
    model.save_pretrained(folder)


def our_steps(folder: Path, model: str, size: str, round_: int) -> list[tuple[float, int]]:
    """Return (seconds, generated tokens) of each step of train_rl.py."""
    _, num_prompts, group_size, num_tokens, num_steps = SIZES[size]
    flags = {
        "run.dir": folder / "runs", "run.name": f"{model}{round_}", "run.num_steps": num_steps + 1,
        "run.save_hf_every": 0, "run.save_every": 0, "run.dump_every": 0, "model.path": folder / model,
        "model.compute_dtype": "float32", "model.recompute_every_n_layers": 0,
        "data.train": folder / "prompts.jsonl", "data.system_prompt": "none",
        "data.num_prompts_per_step": num_prompts, "data.max_prompt_tokens": 128, "engine.dtype": "float32",
        "engine.max_num_seqs": 64, "rollout.group_size": group_size, "rollout.max_response_tokens": num_tokens,
        "rollout.answer_reserve_tokens": 8, "branching.selector": "none", "branching.num_initial_rollouts": group_size,
        "tools.names": "search", "tools.search.backend": "local", "tools.search.corpus": folder / "corpus.jsonl",
        "tools.search.mode": "live", "reward.file": folder / "reward.py",
        "update.num_prompts_per_minibatch": num_prompts, "update.max_tokens_per_microbatch": 4096,
    }  # fmt: skip
    argv = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    run([sys.executable, ROOT / "train_rl.py", *argv])
    lines = (folder / "runs" / f"{model}{round_}" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step" in row]
    phases = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0] if name.startswith("time/")}
    shown = ", ".join(f"{name.removeprefix('time/')} {s:.2f} s" for name, s in phases.items())
    print(f"ours, {model}: {shown}", flush=True)
    return [(row["time/step"], int(row["tokens/sampled"])) for row in rows]


def trl_steps(folder: Path, model: str, size: str, python: Path) -> list[tuple[float, int]]:
    """Measure TRL's steps, by this file's --trl in TRL's environment."""
    out = run([python, __file__, "--trl", folder / model, *(["--quick"] if size == "quick" else [])])
    return [tuple(step) for step in json.loads(out.splitlines()[-1])]


def run(command: list) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[1]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def run_trl(model: Path, size: str) -> None:
    """Runs in TRL's environment, which has nothing of ours. The last line on stdout is [[seconds, tokens], ...]."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    _, num_prompts, group_size, num_tokens, num_steps = SIZES[size]
    rows = [json.loads(line) for line in (model.parent / "prompts.jsonl").read_text().splitlines()]
    seconds: list[float] = []
    tokens: list[int] = []

    def reward(completions, completion_ids, **_) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [float(len(set(message[0]["content"]))) for message in completions]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.started = time.perf_counter()

        def on_step_end(self, *_, **__):
            seconds.append(time.perf_counter() - self.started)

    cfg = GRPOConfig(
        output_dir=str(model.parent / "trl"), per_device_train_batch_size=num_prompts * group_size,
        num_generations=group_size, max_completion_length=num_tokens, max_steps=num_steps + 1, temperature=1.0,
        learning_rate=1e-6, beta=0.0, gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none",
        save_strategy="no", logging_steps=1000, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=cfg,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]),
        callbacks=[Clock()],
    )
    trainer.train()
    assert len(seconds) == len(tokens) == num_steps + 1, (len(seconds), len(tokens))
    print(json.dumps(list(zip(seconds, tokens, strict=True))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller, and only where the environment exists already")
    parser.add_argument(
        "--environment", type=Path, default=Path(os.environ.get("ARPO_TRL_ENV", ROOT / "build" / "trl"))
    )
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = "quick" if args.quick else "full"
    if args.trl:
        run_trl(args.trl, size)
        return
    python = args.environment / "bin" / "python"
    if not python.exists():
        if args.quick:
            print(f"skipped: {args.environment} has no environment with TRL; a run without --quick makes it")
            return
        make_environment(args.environment)
    steps = {(model, side): [] for model in MODELS for side in ("ours", "trl")}
    with tempfile.TemporaryDirectory() as folder:
        write_world(Path(folder), SIZES[size][0], mean_tokens=SIZES[size][3] // 2)
        for model in MODELS:
            for round_ in range(1 if args.quick else 2):  # alternating
                steps[model, "trl"] += trl_steps(Path(folder), model, size, python)[1:]
                steps[model, "ours"] += our_steps(Path(folder), model, size, round_)[1:]
    cost = {key: statistics.median(1000 * s / n for s, n in values) for key, values in steps.items()}
    for (model, side), values in steps.items():
        seconds, tokens = (statistics.median(v) for v in zip(*values, strict=True))
        per_token = f"{cost[model, side]:.3f} s per 1000 tokens"
        print(f"{model:13} {side:4} {seconds:6.2f} s and {tokens:6.0f} tokens per step: {per_token}")
    ratio, ratio_equal_lengths = (cost[model, "trl"] / cost[model, "ours"] for model in MODELS)
    result = {"name": "rl_step_vs_trl", "ratio": ratio, "ours": cost["ends", "ours"], "baseline": cost["ends", "trl"]}
    result |= {"unit": "s per 1000 generated tokens", "ratio_equal_lengths": ratio_equal_lengths}
    steps_s = {f"{model}_{side}_steps_s": [round(s, 3) for s, _ in values] for (model, side), values in steps.items()}
    print(json.dumps(result | {"generation": "transformers"} | steps_s))


if __name__ == "__main__":
    main()
