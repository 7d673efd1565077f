import math

import pytest
import torch

from arpo.losses import AGGREGATIONS, loss_denominator, policy_loss, statistics_of, token_moments
from arpo.trajectory import Metrics

ONE = torch.ones(1, 1)


def gradient_at_ratio(ratio: float, advantage: float, **options) -> float:
    """d loss / d logp of a single token."""
    logprobs = torch.full((1, 1), math.log(ratio), requires_grad=True)
    policy_loss(logprobs, torch.zeros(1, 1), advantage * ONE, ONE, **options)[0].backward()
    return logprobs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "ppo", "aepo"),
    [(1.5, 1, 0, -1.2), (4, 1, 0, -1.2), (0.5, -1, 0, 0), (1.5, -1, 1.5, 1.5), (4, -1, 0, 0), (1, 1, -1, -1)],
)
def test_gradient_of_a_token_is_as_published(ratio, advantage, ppo, aepo):
    assert gradient_at_ratio(ratio, advantage) == pytest.approx(ppo, abs=1e-6)
    assert gradient_at_ratio(ratio, advantage, entropy_balanced_clipping=True) == pytest.approx(aepo, abs=1e-6)


def test_entropy_balanced_clipping_changes_gradients_but_no_value():
    rows = random_rows()
    plain = policy_loss(*rows, clip_high=0.28)[0]
    balanced = policy_loss(*rows, clip_high=0.28, entropy_balanced_clipping=True)[0]
    assert plain.item() == pytest.approx(balanced.item(), rel=1e-6)


def test_without_dual_clip_a_bad_token_far_outside_keeps_its_gradient():
    assert gradient_at_ratio(4, -1, dual_clip=None) == pytest.approx(4)


def test_the_clip_range_need_not_be_symmetric():
    assert gradient_at_ratio(1.25, 1, clip_high=0.28) == pytest.approx(-1.25)
    assert gradient_at_ratio(1.25, 1, clip_high=0.2) == 0


def random_rows(num_rows: int = 6, num_tokens: int = 5):
    """logprobs (with gradient), old_logprobs, advantages, mask; the last row has no loss token."""
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(num_rows, num_tokens, generator=g)
    logprobs = (old + torch.randn(num_rows, num_tokens, generator=g) * 0.5).requires_grad_()
    advantages = torch.randn(num_rows, 1, generator=g).expand(num_rows, num_tokens)
    mask = (torch.rand(num_rows, num_tokens, generator=g) < 0.7).float()
    mask[-1] = 0
    return logprobs, old, advantages, mask


def naive_loss(logprobs, old, advantages, mask, aggregation):
    """The formulas, one token at a time."""
    sequences = []
    for b in range(len(mask)):
        tokens = []
        for t in range(mask.shape[1]):
            if mask[b, t]:
                r, a = math.exp(logprobs[b, t].item() - old[b, t].item()), advantages[b, t].item()
                loss = max(-a * r, -a * min(max(r, 0.8), 1.2))
                tokens.append(min(loss, -a * 3) if a < 0 else loss)
        if tokens:
            sequences.append(tokens)
    if aggregation == "token_mean":
        return sum(map(sum, sequences)) / sum(map(len, sequences))
    per_sequence = [sum(s) / (len(s) if aggregation == "sequence_mean_token_mean" else 1) for s in sequences]
    return sum(per_sequence) / len(per_sequence)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_equals_the_formula_token_by_token(aggregation):
    rows = random_rows()
    assert policy_loss(*rows, aggregation=aggregation)[0].item() == pytest.approx(naive_loss(*rows, aggregation))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_gradient_and_metrics_are_invariant_to_the_microbatch_split(aggregation):
    logprobs, old, advantages, mask = random_rows()
    entropy = torch.rand(logprobs.shape, generator=torch.Generator().manual_seed(1))
    options = {
        "aggregation": aggregation,
        "entropy_balanced_advantage": True,
        "entropy_balanced_clipping": True,
        "entropy_statistics": statistics_of(token_moments(entropy, mask)),
        "denominators": loss_denominator(mask, aggregation),
    }
    whole, whole_metrics = policy_loss(logprobs, old, advantages, mask, entropy=entropy, **options)
    (whole_gradient,) = torch.autograd.grad(whole, logprobs)

    total, gradient, metrics = 0.0, torch.zeros_like(logprobs), Metrics()
    for part in ([0], [1, 2, 3], [4, 5]):
        rows = (logprobs[part], old[part], advantages[part], mask[part])
        loss, part_metrics = policy_loss(*rows, entropy=entropy[part], **options)
        total += loss.item()
        gradient += torch.autograd.grad(loss, logprobs)[0]
        metrics.merge(part_metrics)

    assert total == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(gradient, whole_gradient)
    assert metrics.values() == pytest.approx(whole_metrics.values(), rel=1e-5)


