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
from helpers.updates import Trainer, make_groups
from torch import nn

from arpo.config.sections import OptimConfig, UpdateConfig
from arpo.model import Policy
from arpo.model.attention import register
from arpo.model.critic import Critic, TrainedCritic
from arpo.model.optim import build_optimizer
from arpo.model.sketch import GradientSketch
from arpo.options import AdvantageConfig, LossConfig
from arpo.ranks import Ranks
from arpo.update import Minibatch


@dataclass(frozen=True)
class Stage:
    """Stalls of one stage, by line of arpo/."""

    waits: Counter[str]
    uploads: Counter[str]


def load_hf(folder: Path, attention: str = "sdpa") -> nn.Module:
    """The model with float32 weights and checkpointed layers, on the CPU."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    hf.set_attn_implementation(register(attention))
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

        optimizer, critic_optimizer = (build_optimizer(m, OptimConfig(lr=1e-3)) for m in (self.policy, self.critic))
        critic = TrainedCritic(self.critic, critic_optimizer, OptimConfig(lr=1e-3), num_updates=2)
        trainer = Trainer(self.policy, self.reference, critic, optimizer, self.ranks)
        update = UpdateConfig(num_prompts_per_minibatch=2, max_tokens_per_microbatch=max_tokens, layout=layout)
        stalls.clear()
        minibatches, metrics = trainer.train(make_groups(), update, advantage, loss, ends)
        values = metrics.values()
        ends("metrics")
        return stages, minibatches, values
