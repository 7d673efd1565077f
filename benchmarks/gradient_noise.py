"""Cost of measuring the noise of the gradient during an update (update.measure_noise).

    python benchmarks/gradient_noise.py [--quick] [--model FOLDER]          (on the GPU if there is one)

A model does one update of 8 groups of 8 trajectories. Without --model it is a random one (on a CPU: 4 layers, width
256, 8192 tokens in the vocabulary; on a GPU: the shape of Qwen2.5-0.5B). Updates with and without a sketch of each
trajectory's gradient take turns, from the same weights. As in train_rl.py, the sketches also go into the estimate.
`ratio` = median without / median with. On a CPU both are CPU seconds, so that other processes do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from arpo.config.sections import ModelConfig, UpdateConfig
from arpo.log import Console
from arpo.model import Policy, load_policy
from arpo.model.sketch import GradientSketch
from arpo.options import AdvantageConfig, LossConfig
from arpo.ranks import Ranks, init_ranks
from arpo.sampling.gradient_noise import GradientNoise
from arpo.trajectory import Group, Prompt, StopReason, Trajectory
from arpo.update import fill_advantages, fill_old_logprobs, make_minibatches, step_sketches, update_policy

NUM_PROMPTS = 8
GROUP_SIZE = 8
SHAPES = {"cpu": (256, 4, 8192), "cuda": (896, 24, 151_936)}  # width, layers, vocabulary
TOKENS = {"quick": 16, "full": 64}
REPEATS = {"quick": 2, "full": 5}


def write_model(folder: str, device: str) -> None:
    """Write a random model."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width, layers, vocab = SHAPES[device]
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def random_groups(num_tokens: int, vocab: int) -> list[Group]:
    """Groups of trajectories of random tokens, half of them right."""
    rng = np.random.default_rng(0)
    groups = []
    for p in range(NUM_PROMPTS):
        trajectories = []
        for i in range(GROUP_SIZE):
            ids = rng.integers(0, vocab, num_tokens).tolist()
            t = Trajectory(
                str(p),
                str(i),
                token_ids=ids,
                loss_mask=[1] * num_tokens,
                rollout_logprobs=[-9.0] * num_tokens,
                stop_reason=StopReason.EOS,
            )
            t.reward = float(i % 2)
            trajectories.append(t)
        groups.append(Group(Prompt(str(p), [], [], token_ids=tuple(range(16))), trajectories))
    return groups


def seconds_of_update(policy: Policy, groups: list[Group], noise: GradientNoise | None, ranks: Ranks) -> float:
    """Return the seconds of one update, and with `noise` of the estimate too."""
    cfg = UpdateConfig(num_prompts_per_minibatch=NUM_PROMPTS, max_tokens_per_microbatch=4096, layout="packed")
    minibatches = make_minibatches(groups, cfg, AdvantageConfig(), ranks)
    fill_old_logprobs(policy, minibatches[0].micros, LossConfig(), 1.0)
    fill_advantages(groups, minibatches, AdvantageConfig(), loss_cfg=LossConfig(), ranks=ranks)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    is_cuda = ranks.device.type == "cuda"
    clock = time.perf_counter if is_cuda else time.process_time
    started = clock()
    update_policy(
        policy,
        optimizer,
        minibatches[0].micros,
        LossConfig(),
        temperature=1.0,
        max_grad_norm=1.0,
        ranks=ranks,
        is_first=True,
    )
    if noise:
        noise.of_step(1, groups, step_sketches(policy, minibatches, ranks))
    if is_cuda:
        torch.cuda.synchronize()
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short trajectories, few repeats")
    parser.add_argument("--model", default="", help="folder of a model; empty = a random one")
    args = parser.parse_args()
    size = "quick" if args.quick else "full"
    ranks = init_ranks()
    kind = ranks.device.type
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_model(folder, kind)
        dtype = "bfloat16" if kind == "cuda" else "float32"
        policy = load_policy(ModelConfig(args.model or folder, compute_dtype=dtype), ranks.mesh, device=ranks.device)
    model = policy.hf.config
    groups = random_groups(TOKENS[size], model.vocab_size)
    sketch = GradientSketch(model.hidden_size, ranks.device)
    noise = GradientNoise(AdvantageConfig(), NUM_PROMPTS, Console(is_main=False))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    # the first round is a warm-up
    for _ in range(REPEATS[size] + 1):
        for is_measured in seconds:
            policy.sketch = sketch if is_measured else None
            seconds[is_measured].append(seconds_of_update(policy, groups, noise if is_measured else None, ranks))
    without, measured = (statistics.median(values[1:]) for values in seconds.values())
    ranks.close()
    result = {"name": "gradient_noise", "ratio": without / measured, "ours": measured, "baseline": without, "unit": "s"}
    print(json.dumps(result | {"device": kind, "model": args.model or "random"}))


if __name__ == "__main__":
    main()
