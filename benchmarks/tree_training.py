"""Time of forward and backward on ARPO-shaped groups: trees against flat packing and against padded batches.

    python benchmarks/tree_training.py [--quick]          (on the GPU if there is one)

A group has 16 trajectories of 2 to 4 tool turns. Half of them are branches of another trajectory, after a tool result.
All three layouts compute the same gradients (their difference is shown), with the same model, chunked head and token
budget per micro-batch. Times are medians of alternating repeats: CPU seconds of one thread (so that other processes do
not count), or seconds on a GPU.

`work_ratio` is the saving of multiplications, which no layout can exceed in time: the head computes loss tokens alone,
and few of these are shared. `unsplit_work_ratio` is that of trees without a token budget. A schedule that computes
each prefix once for all micro-batches (depth first) could reach it.

A second measurement has a new context for each turn, without the first half (the thoughts) of every earlier turn
(rollout.context=strip_thoughts). There flat packing has a sample per context.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.utils import is_flash_attn_2_available

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from arpo.batch import MicroBatch, Row, collate, microbatches, row_of
from arpo.config.sections import ModelConfig
from arpo.model import Policy
from arpo.model.head import token_logprobs
from arpo.model.policy import attention_implementation
from arpo.options import AdvantageConfig
from arpo.selection import training_trajectories
from arpo.trajectory import Context, Group, Prompt, StopReason, Trajectory
from arpo.tree import tree_microbatches
from benchmarks.shared.children import print_so_far

VOCAB = {"quick": 4096, "full": 32_768}
MODELS = {  # hidden, intermediate, layers
    "cpu": {"quick": (128, 512, 4), "full": (256, 1024, 4)},
    "cuda": {"quick": (1024, 3072, 8), "full": (1536, 8960, 28)},  # full: the layers of Qwen2.5-1.5B
}
TOKENS = {  # prompt, sampled per turn, tool result, budget of a micro-batch
    "cpu": {"quick": (60, 10, 25, 1024), "full": (400, 66, 170, 4096)},  # full: a third of the GPU's
    "cuda": {"quick": (150, 25, 64, 2048), "full": (1200, 200, 512, 16_384)},
}


def arpo_group(
    rng: np.random.Generator, num_prompt: int, num_sampled: int, num_result: int, vocab: int, *, contexts: bool = False
) -> Group:
    """Make a group. A turn has sampled tokens and a result, the last turn no result. Lengths vary by +-50 %."""

    def turn(with_result: bool) -> tuple[list[int], list[int]]:
        sampled = int(num_sampled * rng.uniform(0.5, 1.5))
        result = int(num_result * rng.uniform(0.5, 1.5)) * with_result
        return rng.integers(0, vocab, sampled + result).tolist(), [1] * sampled + [0] * result

    by_turns: list[list[tuple[list[int], list[int]]]] = []
    for i in range(16):
        num_calls = int(rng.integers(2, 5))
        prefix = [] if i < 8 else by_turns[rng.integers(len(by_turns))][: rng.integers(1, num_calls + 1)]
        prefix = [t for t in prefix if not all(t[1])]  # a branch does not begin after an answer
        by_turns.append([*prefix, *(turn(True) for _ in range(num_calls - len(prefix))), turn(False)])
    trajectories = []
    for i, turns in enumerate(by_turns):
        ids, mask = ([x for t in turns for x in t[part]] for part in (0, 1))
        t = Trajectory(
            "p",
            str(i),
            token_ids=ids,
            loss_mask=mask,
            rollout_logprobs=[0.0] * len(ids),
            stop_reason=StopReason.EOS,
            reward=float(i % 2),
        )
        trajectories.append(t)
    prompt_ids = rng.integers(0, vocab, num_prompt).tolist()
    for t, turns in zip(trajectories, by_turns if contexts else (), strict=contexts):
        start = 0
        context = prompt_ids
        for ids, mask in turns[:-1]:
            start += len(ids)
            context = [*context, *ids[sum(mask) // 2 :]]
            t.contexts.append(Context(start, context))
    return Group(Prompt("p", [], [], token_ids=tuple(prompt_ids)), trajectories)


def some_loss(logprobs: torch.Tensor, entropies: torch.Tensor, row_ids: list[int]) -> torch.Tensor:
    """Return a loss with a different weight for each trajectory, like an advantage."""
    weights = torch.tensor([(-1.0) ** i * (1 + i / 16) for i in row_ids], device=logprobs.device)[:, None]
    return (weights * logprobs).sum() + 0.01 * entropies.sum()


def run_micros(policy: Policy, micros: list[MicroBatch]) -> None:
    for micro in micros:
        some_loss(*policy(micro), list(micro.row_ids)).backward()


def padded_batches(rows: list[Row], max_tokens: int) -> list[list[int]]:
    """Split the rows in order into batches that fit into `max_tokens` when padded to their longest row."""
    batches: list[list[int]] = [[]]
    for i, row in enumerate(rows):
        longest = max(rows[j].num_tokens for j in [*batches[-1], i])
        if batches[-1] and longest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            longest = row.num_tokens
        batches[-1].append(i)
    return batches


def run_padded(policy: Policy, rows: list[Row], batches: list[list[int]], device: torch.device) -> None:
    """Compute right-padded (B, L) batches with an attention mask of ones and zeros."""
    for ids in batches:
        micro = collate([rows[i] for i in ids], ids).to(device)
        lengths = torch.tensor([rows[i].num_tokens for i in ids], device=device)
        longest = int(lengths.max())
        inside = torch.arange(longest, device=device) < lengths[:, None]  # (B, L)
        input_ids = torch.zeros(inside.shape, dtype=torch.long, device=device).masked_scatter(inside, micro.input_ids)
        hidden = policy.hf.base_model(input_ids=input_ids, attention_mask=inside.long(), use_cache=False)
        sources, targets = micro.head_inputs()
        flat = hidden.last_hidden_state[inside]  # (N, D), as packed
        logprobs, entropies = token_logprobs(flat[sources], policy.hf.lm_head.weight, targets)
        some_loss(micro.to_rows(logprobs), micro.to_rows(entropies), ids).backward()


def build_policy(size: str, device: torch.device) -> Policy:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, intermediate, layers = MODELS[device.type][size]
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": max(1, hidden // 256)}
    config = Qwen2Config(
        vocab_size=VOCAB[size], hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, **heads
    )
    torch.manual_seed(0)
    hf: nn.Module = Qwen2ForCausalLM(config).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    hf.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(hf).train()


def measure(policy: Policy, runs: dict[str, tuple[str, Callable[[], None]]], device: torch.device, repeats: int):
    """Return name -> (median seconds, gradient of the first layer's query weight). runs: name -> (attention,
    action)."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    gradients: dict[str, torch.Tensor] = {}
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    for _ in range(repeats + 1):
        for name, (attention, action) in runs.items():
            policy.hf.set_attn_implementation(attention)
            policy.zero_grad()
            start = clock()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(clock() - start)
            gradients[name] = policy.hf.base_model.layers[0].self_attn.q_proj.weight.grad.clone()
    return {name: (statistics.median(times[name][1:]), gradients[name]) for name in runs}


