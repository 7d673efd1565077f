import math

import pytest
import torch
from helpers.losses import loss_of

from arpo.errors import UserError
from arpo.options import LossConfig
from arpo.rollout_correction import rollout_weights

WEIGHTS = [0.4, 0.5, 1.0, 2.0, 3.0]
TIS = LossConfig(rollout_correction="tis")


def weights_of(kind: str, mask=(1, 1, 1, 1, 1), **bounds):
    rollout_logprobs, cfg = torch.full((1, 5), -3.0), LossConfig(rollout_correction=kind, **bounds)
    return rollout_weights(
        rollout_logprobs + torch.tensor([WEIGHTS]).log(), rollout_logprobs, torch.tensor([mask]), cfg
    )


@pytest.mark.parametrize(
    ("kind", "expected", "metric", "share"),
    [
        ("tis", [0.4, 0.5, 1.0, 2.0, 2.0], "truncated_share", 0.2),
        ("mis", [0.0, 0.5, 1.0, 2.0, 0.0], "masked_share", 0.4),
    ],
)
def test_weights_are_truncated_or_masked(kind, expected, metric, share):
    weights, metrics = weights_of(kind, correction_low=0.499, correction_high=2.001)
    torch.testing.assert_close(weights, torch.tensor([expected]), atol=2e-3, rtol=0)
    assert metrics.values() == pytest.approx({metric: share})


# Two rows of w: 0.5, 3, (9), 1 with product 1.5 and third root 1.1447; 0.5, 0.8, 0.9, 0.5 with product 0.18 and fourth
# root 0.6513. The 9 is of a tool result, mask 0.
@pytest.mark.parametrize(
    ("kind", "bounds", "weights", "share"),
    [
        ("sequence_tis", (0.5, 1.25), (1.25, 0.18), 3 / 7),
        ("sequence_tis", (0.5, 2.0), (1.5, 0.18), 0),
        ("sequence_mis", (0.5, 2.0), (1.5, 0), 4 / 7),
        ("geometric_tis", (0.5, 1.1), (1.1, 0.6513), 3 / 7),
        ("geometric_mis", (0.6, 1.1), (0, 0.6513), 3 / 7),
        ("geometric_mis", (0.7, 1.2), (1.1447, 0), 4 / 7),
    ],
)
def test_all_tokens_of_a_sequence_have_the_product_or_the_geometric_mean_of_their_weights(kind, bounds, weights, share):
    cfg = LossConfig(rollout_correction=kind, correction_low=bounds[0], correction_high=bounds[1])
    log_weights = torch.tensor([[0.5, 3.0, 9.0, 1.0], [0.5, 0.8, 0.9, 0.5]]).log()
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
    found, metrics = rollout_weights(log_weights - 3.0, torch.full((2, 4), -3.0), mask, cfg)
    torch.testing.assert_close(found, torch.tensor(weights)[:, None] * mask, atol=1e-4, rtol=0)
    assert list(metrics.values().values()) == [pytest.approx(share)]


def test_masked_tokens_have_no_weight_and_do_not_count():
    weights, metrics = weights_of("mis", mask=(0, 0, 1, 1, 0), correction_high=2.001)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.0, 1.0, 2.0, 0.0]]))
    assert metrics["masked_share"] == 0.0
    assert weights_of("tis", mask=(0, 0, 0, 0, 0))[1].values() == {}


def test_a_users_correction_may_return_its_changed_tokens_as_numbers(tmp_path):
    """As a custom loss may its metrics. The second 3 is of a tool result, mask 0."""
    text = "cut = (lambda logs, mask: logs, lambda w, cfg: (w.clamp(max=2), {'cut': (w > 1.5).float()}))\n"
    (tmp_path / "mine.py").write_text(text)
    weights, metrics = weights_of(f"{tmp_path}/mine.py:cut", mask=(1, 1, 1, 1, 0))
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.5, 1.0, 2.0, 0.0]]))
    assert metrics.values() == {"cut": 0.25}


def test_weights_stay_finite_and_pass_no_gradient():
    old = torch.tensor([[500.0, -500.0]], requires_grad=True)
    weights, _ = rollout_weights(old, torch.zeros(1, 2), torch.ones(1, 2), TIS)
    assert weights[0, 0] == 2.0 and 0 <= weights[0, 1] < 1e-8 and not weights.requires_grad


def test_the_corrected_gradient_is_unbiased_where_no_bound_holds():
    """Tokens sampled by another policy q, weighed by p / q, give the policy gradient of p: exact sums over 4 tokens."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(4, generator=g).double().requires_grad_()
    q = (logits.detach() + 0.2 * torch.randn(4, generator=g)).softmax(-1)
    advantages = torch.randn(4, generator=g).double()
    gradients = []
    for sampled_from, correct in ((logits.detach().softmax(-1), False), (q, True)):
        logprobs = logits.log_softmax(-1)[:, None]  # one row per token: (4, 1)
        weights = None
        if correct:
            weights, metrics = rollout_weights(logprobs.detach(), q.log()[:, None], torch.ones(4, 1), TIS)
            assert metrics["truncated_share"] == 0
        expected_advantages = (sampled_from * advantages)[:, None]
        rows = (logprobs, logprobs.detach(), expected_advantages, torch.ones(4, 1))
        total = loss_of(*rows, rollout_weights=weights, denominator=1.0)[0]
        gradients.append(torch.autograd.grad(total, logits)[0])
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0.01 and math.isfinite(gradients[0].sum().item())


@pytest.mark.parametrize("name", ["kl", "abs"])
def test_a_metric_of_a_custom_correction_has_no_name_of_another_number(tmp_path, name):
    """It was averaged with mismatch/kl, without a word (the review of trl #5233 found the same in its table)."""
    (tmp_path / "own.py").write_text(
        f"pair = (lambda log_weights, mask: log_weights), (lambda weights, cfg: (weights, {{'{name}': weights > 2}}))\n"
    )
    with pytest.raises(UserError, match=f"the changed tokens has '{name}', which is another number's name; rename it"):
        weights_of(f"{tmp_path / 'own.py'}:pair")
