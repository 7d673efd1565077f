"""The trainer's part of a step on the pretended GPU, and where the host waited in each stage of it.

    step = TrainerStep(folder)                       models of a tiny model folder; open `fake_cuda` first
    stages = step.run(stalls, advantage, loss)       {"update": Stage(...), ...}

The models are whole, not sharded: FSDP2 does not know the pretended device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from fake_gpu.fake_cuda import CUDA, Stalls, to_fake_cuda
from helpers.updates import make_groups
from torch import nn

from arpo.config.sections import OptimConfig, UpdateConfig
from arpo.metrics import Metrics
from arpo.model import Policy
from arpo.model.attention import register
from arpo.model.critic import Critic, TrainedCritic, fill_values
from arpo.model.optim import build_optimizer
from arpo.model.sketch import GradientSketch
from arpo.options import AdvantageConfig, LossConfig
from arpo.ranks import Ranks
from arpo.update import (
    Minibatch,
    fill_advantages,
    fill_old_logprobs,
    fill_ref_logprobs,
    first_update_computes_old_logprobs,
    make_minibatches,
    update_policy,
)


@dataclass(frozen=True)
class Stage:
    """Stalls of one stage, by line of arpo/."""

    waits: Counter[str]
    uploads: Counter[str]


def load_hf(folder: Path) -> nn.Module:
    """The model with float32 weights and checkpointed layers, on the CPU."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    hf.set_attn_implementation(register("sdpa"))
    hf.gradient_checkpointing_enable({"use_reentrant": False})
    return hf


def tiny_policy(folder: Path) -> Policy:
    return to_fake_cuda(Policy(load_hf(folder)).train())


class TrainerStep:
    """What train_rl.py does between rollout and weight sync."""

    def __init__(self, folder: Path):
        self.policy, self.reference = tiny_policy(folder), tiny_policy(folder).requires_grad_(False)
        self.policy.sketch = GradientSketch(self.policy.hf.config.hidden_size, CUDA)  # as train_rl.py has it
        self.critic = to_fake_cuda(Critic(load_hf(folder).base_model).train())
        self.ranks = Ranks(rank=0, world_size=1, device=CUDA, mesh=None)

    def run(
        self, stalls: Stalls, advantage: AdvantageConfig, loss: LossConfig, *, layout: str, max_tokens: int = 40
    ) -> tuple[dict[str, Stage], list[Minibatch], dict[str, float]]:
        """One step with two updates on one mini-batch: stalls by stage, the mini-batch, and the metrics."""
        stages: dict[str, Stage] = {}

        def ends(stage: str) -> None:
            stages[stage] = Stage(Counter(stalls.waits), Counter(stalls.uploads))
            stalls.clear()

        stalls.clear()
        metrics, groups = Metrics(), make_groups()
        update = UpdateConfig(num_prompts_per_minibatch=2, max_tokens_per_microbatch=max_tokens, layout=layout)
        minibatches = make_minibatches(groups, update, advantage, self.ranks)
        ends("collate")
        [micros] = [minibatch.micros for minibatch in minibatches]
        if not first_update_computes_old_logprobs(loss):
            metrics.merge(fill_old_logprobs(self.policy, micros, loss, 0.9))
            ends("old logprobs")
        if loss.kl_coefficient:
            fill_ref_logprobs(self.reference, micros, 0.9)
            ends("reference")
        if advantage.needs_critic:
            fill_values(self.critic, micros)
            ends("values")
        metrics.merge(fill_advantages(groups, minibatches, advantage, loss, self.ranks))
        ends("advantages")
        optimizer = build_optimizer(self.policy, OptimConfig(lr=1e-3))
        critic_optimizer = build_optimizer(self.critic, OptimConfig(lr=1e-3))
        trained_critic = TrainedCritic(self.critic, critic_optimizer, OptimConfig(lr=1e-3), num_updates=2)
        for number in range(2):
            if advantage.needs_critic:
                metrics.merge(trained_critic.update(micros, number, self.ranks))
                ends(f"critic {number}")
            metrics.merge(
                update_policy(
                    self.policy,
                    optimizer,
                    micros,
                    loss,
                    temperature=0.9,
                    max_grad_norm=1.0,
                    ranks=self.ranks,
                    is_first=number == 0,
                )
            )
            ends(f"update {number}")
        values = metrics.values()
        ends("metrics")
        return stages, minibatches, values
