"""`policy_loss` from tensors and options, for tests in which most of both are left out."""

from torch import Tensor

from arpo.losses import LossInputs, policy_loss
from arpo.metrics import Metrics
from arpo.options import LossConfig

INPUTS = ("entropy", "ref_logprobs", "rollout_weights", "starts_context")


def loss_of(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **options
) -> tuple[Tensor, Metrics]:
    """The loss of these rows, (B, T) each; `options`: other fields of LossInputs, of LossConfig, and of policy_loss."""
    given = {name: options.pop(name) for name in INPUTS if name in options}
    sums = {name: options.pop(name, None) for name in ("denominator", "entropy_statistics")}
    inputs = LossInputs(logprobs, old_logprobs, advantages, mask, **given)
    return policy_loss(inputs, LossConfig(**options), **sums)
