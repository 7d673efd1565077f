"""The critic on a real (tiny) model: what it reads and what it learns. That it is saved: test_every_algorithm.py."""

import math

import numpy as np
import pytest
import torch
from helpers.models import assert_close_by_name, cfg_of, random_rows
from helpers.ranks import ranks_of, run_ranks

from arpo.batch import Row, collate, microbatches
from arpo.config.sections import OptimConfig
from arpo.metrics import Metrics
from arpo.model.critic import TrainedCritic, fill_values, load_critic, value_loss
from arpo.model.optim import build_optimizer
from arpo.tree import tree_microbatches

CPU = torch.device("cpu")
ONE, ZERO = torch.ones(1, 1), torch.zeros(1, 1)
OPTIM = OptimConfig(lr=3e-3, weight_decay=0.0)
LENGTHS = [(3, 12), (5, 9), (1, 4), (7, 13), (3, 1)]


@pytest.fixture(scope="module")
def ranks(mesh):
    return ranks_of(mesh)


def with_a_head(critic):
    """One that is not 0: the sum of the hidden state."""
    torch.nn.init.constant_(critic.value_head.weight, 0.1)
    return critic


def test_a_value_is_read_before_its_token_and_knows_nothing_after(tiny_model_dir, ranks):
    critic = with_a_head(load_critic(cfg_of(tiny_model_dir), ranks.mesh, device=CPU))
    [row] = random_rows([(4, 8)])
    row.loss_mask[:] = 1
    other = Row(row.prompt_ids, row.response_ids.copy(), row.loss_mask)
    other.response_ids[5] += 1
    with torch.no_grad():
        values, changed = critic(collate([row]))[0], critic(collate([other]))[0]
    assert torch.equal(values[:6], changed[:6])  # up to the value of the changed token itself
    assert (values[6:] != changed[6:]).all()


def test_values_are_exact_even_where_the_backbone_computes_in_bfloat16_and_0_where_masked(tiny_model_dir, ranks):
    """Or neighbouring values around 1 would be 0.0078 apart."""
    critic = load_critic(cfg_of(tiny_model_dir, compute_dtype="bfloat16"), ranks.mesh, device=CPU)
    torch.nn.init.constant_(critic.value_head.bias, 1.001)
    micro = collate(random_rows(LENGTHS))
    values = critic(micro)
    assert values.dtype == torch.float32 and torch.equal(values, 1.001 * micro.loss_mask)
    values.sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in critic.parameters())


def test_the_critic_learns_constant_returns(tiny_model_dir, ranks):
    critic = load_critic(cfg_of(tiny_model_dir), ranks.mesh, device=CPU)
    trained = TrainedCritic(critic, build_optimizer(critic, OPTIM), OPTIM, num_updates=25)
    micros = microbatches(random_rows(LENGTHS), 0, 1, max_tokens=24)
    losses = []
    for update in range(25):
        fill_values(critic, micros)
        for micro in micros:
            micro.returns = 0.7 * micro.loss_mask
        losses.append(trained.update(micros, update, ranks)["critic/loss"])
    assert losses[0] == pytest.approx(0.5 * 0.7**2, rel=1e-5)
    with torch.no_grad():
        errors = [(critic(micro) - 0.7)[micro.loss_mask].abs() for micro in micros]
    assert torch.cat(errors).max() < 0.1, losses


def rows_with_a_branch() -> list[Row]:
    first, second, *others = random_rows(LENGTHS)
    ids = np.concatenate([first.response_ids[:5], second.response_ids[5:]])
    return [first, Row(first.prompt_ids, ids, second.loss_mask), *others]


def gradients(ranks, folder: str, max_tokens: int, layout) -> tuple[dict, dict]:
    """Of one critic update: (metrics, full gradients before clipping)."""
    critic = with_a_head(load_critic(cfg_of(folder, recompute_every_n_layers=1), ranks.mesh, device=CPU))
    micros = layout(rows_with_a_branch(), ranks.rank, ranks.world_size, max_tokens)
    returns = [np.linspace(-1, 1, num_response) * i for i, (_, num_response) in enumerate(LENGTHS)]
    for micro in micros:
        micro.old_values, micro.returns = micro.rows_to_tensor(returns) * 0.1, micro.rows_to_tensor(returns)
    seen = {}
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.full_tensor().numpy() for name, p in critic.named_parameters()})
    )
    metrics = Metrics()
    trained = TrainedCritic(critic, optimizer, OptimConfig(lr=0.0, max_grad_norm=1e9), num_updates=1)
    metrics.merge(trained.update(micros, 0, ranks))
    return ranks.reduce_metrics(metrics).values(), seen


def test_loss_and_gradients_do_not_depend_on_microbatches_or_world_size(tiny_model_dir):
    [(metrics, expected)] = run_ranks(1, gradients, str(tiny_model_dir), 500, microbatches)
    assert 0 < metrics["critic/clip_fraction"] < 1
    for world_size, layout in ((1, microbatches), (2, microbatches), (2, tree_microbatches)):
        for other_metrics, others in run_ranks(world_size, gradients, str(tiny_model_dir), 21, layout):
            assert other_metrics == pytest.approx(metrics, rel=1e-5)
            assert_close_by_name(others, expected)


@pytest.mark.parametrize(
    ("value", "expected", "gradient"),
    [
        (1.2, 0.5 * 1.2**2, 1.2),  # within the clip
        (2.0, 0.5 * 2.0**2, 2.0),  # away from the return: the plain error is the larger one
        (0.1, 0.5 * 0.5**2, 0.0),  # more than 0.5 at once towards the return: held
    ],
)
def test_a_value_is_held_at_a_distance_from_the_old_one(value, expected, gradient):
    """Old value 1, return 0."""
    values = torch.full((1, 1), value, requires_grad=True)
    loss, metrics = value_loss(values, ONE, ZERO, ONE, clip_value=0.5, denominator=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert values.grad.item() == pytest.approx(gradient)
    assert metrics["clip_fraction"] == float(gradient == 0) and metrics["loss"] == pytest.approx(expected)
    assert metrics["value"] == pytest.approx(value) and metrics["return"] == 0.0


def test_rounding_is_not_taken_for_clipping():
    """No value is further than 0.5 from its old one. old + (value - old) is not the value, for some, in float32."""
    g = torch.Generator().manual_seed(0)
    old, returns = torch.randn(1, 4096, generator=g), torch.randn(1, 4096, generator=g)
    values = old + 0.9 * torch.rand(1, 4096, generator=g) - 0.45
    assert (old + (values - old) != values).any()
    _, metrics = value_loss(values, old, returns, torch.ones(1, 4096), clip_value=0.5, denominator=4096)
    assert metrics["clip_fraction"] == 0.0


def test_values_of_masked_tokens_are_ignored():
    values = torch.tensor([[1.0, 1e30, math.nan]], requires_grad=True)
    mask = torch.tensor([[1, 0, 0]])
    loss, metrics = value_loss(values, values.detach(), torch.zeros(1, 3), mask, clip_value=0.5, denominator=1.0)
    loss.backward()
    assert loss.item() == 0.5 and metrics["value"] == 1.0
    assert values.grad.tolist() == [[1.0, 0.0, 0.0]]
