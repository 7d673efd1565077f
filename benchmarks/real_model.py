"""A pretrained language model of 135M on a CPU: rollout against raw vLLM, update against a plain transformers loop.

    make demo-llm                                    # leaves data/llm and runs/llm_sft
    python benchmarks/real_model.py [--quick] [--dtype float32]

One rank, the settings of configs/llm_arpo.yaml without branching, so that no trajectory inherits tokens. Both sides
compute in the same dtype; the updated weights are float32.

Rollout: ours answers the questions with real Python calls. Raw vLLM's `LLM.generate` then samples as many tokens per
trajectory for the same prompts, at the same temperature, without logprobs, entropies, stop strings and tools, and with
vLLM's own norms (see arpo/engine/cpu_norms.py). It also reads the tool results of the trajectory, all at once, after
the prompt. `rollout_ratio` = our sampled tokens per second / raw vLLM's; `rollout_ratio_unread`: the same, but raw vLLM
reads no results.

Update: the trajectories just sampled, in the same mini-batches. The plain loop pads four rows to a micro-batch,
computes all logits (under autocast for bfloat16), and takes the same PPO loss and AdamW step. Neither side recomputes
activations. Rewards are made up (every other trajectory is right), as the speed does not depend on them. `ratio` = the
plain loop's seconds / ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn.functional import log_softmax

from arpo.config.exits import exit_with
from arpo.data import load_prompts, tokenize_prompts
from arpo.engine import Engine
from arpo.errors import UserError
from arpo.model import load_policy, load_tokenizer
from arpo.model.attention import resolve_layout
from arpo.model.optim import build_optimizer
from arpo.protocol import Codec, TagsCodec
from arpo.ranks import Ranks, init_ranks
from arpo.sampling.sampler import rollout
from arpo.start.load import load_config
from arpo.tools import make_tools
from arpo.tools.base import ToolRunner
from arpo.trajectory import Group, Prompt, Trajectory
from arpo.update import fill_advantages, fill_old_logprobs, make_minibatches, update_policy
from benchmarks.shared.vllms_norms import vllms_norms
from train_rl import RLConfig

ROWS_AT_ONCE = 4


def config(model: str, train: str, num_prompts: int, dtype: str) -> RLConfig:
    flags = {
        "model.path": model, "model.compute_dtype": dtype, "engine.dtype": dtype,
        "data.train": train, "data.valid": "", "branching.selector": "none",
        "data.num_prompts_per_step": num_prompts, "update.num_prompts_per_minibatch": num_prompts // 2,
    }  # fmt: skip
    return load_config(
        RLConfig, ["configs/llm_arpo.yaml", *(str(p) for kv in flags.items() for p in (f"--{kv[0]}", kv[1]))]
    )


def tokens_per_second(
    cfg: RLConfig, engine: Engine, codec: Codec, prompts: list[Prompt], repeats: int
) -> tuple[dict[str, float], list[Group]]:
    """Let both sides take turns. Return their median rates, and the last groups. The first round is a warm-up."""
    tools = ToolRunner(make_tools(cfg.tools))
    rates: dict[str, list[float]] = {"ours": [], "raw": [], "unread": []}
    for repeat in range(repeats + 1):
        engine.reset_prefix_cache()
        started = time.perf_counter()
        groups = rollout(prompts, engine, tools, codec, cfg=cfg.rollout, branching=cfg.branching, seed=repeat)
        elapsed = time.perf_counter() - started
        trajectories = [(group.prompt, t) for group in groups for t in group.trajectories]
        num_tokens = sum(t.num_sampled_tokens for _, t in trajectories)
        rates["ours"].append(num_tokens / elapsed)

        for name in ("raw", "unread"):
            raw_s = raw_seconds(cfg, engine, trajectories, reads_results=name == "raw")
            rates[name].append(num_tokens / raw_s)
    tools.close()
    return {name: statistics.median(values[1:]) for name, values in rates.items()}, groups


def raw_seconds(
    cfg: RLConfig, engine: Engine, trajectories: list[tuple[Prompt, Trajectory]], *, reads_results: bool
) -> float:
    """Return the seconds in which raw vLLM samples as many tokens for each trajectory."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    requests = []
    params = []
    for prompt, t in trajectories:
        results = [token for token, is_sampled in zip(t.token_ids, t.loss_mask, strict=True) if not is_sampled]
        requests.append({"prompt_token_ids": [*prompt.token_ids, *(results if reads_results else ())]})
        options = {"temperature": cfg.rollout.temperature, "ignore_eos": True, "detokenize": False}
        params.append(SamplingParams(max_tokens=t.num_sampled_tokens, **options))
    started = time.perf_counter()
    with vllms_norms():
        outputs = engine.llm.generate(requests, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    assert all(len(o.outputs[0].token_ids) == p.max_tokens for o, p in zip(outputs, params, strict=True))
    return elapsed


def our_update(cfg: RLConfig, ranks: Ranks, groups: list[Group], repeats: int) -> float:
    """Return the median seconds of a step's mini-batches: making rows, logprobs before the update, the updates."""
    policy = load_policy(cfg.model, ranks.mesh, device=ranks.device, seed=0)
    optimizer = build_optimizer(policy, cfg.optim)
    update_cfg = resolve_layout(cfg.update, cfg.rollout.group_size)

    def step() -> None:
        minibatches = make_minibatches(groups, update_cfg, cfg.advantage, ranks)
        for minibatch in minibatches[1:]:
            fill_old_logprobs(policy, minibatch.micros, cfg.loss, cfg.rollout.temperature)
        fill_advantages(groups, minibatches, cfg.advantage, loss_cfg=cfg.loss, ranks=ranks)
        for index, minibatch in enumerate(minibatches):
            update_policy(
                policy,
                optimizer,
                minibatch.micros,
                cfg.loss,
                temperature=cfg.rollout.temperature,
                max_grad_norm=cfg.optim.max_grad_norm,
                ranks=ranks,
                is_first=index == 0,
            )

    return median_seconds(step, repeats)


def plain_update(cfg: RLConfig, groups: list[Group], repeats: int) -> float:
    """Return the median seconds of the same step, written as a plain loop over padded rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    size = cfg.update.num_prompts_per_minibatch
    is_bfloat16 = cfg.model.compute_dtype == "bfloat16"

    def logprobs_of(rows: list) -> tuple[torch.Tensor, torch.Tensor]:
        length = max(len(prompt) + len(response) for prompt, response, _ in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        attention_mask = torch.zeros_like(ids)
        loss_mask = torch.zeros_like(ids)
        for i, (prompt, response, mask) in enumerate(rows):
            row_ids = [*prompt, *response]
            ids[i, : len(row_ids)] = torch.tensor(row_ids)
            attention_mask[i, : len(row_ids)] = 1
            loss_mask[i, len(prompt) : len(row_ids)] = torch.tensor(mask)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            # (B, T-1, V): position t scores token t+1
            logits = model(ids, attention_mask=attention_mask).logits[:, :-1]
        logprobs = log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
        return logprobs, loss_mask[:, 1:]

    def step() -> None:
        for start in range(0, len(groups), size):
            rows = [
                ((group.prompt.token_ids, t.token_ids, t.loss_mask), t.advantage)
                for group in groups[start : start + size]
                for t in group.trajectories
            ]
            parts = [rows[i : i + ROWS_AT_ONCE] for i in range(0, len(rows), ROWS_AT_ONCE)]
            old = [None] * len(parts)
            if start:  # the first mini-batch takes the logprobs of its own update
                with torch.no_grad():
                    old = [logprobs_of([row for row, _ in part])[0] for part in parts]
            count = sum(sum(row[2]) for row, _ in rows)
            for part, before in zip(parts, old, strict=True):
                logprobs, mask = logprobs_of([row for row, _ in part])
                old_logprobs = logprobs.detach() if before is None else before
                ratio = (logprobs - old_logprobs).exp()
                advantages = torch.tensor([advantage for _, advantage in part])[:, None]
                clipped = ratio.clamp(1 - cfg.loss.clip_low, 1 + cfg.loss.clip_high)
                loss = -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / count
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

    return median_seconds(step, repeats)


def median_seconds(step: Callable[[], None], repeats: int) -> float:
    """Return the median seconds of `repeats` steps, after one step as a warm-up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two questions, one repeat, and only where the model is")
    parser.add_argument("--model", default="runs/llm_sft/hf")
    parser.add_argument("--train", default="data/llm/rl_train.jsonl")
    usual = "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"  # as `make demo-llm` takes it
    parser.add_argument("--dtype", default=usual, choices=("float32", "bfloat16"))
    args = parser.parse_args()
    if not (Path(args.model).is_dir() and Path(args.train).exists()):
        print(f"skipped: no {args.model} or {args.train}; `make demo-llm` makes them")
        return
    num_prompts, repeats = (2, 1) if args.quick else (8, 3)
    cfg = config(args.model, args.train, num_prompts, args.dtype)
    ranks = init_ranks()
    codec = TagsCodec(load_tokenizer(cfg.model.path), tools=cfg.tools.names)
    prompts = load_prompts(args.train)[:num_prompts]
    prompts = tokenize_prompts(
        prompts, codec.render_prompt, max_prompt_tokens=cfg.data.max_prompt_tokens, overlong="drop", path=args.train
    )
    engine = Engine(cfg.model.path, cfg.engine, max_model_len=cfg.max_model_len, seed=0)
    rates, groups = tokens_per_second(cfg, engine, codec, prompts=prompts, repeats=repeats)
    engine.close()
    for group in groups:
        for i, trajectory in enumerate(group.trajectories):
            trajectory.reward = float(i % 2)
    update_s = our_update(cfg, ranks, groups, repeats)
    plain_s = plain_update(cfg, groups, repeats)
    num_row_tokens = sum(len(group.prompt.token_ids) + len(t.token_ids) for group in groups for t in group.trajectories)
    ranks.close()
    ratios = {name: rates["ours"] / rates[name] for name in ("raw", "unread")}
    print(
        f"rollout: ours {rates['ours']:.0f} tokens/s, raw vLLM {rates['raw']:.0f}: {ratios['raw']:.2f}; "
        f"raw vLLM without results {rates['unread']:.0f}: {ratios['unread']:.2f}"
    )
    ratio = plain_s / update_s
    print(f"update of {num_row_tokens} tokens: ours {update_s:.1f} s, plain loop {plain_s:.1f} s: {ratio:.2f}")
    result = {
        "name": "real_model",
        "ratio": ratio,
        "unit": f"update tokens/s, {args.dtype}",
        "ours": num_row_tokens / update_s,
        "baseline": num_row_tokens / plain_s,
        "rollout_ratio": ratios["raw"],
        "rollout_ratio_unread": ratios["unread"],
        "rollout_tokens_per_s": rates["ours"],
        "raw_vllm_tokens_per_s": rates["raw"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        exit_with(error)