def work(policy: Policy, micros: list[MicroBatch]) -> float:
    """Return the FLOPs of a forward and backward pass. Activations are recomputed, so all is computed forward twice."""
    policy.zero_grad()
    with FlopCounterMode(display=False) as counter:
        run_micros(policy, micros)
    cfg = policy.hf.config
    pairs = 0.0
    for micro in micros:
        for queries, keys in zip(micro.paths.num_queries, micro.paths.num_keys, strict=True):
            pairs += queries * (keys - (queries - 1) / 2)  # causal
    # the counter leaves out SDPA on a CPU: two products forward, again recomputed, and four backward
    attention = pairs * 2 * cfg.hidden_size * cfg.num_hidden_layers * (2 + 2 + 4)
    counted = counter.get_flop_counts()["Global"]
    return attention + sum(flops for op, flops in counted.items() if "attention" not in str(op))


def compare(policy: Policy, size: str, device: torch.device, repeats: int, *, contexts: bool) -> dict[str, float]:
    """Return the seconds of each layout, and the savings of the trees. Padded batches do not support contexts."""
    *lengths, budget = TOKENS[device.type][size]
    group = arpo_group(np.random.default_rng(0), *lengths, VOCAB[size], contexts=contexts)
    rows = [row_of(group, t) for _, t in training_trajectories([group], AdvantageConfig())]
    budget = max(budget, *(row.num_tokens for row in rows))  # a row of several contexts stays whole
    packed = microbatches(rows, 0, 1, budget, device=device)
    trees = tree_microbatches(rows, 0, 1, budget, device=device)
    best = attention_implementation(ModelConfig(), device)
    runs = {
        "tree": (best, lambda: run_micros(policy, trees)),
        "packed": (best, lambda: run_micros(policy, packed)),
    }
    num_tokens = {name: sum(m.input_ids.numel() for m in ms) for name, ms in (("tree", trees), ("packed", packed))}
    if not contexts:
        padded = padded_batches(rows, budget)
        transformers_own = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
        runs["padded"] = transformers_own, lambda: run_padded(policy, rows, padded, device)
        num_tokens["padded"] = sum(len(ids) * max(rows[i].num_tokens for i in ids) for ids in padded)
    results = measure(policy, runs, device, repeats)
    for name, (seconds, _) in results.items():
        print(f"{name:6} {num_tokens[name]:6} tokens {seconds:8.2f} s")
    ours, expected = (results[name][1] for name in ("tree", "packed"))
    values = {name: seconds for name, (seconds, _) in results.items()}
    values["difference"] = float((ours - expected).norm() / expected.norm())
    values["ratio"] = values["packed"] / values["tree"]
    values["token_ratio"] = num_tokens["packed"] / num_tokens["tree"]
    unsplit = tree_microbatches(rows, 0, 1, sum(row.num_tokens for row in rows), device=device)
    flops = work(policy, packed)
    values["work_ratio"] = flops / work(policy, trees)
    values["unsplit_work_ratio"] = flops / work(policy, unsplit)
    print(
        f"packed / tree: tokens {values['token_ratio']:.2f}, work {values['work_ratio']:.2f} "
        f"(unsplit {values['unsplit_work_ratio']:.2f}), time {values['ratio']:.2f}; "
        f"gradients differ by {values['difference']:.1e}"
    )
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter trajectories, a smaller model: under a minute")
    size = "quick" if parser.parse_args().quick else "full"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    policy = build_policy(size, device)
    plain = compare(policy, size, device, repeats=1 if size == "quick" else 3, contexts=False)
    result = {
        "name": "tree_training",
        "ratio": plain["ratio"],
        "ours": plain["tree"],
        "baseline": plain["packed"],
        "unit": "s" if device.type == "cuda" else "CPU s",
        **{name: plain[name] for name in ("token_ratio", "work_ratio", "unsplit_work_ratio")},
        "padded": plain["padded"],
        "device": device.type,
        "gradient_difference": plain["difference"],
    }
    print_so_far(result)
    print("a context for each turn:")
    several = compare(policy, size, device, repeats=1, contexts=True)
    result |= {"contexts_ratio": several["ratio"], "contexts_token_ratio": several["token_ratio"]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
