"""Values by numbers; gradients in exact expectation over a small vocabulary."""

import math

import pytest
import torch
from helpers.losses import loss_of

from arpo.kl import KL_ESTIMATORS, token_kl


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [1.0, -1.0], [1.0, 1.0]),
        ("abs", [1.0, 1.0], [1.0, -1.0]),
        ("k2", [0.5, 0.5], [1.0, -1.0]),
        ("k3", [math.exp(-1), math.e - 2], [1 - math.exp(-1), 1 - math.e]),
    ],
)
def test_value_and_gradient_of_each_estimator(estimator, values, gradients):
    """Of a token that is e times as likely under the policy as under the reference, and of the reverse."""
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    kl = token_kl(logprobs, torch.tensor([[-2.0, -1.0]]), estimator)
    kl.sum().backward()
    torch.testing.assert_close(kl, torch.tensor([values]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([gradients]))


def test_k3_is_bounded_and_finite_wherever_the_reference_is():
    logprobs = torch.tensor([-100.0, -5.0, 0.0], requires_grad=True)
    kl = token_kl(logprobs, torch.tensor([0.0, 0.0, -1000.0]), "k3")
    kl.sum().backward()
    torch.testing.assert_close(kl, torch.tensor([10.0, 10.0, 10.0]))
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


def test_k3_of_nearly_equal_policies_keeps_its_digits():
    """google/tunix 2315 and unslothai/unsloth-zoo 1240: exp(x) - 1 - x was -6e-8 at x = 1e-6, where it is 5e-13."""
    for difference in (1e-6, 1e-4, -1e-3):
        kl = token_kl(torch.tensor([-difference]), torch.zeros(1), "k3").item()
        assert kl == pytest.approx(math.expm1(difference) - difference, rel=1e-2)


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the policy (with gradient), log-probabilities of the reference."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(7, generator=g).double().requires_grad_(), torch.randn(7, generator=g).double().log_softmax(-1)


def expected_gradient(estimator: str) -> torch.Tensor:
    """d/dlogits of the estimator averaged over tokens that the policy samples; sampling itself has no gradient."""
    logits, reference = distributions()
    logprobs = logits.log_softmax(-1)
    (logprobs.detach().exp() * token_kl(logprobs, reference, estimator)).sum().backward()
    return logits.grad


def true_gradient(of: str) -> torch.Tensor:
    logits, reference = distributions()
    logprobs = logits.log_softmax(-1)
    if of == "KL(policy, reference)":
        (logprobs.exp() * (logprobs - reference)).sum().backward()
    else:
        (reference.exp() * (reference - logprobs)).sum().backward()
    return logits.grad


def test_k1_and_k3_are_unbiased_in_value():
    logits, reference = distributions()
    logprobs = logits.detach().log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((logprobs.exp() * token_kl(logprobs, reference, estimator)).sum(), kl)


def test_in_the_loss_k1_pushes_nowhere_k2_down_the_kl_and_k3_down_the_reverse_kl():
    """What each estimator optimises there is its gradient, and k1's averages to 0 whatever the reference is."""
    assert expected_gradient("k1").abs().max() < 1e-12 < true_gradient("KL(policy, reference)").abs().max()
    torch.testing.assert_close(expected_gradient("k2"), true_gradient("KL(policy, reference)"))
    torch.testing.assert_close(expected_gradient("k3"), true_gradient("KL(reference, policy)"))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_kl_enters_the_loss_with_its_coefficient_over_loss_tokens_only(estimator):
    logprobs, reference = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-2.0, -1.0, 7.0]])
    mask = torch.tensor([[1, 1, 0]])
    options = {"ref_logprobs": reference, "kl_coefficient": 0.3, "kl_estimator": estimator}
    loss, metrics = loss_of(logprobs, logprobs, torch.zeros(1, 3), mask, **options)
    expected = token_kl(logprobs[:, :2], reference[:, :2], estimator).mean().item()
    assert loss.item() == pytest.approx(0.3 * expected) and metrics["kl"] == pytest.approx(expected)
