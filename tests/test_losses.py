import math

import pytest
import torch
from helpers.losses import loss_of

from arpo.errors import UserError
from arpo.losses import (
    AGGREGATIONS,
    TOKEN_LOSSES,
    EntropyTarget,
    LossInputs,
    loss_denominator,
    mean_and_std,
    policy_loss,
    token_moments,
)
from arpo.metrics import Metrics
from arpo.options import LossConfig

ONE = torch.ones(1, 1)


def gradient_at_ratio(ratio: float, advantage: float, **options) -> float:
    """d loss / d logp of a single token."""
    logprobs = torch.full((1, 1), math.log(ratio), requires_grad=True)
    loss_of(logprobs, torch.zeros(1, 1), advantage * ONE, ONE, **options)[0].backward()
    return logprobs.grad.item()


USUAL, OWN = (0.2, 0.2), (0.1, 0.3)
"""clip_low and clip_high; with the second pair a bound that stands for the other is seen."""


@pytest.mark.parametrize(
    ("bounds", "ratio", "advantage", "ppo", "aepo", "gspo", "cispo", "reinforce"),
    [
        (USUAL, 1.1, 1, -1.1, -1.1, -1.1, -1.1, -1),
        (USUAL, 1.5, 1, 0, -1.2, 0, -1.2, -1),
        (USUAL, 4, 1, 0, -1.2, 0, -1.2, -1),
        (USUAL, 0.5, 1, -0.5, -0.5, -0.5, -0.8, -1),
        (USUAL, 0.5, -1, 0, 0, 0, 0.8, 1),
        (USUAL, 1.5, -1, 1.5, 1.5, 1.5, 1.2, 1),
        (USUAL, 4, -1, 0, 0, 4, 1.2, 1),  # clipped twice, at dual_clip
        (USUAL, 1, 1, -1, -1, -1, -1, -1),
        (OWN, 0.85, -1, 0, 0, 0, 0.9, 1),
        (OWN, 0.95, -1, 0.95, 0.95, 0.95, 0.95, 1),
        (OWN, 1.25, 1, -1.25, -1.25, -1.25, -1.25, -1),
        (OWN, 1.4, 1, 0, -1.3, 0, -1.3, -1),
    ],
)
def test_gradient_of_a_token_is_as_published(bounds, ratio, advantage, ppo, aepo, gspo, cispo, reinforce):
    options = {"clip_low": bounds[0], "clip_high": bounds[1]}
    for kind, expected in {"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}.items():
        assert gradient_at_ratio(ratio, advantage, kind=kind, **options) == pytest.approx(expected, abs=1e-6), kind
    balanced = gradient_at_ratio(ratio, advantage, entropy_balanced_clipping=True, **options)
    assert balanced == pytest.approx(aepo, abs=1e-6)


def test_cispo_weighs_the_logprob_itself():
    logprobs = torch.full((1, 1), -2.0)
    assert loss_of(logprobs, logprobs - math.log(1.5), ONE, ONE, kind="cispo")[0].item() == pytest.approx(2.4)
    assert loss_of(logprobs, logprobs - math.log(1.5), ONE, ONE, kind="reinforce")[0].item() == pytest.approx(2.0)


def test_gspo_clips_whole_sequences_by_their_mean_log_ratio():
    """Row 0: ratios 4 and 0.25, mean log ratio 0, nothing is clipped. Row 1: 1.5 and 1.5, all is clipped for A > 0."""
    logprobs = torch.tensor([[4.0, 0.25, 9.0], [1.5, 1.5, 1.0]]).log().requires_grad_()
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    advantages = torch.ones(2, 3)
    loss, metrics = loss_of(logprobs, torch.zeros(2, 3), advantages, mask, kind="gspo", denominator=1.0)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert metrics["clip_fraction"] == 0.5 and metrics["ratio_max"] == pytest.approx(1.5)


def test_gspos_token_form_has_the_gradient_of_the_sequence_objective():
    """d/dlogp of -A s, s = exp(mean log ratio) with full gradient, under the aggregation of its paper."""
    logprobs, old, advantages, mask = random_rows()
    options = {"clip_low": 0.99, "clip_high": 99.0, "aggregation": "sequence_mean_token_mean"}
    loss = loss_of(logprobs, old, advantages, mask, kind="gspo", **options)[0]
    means = ((logprobs - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    sequences = mask.sum(-1) > 0
    direct = (-advantages[:, 0] * means.exp())[sequences].mean()
    assert loss.item() == pytest.approx(direct.item(), rel=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(x, logprobs)[0] for x in (loss, direct)))


def test_with_a_ratio_for_each_turn_gspo_clips_turns():
    """Row 0: turns of ratios 4, 0.25 and, after a result, 1.5; means 1 and 1.5, so the second is clipped for A = 1.
    Row 1: a result first, then 0.5 and 2 in one turn and 0.9: means 1 and 0.9, nothing is clipped."""
    logprobs = torch.tensor([[4.0, 0.25, 9.0, 1.5], [7.0, 0.5, 2.0, 1.0]]).log()
    logprobs = torch.cat([logprobs, torch.tensor([[1.0], [0.9]]).log()], dim=1).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 0, 1]])
    options = {"kind": "gspo", "denominator": 1.0}
    loss, metrics = loss_of(logprobs, torch.zeros(2, 5), torch.ones(2, 5), mask, ratio_over="turn", **options)
    assert loss.item() == pytest.approx(-(1 + 1 + 1.2 + 1 + 1 + 0.9))
    loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-1.0, -1, 0, 0, 0], [0, -1, -1, 0, -0.9]]))
    assert metrics["clip_fraction"] == pytest.approx(1 / 6) and metrics["ratio_max"] == pytest.approx(1.5)
    whole = loss_of(logprobs, torch.zeros(2, 5), torch.ones(2, 5), mask, **options)[0]  # row 0: 1.5 ** (1 / 3)
    assert whole.item() == pytest.approx(-3 * (1.5 ** (1 / 3) + 0.9 ** (1 / 3)))


