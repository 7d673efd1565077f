"""Scored groups, the losses and advantages that differ in what they compute of them, and their mini-batch."""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from arpo.config.sections import UpdateConfig
from arpo.losses import AGGREGATIONS, TOKEN_LOSSES
from arpo.metrics import Metrics
from arpo.model import Policy
from arpo.model.critic import TrainedCritic, fill_values
from arpo.options import AdvantageConfig, LossConfig
from arpo.ranks import Ranks
from arpo.trajectory import Group, Prompt, StopReason, Trajectory, Turn
from arpo.update import (
    Minibatch,
    fill_advantages,
    fill_old_logprobs,
    fill_ref_logprobs,
    first_update_computes_old_logprobs,
    make_minibatches,
    update_policy,
)

GRPO, GAE, HARD = AdvantageConfig(), AdvantageConfig(kind="gae", gamma=0.9, lam=0.8), AdvantageConfig(tree="hard")
CASES = {
    **{f"{kind}, {a}": (GRPO, LossConfig(kind=kind, aggregation=a)) for kind in TOKEN_LOSSES for a in AGGREGATIONS},
    "aepo": (GRPO, LossConfig(entropy_balanced_clipping=True, entropy_balanced_advantage=True)),
    "everything in the loss": (
        HARD,
        LossConfig(kl_coefficient=0.1, entropy_coefficient=0.01, rollout_correction="mis"),
    ),
    "kl in the reward": (GRPO, LossConfig(kl_coefficient=0.1, kl_in="reward", kl_estimator="k1")),
    "at2po": (
        AdvantageConfig(tree="node"),
        LossConfig(kind="gspo", ratio_over="turn", aggregation="sequence_mean_token_mean"),
    ),
    "parents, sequence mis": (
        AdvantageConfig(tree="node_parent"),
        LossConfig(rollout_correction="sequence_mis", correction_low=1e-4, correction_high=30.0),
    ),
    "inter intra, geometric mis": (
        AdvantageConfig(tree="inter_intra"),
        LossConfig(rollout_correction="geometric_mis", correction_low=0.2, correction_high=3.0),
    ),
    "reinforce++": (AdvantageConfig(normalize="batch"), LossConfig(rollout_correction="geometric_tis")),
    "gae": (GAE, LossConfig(kl_coefficient=0.1, kl_in="reward", kl_estimator="abs", rollout_correction="tis")),
}


def make_groups() -> list[Group]:
    """Two prompts; a branch and its parent share tokens; one tool result; one trajectory that broke."""
    rng = np.random.default_rng(0)
    groups = []
    for g, lengths in enumerate(([9, 20, 14], [4, 30, 7])):
        trajectories = []
        for i, length in enumerate(lengths):
            ids, mask = rng.integers(0, 380, length).tolist(), [1] * 3 + [int(m) for m in rng.random(length - 3) < 0.7]
            logprobs = [float(lp) * m for lp, m in zip(-6 + 0.3 * rng.normal(size=length), mask, strict=True)]
            t = Trajectory("p", str(i), ids, mask, logprobs, stop_reason=StopReason.EOS, reward=float(rng.normal()))
            trajectories.append(t)
        parent, branch = trajectories[1:]
        branch.parent_id, branch.fork_at = "1", 5
        for t in trajectories:
            t.turns = [Turn(0), *([Turn(5)] if len(t.token_ids) > 5 else [])]
        for field in ("token_ids", "loss_mask", "rollout_logprobs"):
            setattr(branch, field, getattr(parent, field)[:5] + getattr(branch, field)[5:])
        trajectories.append(dataclasses.replace(trajectories[0], trajectory_id="3", stop_reason=StopReason.ERROR))
        groups.append(Group(Prompt(f"p{g}", [], [], token_ids=tuple(range(g + 2))), trajectories))
    return groups


def filled(ranks, policy, reference, case: str, max_tokens: int, order: int, layout: str = "packed"):
    """The mini-batch of a case with logprobs, values and advantages, and the metrics so far."""
    advantage, loss = CASES[case]
    groups = [Group(g.prompt, g.trajectories[::order]) for g in make_groups()[::order]]
    update = UpdateConfig(num_prompts_per_minibatch=2, max_tokens_per_microbatch=max_tokens, layout=layout)
    [minibatch] = make_minibatches(groups, update, advantage, ranks)
    metrics = fill_old_logprobs(policy, minibatch.micros, loss, 0.9)
    if loss.kl_coefficient:
        fill_ref_logprobs(reference, minibatch.micros, 0.9)
    for micro in minibatch.micros:  # as if of a critic
        micro.old_values = 0.1 * micro.old_logprobs
    metrics.merge(fill_advantages(groups, [minibatch], advantage, loss, ranks))
    return minibatch, metrics


def take_step(policy, optimizer, minibatch, loss, ranks, *, is_first=False):
    """Take one optimizer step on a mini-batch, without clipping, at temperature 0.9. Return its metrics."""
    return update_policy(
        policy,
        optimizer,
        minibatch.micros,
        loss,
        temperature=0.9,
        max_grad_norm=1e9,
        ranks=ranks,
        is_first=is_first,
    )


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The models and options of what train_rl.py does with scored groups."""

    policy: Policy
    reference: Policy
    critic: TrainedCritic | None
    optimizer: torch.optim.Optimizer
    ranks: Ranks

    def train(
        self,
        groups: list[Group],
        update: UpdateConfig,
        advantage: AdvantageConfig,
        loss: LossConfig,
        ends: Callable[[str], None] = lambda stage: None,
    ) -> tuple[list[Minibatch], Metrics]:
        """Two updates on each mini-batch, in the order of the script. `ends` is told each stage when it is done."""
        metrics = Metrics()
        minibatches = make_minibatches(groups, update, advantage, self.ranks)
        ends("collate")
        for minibatch in minibatches[1:] if first_update_computes_old_logprobs(loss) else minibatches:
            metrics.merge(fill_old_logprobs(self.policy, minibatch.micros, loss, 0.9))
        ends("old logprobs")
        for minibatch in minibatches if loss.kl_coefficient else ():
            fill_ref_logprobs(self.reference, minibatch.micros, 0.9)
        ends("reference")
        for minibatch in minibatches if advantage.needs_critic else ():
            fill_values(self.critic.model, minibatch.micros)
        ends("values")
        metrics.merge(fill_advantages(groups, minibatches, advantage, loss, self.ranks))
        ends("advantages")
        for number, minibatch in enumerate(minibatches * 2):
            if advantage.needs_critic:
                metrics.merge(self.critic.update(minibatch.micros, number, self.ranks))
                ends(f"critic {number}")
            is_first = number == 0
            options = {"temperature": 0.9, "max_grad_norm": 1.0, "ranks": self.ranks, "is_first": is_first}
            metrics.merge(update_policy(self.policy, self.optimizer, minibatch.micros, loss, **options))
            ends(f"update {number}")
        return minibatches, metrics
