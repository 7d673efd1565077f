"""`policy_loss` from tensors and options, for tests in which most of both are left out."""

from torch import Tensor

from arpo.losses import LossInputs, policy_loss
from arpo.options import LossConfig
from arpo.trajectory import Metrics

TENSORS = ("entropy", "ref_logprobs", "rollout_weights")
COUNTS = ("denominator", "entropy_statistics")


def loss_of(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **options
) -> tuple[Tensor, Metrics]:
    """The loss of these rows, (B, T) each; `options`: other fields of LossInputs, of LossConfig, and of policy_loss."""
    tensors, counts = ({name: options.pop(name) for name in names if name in options} for names in (TENSORS, COUNTS))
    return policy_loss(LossInputs(logprobs, old_logprobs, advantages, mask, **tensors), LossConfig(**options), **counts)