def test_a_note_and_the_turn_after_it_have_a_ratio_each():
    """No tool result lies between them: a new context begins at token 2. Ratios 2, 0.5 | 1.5; as one, 1.5 ** (1/3)."""
    logprobs = torch.tensor([[2.0, 0.5, 1.5]]).log()
    starts_context = torch.tensor([[False, False, True]])
    options = {"kind": "gspo", "ratio_over": "turn", "clip_high": 9.0, "denominator": 1.0}
    ones = torch.ones(1, 3)
    loss = loss_of(logprobs, torch.zeros(1, 3), ones, ones, starts_context=starts_context, **options)[0]
    assert loss.item() == pytest.approx(-(1 + 1 + 1.5))
    together = loss_of(logprobs, torch.zeros(1, 3), ones, ones, **options)[0]
    assert together.item() == pytest.approx(-3 * 1.5 ** (1 / 3))


def test_entropy_balanced_clipping_changes_gradients_but_no_value():
    rows = random_rows()
    plain = loss_of(*rows, clip_high=0.28)[0]
    balanced = loss_of(*rows, clip_high=0.28, entropy_balanced_clipping=True)[0]
    assert plain.item() == pytest.approx(balanced.item(), rel=1e-6)


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
    assert loss_of(*rows, aggregation=aggregation)[0].item() == pytest.approx(naive_loss(*rows, aggregation))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kind", TOKEN_LOSSES)
def test_loss_gradient_and_metrics_are_invariant_to_the_microbatch_split(kind, aggregation):
    """With every term there is. Rows come in another order too."""
    logprobs, old, advantages, mask = random_rows()
    g = torch.Generator().manual_seed(1)
    entropy, weights = torch.rand(logprobs.shape, generator=g), torch.rand(logprobs.shape, generator=g) + 0.5
    reference = old + 0.3 * torch.randn(logprobs.shape, generator=g)
    options = {
        "kind": kind,
        "aggregation": aggregation,
        "entropy_balanced_advantage": True,
        "entropy_balanced_clipping": True,
        "entropy_statistics": mean_and_std(token_moments(entropy[mask.bool()])),
        "entropy_coefficient": 0.1,
        "kl_coefficient": 0.2,
        "denominator": loss_denominator(mask, aggregation),
    }

    def of(rows: list[int]):
        tensors = {"entropy": entropy[rows], "rollout_weights": weights[rows], "ref_logprobs": reference[rows]}
        return loss_of(logprobs[rows], old[rows], advantages[rows], mask[rows], **tensors, **options)

    whole, whole_metrics = of([0, 1, 2, 3, 4, 5])
    (whole_gradient,) = torch.autograd.grad(whole, logprobs)
    total, gradient, metrics = 0.0, torch.zeros_like(logprobs), Metrics()
    for part in ([5], [3, 1, 0], [4, 2]):
        loss, part_metrics = of(part)
        total += loss.item()
        gradient += torch.autograd.grad(loss, logprobs)[0]
        metrics.merge(part_metrics)

    assert total == pytest.approx(whole.item(), rel=1e-5)
    torch.testing.assert_close(gradient, whole_gradient)
    assert metrics.values() == pytest.approx(whole_metrics.values(), rel=1e-5)


