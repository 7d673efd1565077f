"""The sketch of each trajectory's gradient is autograd's, in packed rows and in trees, and changes no update."""

import pytest
import torch
from helpers.models import build_tiny_model, cfg_of, load_hf
from helpers.ranks import ranks_of
from helpers.updates import filled, take_step

from arpo.batch import row_of
from arpo.model import load_policy
from arpo.model.head import scored_logprobs, token_logprobs
from arpo.model.sketch import GradientSketch
from arpo.options import LossConfig
from arpo.update import step_sketches

CPU = torch.device("cpu")
TEMPERATURE = 0.9


def projected_gradient(hf, row, advantages, sketch) -> torch.Tensor:
    """(2, R * R) The gradient of the row's log p by a matrix in front of the head: weighted, and as it is."""
    ids = torch.as_tensor([*row.prompt_ids, *row.response_ids])
    hidden = hf.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, len(row.prompt_ids) - 1 : -1].detach()
    matrix = torch.zeros(hidden.shape[1], hidden.shape[1], requires_grad=True)
    log_p = (hf.lm_head(hidden + hidden @ matrix.T) / TEMPERATURE).log_softmax(-1)
    tokens = log_p.gather(1, torch.as_tensor(row.response_ids)[:, None])[:, 0] * torch.as_tensor(row.loss_mask)
    sums = []
    for weights in (torch.as_tensor(advantages, dtype=torch.float32), torch.ones(len(tokens))):
        [gradient] = torch.autograd.grad((tokens * weights).sum(), matrix, retain_graph=True)
        sums.append((sketch.directions.T @ gradient @ sketch.inputs).flatten())
    return torch.stack(sums)


@pytest.mark.parametrize("layout", ["packed", "tree"])
def test_a_sketch_is_the_projected_gradient_of_its_row_and_changes_no_weight(tmp_path, layout, mesh):
    folder = build_tiny_model(tmp_path / "model")
    hf = load_hf(folder)
    sketch = GradientSketch(hf.config.hidden_size, CPU)
    weights = []
    ranks = ranks_of(mesh)
    for of_policy in (None, sketch):
        policy = load_policy(cfg_of(folder), mesh, device=CPU)
        minibatch, _ = filled(ranks, policy, policy, "ppo, token_mean", 64, 1, layout)
        policy.sketch = of_policy
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        take_step(policy, optimizer, minibatch, LossConfig(), ranks, is_first=True)
        weights.append([p.full_tensor().clone() for p in policy.parameters()])
    [sketched] = step_sketches(policy, [minibatch], ranks)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert set(sketched.rows) == set(range(6))
    for row_id, (group, trajectory) in enumerate(sketched.trajectories):
        row = row_of(sketched.groups[group], trajectory)
        advantages = [trajectory.advantage] * len(row.response_ids)
        expected = projected_gradient(hf, row, advantages, sketch)
        torch.testing.assert_close(torch.tensor(sketched.rows[row_id]), expected, rtol=1e-3, atol=1e-4)


def test_scores_in_bfloat16_are_those_of_the_same_numbers_in_float32():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 48, generator=generator).bfloat16()
    weight = (0.3 * torch.randn(200, 48, generator=generator)).bfloat16()
    targets = torch.randint(0, 200, (20,), generator=generator)
    directions = GradientSketch(48, CPU).directions
    _, _, scores = scored_logprobs(hidden, weight, targets, directions, temperature=TEMPERATURE, chunk_tokens=7)
    exact = hidden.float().requires_grad_()
    logprobs, _ = token_logprobs(exact, weight.float(), targets, temperature=TEMPERATURE)
    [gradient] = torch.autograd.grad(logprobs.sum(), exact)  # each token's is its own
    torch.testing.assert_close(scores, gradient @ directions, rtol=1e-4, atol=1e-4)


def test_what_a_second_pass_over_the_minibatches_adds_is_left_out():
    sketch = GradientSketch(4, CPU)
    for number in range(4):  # two mini-batches of one micro-batch, twice
        sketch.rows.append(((number,), torch.full((2, 1, 3), float(number))))
    first, second = sketch.collected([1, 1])
    assert list(first) == [0] and list(second) == [1] and second[1].tolist() == [[1.0] * 3] * 2
    assert sketch.collected([1]) == [{}]
