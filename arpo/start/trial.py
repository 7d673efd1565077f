"""Calls each of the user's functions once, on a small made-up group, before a model is loaded.

So an error of a user's function is a line after seconds, and not a traceback after minutes.

    "0"    call, result | answer        reward 1
    "0.0"               | another       reward 0, a branch of "0" at turn 1
    "1"    call, error  | no answer     reward 0

Rewards are tried on a real prompt (rewards/custom.py), and an order of prompts when it is made (data/order.py).
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import replace

import torch

from arpo.advantages import assign_advantages, token_advantages
from arpo.branching import Evidence, decide
from arpo.config.named import is_own
from arpo.errors import UserError
from arpo.kl import token_kl
from arpo.losses import LossInputs, policy_loss
from arpo.options import AdvantageConfig, BranchingConfig, LossConfig, RolloutConfig, is_retrospective
from arpo.protocol import Codec
from arpo.protocol.contexts import ContextEvidence, next_context
from arpo.retrospective import chosen_forks
from arpo.rollout_correction import rollout_weights
from arpo.trajectory import Group, Prompt, StopReason, ToolCall, Trajectory, Turn

NUM_TOKENS = 4
"""Tokens of a turn, and of a result."""
QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]


def made_up_group(prompt: Prompt | None = None) -> Group:
    """Return the group of the docstring above, with its rewards."""
    prompt = prompt or Prompt("made up, before the run", QUESTION, ["42"], token_ids=(1, 2, 3))
    found = ToolCall("search", "6 * 7", "42", ok=True)
    failed = ToolCall("search", "6 * 7", "Error: no answer within 30 s.", ok=False, error_kind="timeout")
    root, other = (_chain(prompt, name, call) for name, call in (("0", found), ("1", failed)))
    branch = root.branch("0.0", turn=1)
    _add_turn(branch, [9] * NUM_TOKENS)
    for t, reward in ((root, 1.0), (branch, 0.0), (other, 0.0)):
        t.reward = reward
        # a custom reward has other parts, whose names are not known yet: they are 0.0
        t.reward_parts = defaultdict(float, accuracy=reward)
        t.stop_reason = StopReason.EOS
        t.check()
    return Group(prompt, [root, branch, other])


def _chain(prompt: Prompt, name: str, call: ToolCall) -> Trajectory:
    """Return a trajectory that calls a tool, reads the result, and ends."""
    t = Trajectory(prompt.prompt_id, name)
    turn = _add_turn(t, [5] * NUM_TOKENS)
    turn.tool_calls = [call]
    t.token_ids += [6] * NUM_TOKENS
    t.loss_mask += [0] * NUM_TOKENS
    t.rollout_logprobs += [0.0] * NUM_TOKENS
    turn.result_end = len(t.token_ids)
    _add_turn(t, [7] * NUM_TOKENS)
    return t


def _add_turn(t: Trajectory, token_ids: list[int]) -> Turn:
    """Append a turn with these sampled tokens. The first token has the highest entropy."""
    start = len(t.token_ids)
    t.token_ids += token_ids
    t.loss_mask += [1] * len(token_ids)
    t.rollout_logprobs += [-1.0, *[-0.1] * (len(token_ids) - 1)]
    entropies = [1.5, *[0.25] * (len(token_ids) - 1)]
    end = len(t.token_ids)
    t.turns.append(Turn(start, end, end, sum(entropies) / len(entropies), token_entropies=entropies))
    return t.turns[-1]


def try_functions(branching: BranchingConfig, advantage: AdvantageConfig, loss: LossConfig) -> None:
    """Call the user's functions of these sections. Raises UserError if a function raises, or returns a wrong value."""
    if is_own(branching.selector):
        try_selector(branching)
    if is_own(advantage.kind) or is_own(advantage.tree):
        try_advantage(advantage)
    if is_own(loss.rollout_correction):
        ones = torch.ones(2, NUM_TOKENS)
        weights, _ = rollout_weights(-0.9 * ones, -ones, ones.bool(), loss)
        _must_be_finite(weights, f"loss.rollout_correction={loss.rollout_correction}: the weights")
    if any(map(is_own, (loss.kind, loss.aggregation, loss.kl_estimator))):
        try_loss(loss)