def test_the_denominator_counts_loss_tokens_or_rows_that_have_any():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 1]])
    for some in (mask, mask.bool(), mask.float()):
        assert [loss_denominator(some, name) for name in AGGREGATIONS] == [3.0, 2.0, 2.0]


@pytest.mark.parametrize("kind", TOKEN_LOSSES)
def test_masked_tokens_get_no_gradient_even_when_their_numbers_are_absurd(kind):
    logprobs, old, advantages, mask = random_rows()
    old = torch.where(mask.bool(), old, math.nan)
    options = {"ref_logprobs": torch.where(mask.bool(), old, -math.inf), "kl_coefficient": 1.0}
    loss_of(logprobs, old, advantages, mask, kind=kind, **options)[0].backward()
    assert torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad[mask == 0] == 0).all()


def test_rows_without_loss_tokens_give_zero_loss_and_zero_gradient():
    logprobs = torch.randn(2, 3, requires_grad=True)
    loss, metrics = loss_of(logprobs, torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3))
    loss.backward()
    assert loss.item() == 0 and (logprobs.grad == 0).all()
    assert metrics.values() == {}


@pytest.mark.parametrize(
    ("entropies", "options", "factors"),
    [
        ([0.0, 2.0, 4.0], {}, [0.8, 1.0, 1.2]),  # z = -1, 0, 1
        ([0.0, 2.0, 4.0], {"entropy_statistics": (4.0, 0.5)}, [0.0, 0.2, 1.0]),  # z = -8, -4, 0: no sign is flipped
        ([0.0, 1.0, 7.0], {"entropy_statistics": (1.0, 1.0), "entropy_advantage_max_z": 2.0}, [0.8, 1.0, 1.4]),
        ([0.0, 1.0, 7.0], {"entropy_statistics": (1.0, 1.0), "entropy_advantage_max_z": 0.5}, [0.8, 1.0, 1.1]),
        (
            [0.0, 1.0, 7.0],
            {"entropy_statistics": (1.0, 1.0), "entropy_advantage_max_z": None},
            [0.8, 1.0, 2.2],
        ),  # paper
    ],
)
def test_the_entropy_balanced_advantage_scales_by_the_z_score_within_bounds(entropies, options, factors):
    """The paper has no bound from above."""
    entropy = torch.tensor([entropies], requires_grad=True)
    logprobs, ones = torch.zeros(1, 3, requires_grad=True), torch.ones(1, 3)
    options = options | {"entropy_balanced_advantage": True, "aggregation": "sequence_mean_token_sum"}
    loss_of(logprobs, torch.zeros(1, 3), ones, ones, entropy=entropy, **options)[0].backward()
    torch.testing.assert_close(logprobs.grad, -torch.tensor([factors]))
    assert entropy.grad is None


@pytest.mark.parametrize("option", [{"entropy_balanced_advantage": True}, {"entropy_coefficient": 0.1}])
def test_options_about_the_entropy_without_entropies_are_an_error(option):
    with pytest.raises(ValueError, match="entropies"):
        loss_of(ONE, ONE, ONE, ONE, **option)


def test_metrics_count_clipped_tokens_and_measure_the_kl():
    logprobs = torch.tensor([[1.5, 0.5, 4.0, 1.0, 9.0]]).log()
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    metrics = loss_of(logprobs, torch.zeros(1, 5), advantages, mask, entropy=torch.full((1, 5), 0.3))[1]
    assert metrics["clip_fraction"] == metrics["clip_fraction_low"] == metrics["dual_clip_fraction"] == 0.25
    assert metrics["ratio_max"] == pytest.approx(4.0)
    assert metrics["entropy"] == pytest.approx(0.3)
    kl = sum(r - 1 - math.log(r) for r in (1.5, 0.5, 4.0, 1.0)) / 4
    assert metrics["approx_kl"] == pytest.approx(kl, rel=1e-5)


def test_the_kl_of_a_small_update_keeps_its_digits():
    """unslothai/unsloth-zoo 1240: exp(x) - 1 - x has lost all digits of a step that changes logprobs by 1e-5."""
    log_ratios = torch.tensor([[1e-5, -1e-5, 3e-5]])
    metrics = loss_of(log_ratios, torch.zeros(1, 3), torch.ones(1, 3), torch.ones(1, 3))[1]
    assert metrics["approx_kl"] == pytest.approx(11e-10 / 6, rel=1e-2)