def test_without_denominators_the_loss_is_the_mean_over_these_rows():
    logprobs, old, advantages, mask = random_rows()
    local = policy_loss(logprobs, old, advantages, mask)[0]
    explicit = policy_loss(logprobs, old, advantages, mask, denominators=mask.sum().item())[0]
    assert local.item() == explicit.item()


def test_masked_tokens_get_no_gradient_even_when_their_numbers_are_absurd():
    logprobs, old, advantages, mask = random_rows()
    old = torch.where(mask.bool(), old, -1e30)
    policy_loss(logprobs, old, advantages, mask)[0].backward()
    assert torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad[mask == 0] == 0).all()


def test_rows_without_loss_tokens_give_zero_loss_and_zero_gradient():
    logprobs = torch.randn(2, 3, requires_grad=True)
    loss, metrics = policy_loss(logprobs, torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3))
    loss.backward()
    assert loss.item() == 0 and (logprobs.grad == 0).all()
    assert metrics.values() == {}


def test_entropy_balanced_advantage_scales_by_the_z_score_and_never_flips_the_sign():
    entropy = torch.tensor([[0.0, 2.0, 4.0]], requires_grad=True)
    logprobs = torch.zeros(1, 3, requires_grad=True)
    zeros, ones = torch.zeros(1, 3), torch.ones(1, 3)
    options = {"entropy_balanced_advantage": True, "aggregation": "sequence_mean_token_sum"}
    policy_loss(logprobs, zeros, ones, ones, entropy=entropy, **options)[0].backward()
    torch.testing.assert_close(logprobs.grad, -torch.tensor([[0.8, 1.0, 1.2]]))  # z = -1, 0, 1
    assert entropy.grad is None

    logprobs.grad = None
    options |= {"entropy_statistics": (4.0, 0.5), "entropy_advantage_weight": 0.2}
    policy_loss(logprobs, zeros, ones, ones, entropy=entropy, **options)[0].backward()
    torch.testing.assert_close(logprobs.grad, -torch.tensor([[0.0, 0.2, 1.0]]))  # z = -8, -4, 0


def test_entropy_balanced_advantage_without_entropies_is_an_error():
    with pytest.raises(ValueError, match="entropies"):
        policy_loss(ONE, ONE, ONE, ONE, entropy_balanced_advantage=True)


def test_rollout_weights_multiply_token_losses():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    weights = torch.tensor([[2.0, 0.5]])
    ones = torch.ones(1, 2)
    policy_loss(logprobs, torch.zeros(1, 2), ones, ones, rollout_weights=weights, denominators=1.0)[0].backward()
    torch.testing.assert_close(logprobs.grad, -weights)


def test_metrics_count_clipped_tokens_and_measure_the_kl():
    logprobs = torch.tensor([[1.5, 0.5, 4.0, 1.0, 9.0]]).log()
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    metrics = policy_loss(logprobs, torch.zeros(1, 5), advantages, mask, entropy=torch.full((1, 5), 0.3))[1]
    assert metrics["clip_fraction"] == metrics["clip_fraction_low"] == metrics["dual_clip_fraction"] == 0.25
    assert metrics["ratio_max"] == pytest.approx(4.0)
    assert metrics["entropy"] == pytest.approx(0.3)
    kl = sum(r - 1 - math.log(r) for r in (1.5, 0.5, 4.0, 1.0)) / 4
    assert metrics["approx_kl"] == pytest.approx(kl, rel=1e-5)


def test_an_unknown_aggregation_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="token_mean"):
        policy_loss(ONE, ONE, ONE, ONE, aggregation="mean")