def try_selector(cfg: BranchingConfig) -> None:
    """Let a rule judge each result, or let a retrospective selector choose a fork of the two roots."""
    group = made_up_group()
    rng = random.Random(0)
    if is_retrospective(cfg.selector):
        roots = [replace(t, reward=None, reward_parts={}) for t in group.trajectories if t.parent_id is None]
        chosen_forks(Group(group.prompt, roots), 1, cfg, rng)
        return
    for t in group.trajectories:
        decide(evidence_of(t, turn=1), cfg, rng)


def evidence_of(t: Trajectory, turn: int, consecutive: int = 0) -> Evidence:
    """Return the evidence for a rule to judge the result before a turn of a finished trajectory."""
    root = t.turns[0]
    judged = t.turns[turn]
    return Evidence(
        entropies=tuple(judged.token_entropies),
        root_entropies=tuple(root.token_entropies),
        entropy=math.nan if judged.entropy is None else judged.entropy,
        root_entropy=math.nan if root.entropy is None else root.entropy,
        consecutive=consecutive,
        turn=turn,
        calls=tuple(t.turns[turn - 1].tool_calls),
    )


def try_advantage(cfg: AdvantageConfig) -> None:
    """Call the estimator, and the tree credit."""
    group = made_up_group()
    assign_advantages([group], cfg)
    token_advantages(group, cfg.tree, cfg)


def try_loss(cfg: LossConfig) -> None:
    """Compute the loss of two rows and its gradient. The second row is shorter."""
    mask = torch.ones(2, NUM_TOKENS, dtype=torch.bool)
    mask[1, -1] = False
    old = torch.linspace(-2.0, -0.1, mask.numel()).view(2, -1)
    logprobs = (old + 0.05).requires_grad_()
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, NUM_TOKENS)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=advantages,
        mask=mask,
        entropy=-old,
        ref_logprobs=old - 0.1 if cfg.kl_coefficient else None,  # as in the run
        rollout_weights=None,
    )
    if is_own(cfg.kl_estimator):
        kl = token_kl(old, inputs.ref_logprobs, cfg.kl_estimator)
        _must_be_finite(kl, f"loss.kl_estimator={cfg.kl_estimator}: the KL")
    what = f"loss.kind={cfg.kind} (aggregation {cfg.aggregation}, kl_estimator {cfg.kl_estimator})"
    loss, _ = policy_loss(inputs, replace(cfg, kl_in="reward"))  # a KL's gradient would hide that the loss has none
    _must_be_finite(loss, f"{what}: the loss")
    if not loss.requires_grad:
        raise UserError(f"{what}: the loss has no gradient; compute it from inputs.logprobs, and do not detach it")
    loss.backward()
    _must_be_finite(logprobs.grad, f"{what}: the gradient")

    # A rank with fewer micro-batches than the others gets an empty one: its row has no loss token.
    empty = replace(inputs, mask=torch.zeros_like(mask))
    loss, _ = policy_loss(empty, replace(cfg, kl_in="reward"), denominator=1.0)
    loss.backward()
    for values in (loss, logprobs.grad):
        _must_be_finite(values, f"{what}: for rows without a loss token the loss, or its gradient,", "")


def _must_be_finite(
    values: torch.Tensor, what: str, where: str = " for two rows of ordinary numbers, one of which is shorter"
) -> None:
    if not values.isfinite().all():
        raise UserError(f"{what} is not finite{where}")


def try_context(cfg: RolloutConfig, codec: Codec) -> None:
    """Call the user's context policy after a tool call, and after an answer."""
    if not is_own(cfg.context):
        return
    token_ids = tuple(codec.render_prompt(QUESTION))
    group = made_up_group(Prompt("made up, before the run", QUESTION, ["42"], token_ids=token_ids))
    t = group.trajectories[0]
    for turns in (t.turns[:1], t.turns):
        end = turns[-1].result_end
        part = replace(
            t, token_ids=t.token_ids[:end], loss_mask=t.loss_mask[:end], rollout_logprobs=t.rollout_logprobs[:end],
            turns=turns, stop_reason=None, reward=None, reward_parts={},
        )  # fmt: skip
        next_context(ContextEvidence(group.prompt, part, end, codec, cfg))