def test_metrics_of_the_policy_loss_say_nothing_of_the_terms_beside_it():
    options = {"entropy": ONE, "entropy_coefficient": 0.5, "ref_logprobs": -ONE, "kl_coefficient": 0.1}
    loss, metrics = loss_of(ONE, ONE, ONE, ONE, kl_estimator="k1", **options)
    assert metrics["policy"] == -1.0 and metrics["kl"] == 2.0
    assert loss.item() == pytest.approx(-1.0 + 0.1 * 2.0 - 0.5 * 1.0)


def test_the_entropy_bonus_pushes_entropy_up():
    entropy = torch.tensor([[1.0, 2.0, 5.0]], requires_grad=True)
    zeros, mask = torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    loss_of(zeros, zeros, zeros, mask, entropy=entropy, entropy_coefficient=0.1)[0].backward()
    torch.testing.assert_close(entropy.grad, torch.tensor([[-0.05, -0.05, 0.0]]))


def test_a_kl_that_belongs_to_the_reward_is_not_in_the_loss_too():
    options = {"ref_logprobs": -ONE, "kl_coefficient": 0.1}
    in_reward, metrics = loss_of(ONE, ONE, ONE, ONE, kl_in="reward", **options)
    assert in_reward.item() == -1.0 < loss_of(ONE, ONE, ONE, ONE, **options)[0].item() and "kl" not in metrics.values()


@pytest.mark.parametrize(
    "target, entropies, expected",
    [
        (None, [0.1] * 9, 0.002),
        (0.3, [], 0.002),
        (0.3, [0.2, 0.2, 0.4], 0.003),
        (0.3, [0.4, 0.5, 0.6, 0.7, 0.2], 0.001),  # at 0 at least, from where it grows at once
    ],
)
def test_the_entropy_coefficient_follows_the_entropy(target, entropies, expected):
    cfg = LossConfig(entropy_coefficient=0.002, entropy_target=target)
    resumed = EntropyTarget(cfg, entropies)
    uninterrupted = EntropyTarget(cfg)
    for entropy in [None, *entropies]:  # the first step updated nothing
        uninterrupted.add(entropy)
    assert resumed.loss_cfg == uninterrupted.loss_cfg
    assert resumed.loss_cfg.entropy_coefficient == pytest.approx(expected, abs=1e-12)


def test_a_custom_aggregation_gets_floats_where_only_its_counts_are_asked_for(tmp_path):
    """torch has no mean of bools."""
    (tmp_path / "own.py").write_text(
        "def row_mean(losses, mask):\n    return losses.mean(-1), mask.any(-1).to(losses)\n"
    )
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    assert loss_denominator(mask, f"{tmp_path / 'own.py'}:row_mean").item() == 2


def test_rows_without_a_loss_token_do_not_count_under_a_custom_aggregation(tmp_path):
    """They fill empty micro-batches. trl #3231 asks for one denominator per sequence, whatever the number of ranks."""
    (tmp_path / "own.py").write_text(
        "def per_budget(losses, mask):\n    return losses.sum(-1), losses.new_full((len(mask),), 48.0)\n"
    )
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    assert loss_denominator(mask, f"{tmp_path / 'own.py'}:per_budget").item() == 2 * 48


@pytest.mark.parametrize("name", ["policy", "ratio_max", "approx_kl", "entropy", "kl", "entropy_coefficient"])
def test_a_metric_of_a_custom_loss_has_no_name_of_another_number(tmp_path, name):
    """The review of trl #5233: such a value was dropped, or replaced the other number."""
    (tmp_path / "own.py").write_text(
        "from arpo.losses import TokenLosses\n\n\ndef own(inputs, cfg):\n"
        f"    return TokenLosses(-inputs.logprobs, inputs.logprobs, {{'{name}': inputs.logprobs}})\n"
    )
    ones = torch.ones(1, 1)
    inputs = LossInputs(ones, ones, ones, ones, entropy=ones, ref_logprobs=ones)
    with pytest.raises(UserError, match=rf"own\.py:own: TokenLosses\.metrics has '{name}', which is another number's"):
        policy_loss(inputs, LossConfig(kind=f"{tmp_path / 'own.py'}:own"))


def test_a_kl_that_a_schedule_switches_on_without_a_reference_is_an_error():
    """trl #2908: a coefficient that an edit lets grow from 0 had no effect, since no reference was loaded."""
    with pytest.raises(ValueError, match=r"loss\.kl_coefficient needs a reference"):
        policy_loss(LossInputs(ONE, ONE, ONE, ONE), LossConfig(kl_coefficient=0.1))
    policy_loss(LossInputs(ONE, ONE, ONE, ONE), LossConfig(kl_coefficient=0.1, kl_in="reward"))
