"""What holds of every rollout on a real engine, whatever the protocol."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from arpo.trajectory import Group, Trajectory


def teacher_forced(folder: Path, groups: list[Group]) -> Iterator[tuple[Trajectory, torch.Tensor]]:
    """Each trajectory with the (T, V) logprobs of its positions, from one pass over prompt, turns and results at once.

    Any misplaced token or fork would show in them.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for group in groups:
        for t in group.trajectories:
            ids = torch.tensor([[*group.prompt.token_ids, *t.token_ids]])  # (1, P + T)
            with torch.no_grad():
                yield t, model(ids).logits.log_softmax(-1)[0, len(group.prompt.token_ids) - 1 : -1]


def assert_rollout_logprobs(t: Trajectory, logprobs: torch.Tensor, atol: float) -> None:
    """The engine's logprobs of the sampled tokens are these (T, V) ones."""
    ours, mask = torch.tensor(t.rollout_logprobs), torch.tensor(t.loss_mask, dtype=torch.bool)
    theirs = logprobs.gather(-1, torch.tensor(t.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(ours[mask], theirs[mask], atol=atol, rtol=0)


def assert_children_fork_behind_results(groups: list[Group]) -> None:
    num_children = 0
    for group in groups:
        by_id = {t.trajectory_id: t for t in group.trajectories}
        for child in (t for t in group.trajectories if t.parent_id is not None):
            parent = by_id[child.parent_id]
            assert child.fork_at in {turn.result_end for turn in parent.turns}
            for field in ("token_ids", "rollout_logprobs"):
                assert getattr(child, field)[: child.fork_at] == getattr(parent, field)[: child.fork_at]
            num_children += 1
    assert num_children
