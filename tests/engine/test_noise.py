"""The sampling noise: a good random number for each (seed, position, token), and the same one everywhere."""

import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from arpo.engine.noise import (
    compile_draw,
    draw,
    exponential_noise,
    install_noise_hook,
    mix64,
    row_keys,
    token_offsets,
)

VOCAB = 4096


def needs_compiler(test):
    return pytest.mark.slow(
        pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")(test)
    )


def noise(seeds, positions, vocab_size: int = VOCAB) -> torch.Tensor:
    """(N, V)"""
    keys = row_keys(torch.as_tensor(seeds), torch.as_tensor(positions))
    return exponential_noise(keys, token_offsets(vocab_size, "cpu"))


def test_a_stream_is_splitmix64():
    # the reference implementation's first outputs for the state 1234567
    bits = mix64(torch.tensor([1234567]).unsqueeze(-1) + token_offsets(3, "cpu"))[0].tolist()
    assert [b % 2**64 for b in bits] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_neighbouring_seeds_and_positions_have_streams_of_their_own():
    seeds, positions = torch.arange(300).repeat_interleave(300), torch.arange(300).repeat(300)
    assert len(row_keys(seeds, positions).unique()) == 300 * 300


def ks_distance(sample: torch.Tensor) -> float:
    """sqrt(n) times the largest distance of the sample's distribution from Exponential(1); above 1.95 with p = 0.001"""
    uniform = (1 - torch.exp(-sample.double().flatten().sort().values)).numpy()
    steps = np.arange(len(uniform) + 1) / len(uniform)
    return math.sqrt(len(uniform)) * max((steps[1:] - uniform).max(), (uniform - steps[:-1]).max())


def test_noise_is_exponential_over_tokens_over_positions_and_over_seeds():
    assert ks_distance(noise([7], [100], 200_000)) < 1.95
    many = torch.arange(200_000)
    assert ks_distance(noise(torch.full_like(many, 7), many, 1)) < 1.95
    assert ks_distance(noise(many, torch.full_like(many, 100), 1)) < 1.95
    rows = noise(torch.arange(20), torch.zeros(20, dtype=torch.long), 150_000)
    assert 0 < rows.min() < 3e-6 and 13 < rows.max() < 17  # both tails are there


def test_noise_of_neighbouring_tokens_positions_and_seeds_is_uncorrelated():
    grid = torch.arange(256)
    by_position, by_seed = noise(torch.zeros_like(grid), grid) - 1, noise(grid, torch.zeros_like(grid)) - 1
    num = by_position.numel()
    for rows in (by_position, by_seed):
        for lag in (1, 2, 64):
            for product in (rows[:, :-lag] * rows[:, lag:], rows[:-lag] * rows[lag:]):
                # each product has mean 0 and variance 1 if its factors are independent
                assert abs(product.mean()) * math.sqrt(product.numel()) < 4, (lag, num)
    assert abs((by_position[1:] * by_seed[1:]).mean()) * math.sqrt(num - VOCAB) < 4  # (0, n) against (n, 0)


def test_tokens_are_drawn_as_often_as_the_softmax_says():
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.03, 0.015, 0.0049, 0.0001, 0.0])
    num = 200_000
    keys = row_keys(torch.arange(num) % 500, torch.arange(num) // 500)
    tokens = draw(probabilities.log().expand(num, -1), keys, token_offsets(len(probabilities), "cpu"))
    counts, expected = tokens.bincount(minlength=len(probabilities)), probabilities * num
    assert counts[-1] == 0
    chi_square = ((counts - expected)[:-1] ** 2 / expected[:-1]).sum()
    assert chi_square < 24.3  # 7 degrees of freedom: p = 0.001


def test_a_token_without_a_rival_is_drawn_whatever_the_noise():
    logits = torch.full((1000, 50), -torch.inf)
    logits[:, 17] = -3.0
    keys = row_keys(torch.arange(1000), torch.arange(1000))
    assert set(draw(logits, keys, token_offsets(50, "cpu")).tolist()) == {17}


@needs_compiler
def test_the_compiled_kernel_draws_the_same_tokens():
    offsets, keys = token_offsets(5000, "cpu"), row_keys(torch.arange(40), torch.arange(40))
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(0)) * 3
    compiled = torch.compile(draw, dynamic=True)
    for num_rows in (1, 2, 40):
        rows = slice(0, num_rows)
        assert torch.equal(compiled(logits[rows], keys[rows], offsets), draw(logits[rows], keys[rows], offsets))


@needs_compiler
def test_after_the_warm_up_the_rollout_compiles_nothing():
    compiled = compile_draw(5000, torch.device("cpu"))
    with torch.inference_mode(), torch.compiler.set_stance("fail_on_recompile"):
        for num_rows in (1, 2, 7, 40):
            keys = row_keys(torch.arange(num_rows), torch.arange(num_rows))
            compiled(torch.randn(num_rows, 5000), keys, token_offsets(5000, "cpu"))


def test_the_hook_draws_with_the_requests_seeds_and_positions_and_without_a_seed_with_torchs():
    positions = np.array([3, 9, 5], np.int32)
    runner = SimpleNamespace(sampler=SimpleNamespace(topk_topp_sampler=SimpleNamespace()))
    runner.input_batch = SimpleNamespace(num_tokens_no_spec=positions)
    asked: list[torch.Tensor] = []
    install_noise_hook(runner, lambda logits, keys, offsets: asked.append(keys))
    seeds = {0: 5, 2: 2**64 - 3, 1: 7}
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}
    runner.sampler.topk_topp_sampler.forward(torch.zeros(3, 8), generators, None, None)
    assert torch.equal(asked[0], row_keys(torch.tensor([5, 7, -3]), torch.tensor([3, 9, 5])))
    del generators[1]
    torch.manual_seed(0)
    drawn = torch.randint(2**62, (3,))
    torch.manual_seed(0)
    runner.sampler.topk_topp_sampler.forward(torch.zeros(3, 8), generators, None, None)
    assert torch.equal(asked[1], row_keys(torch.tensor([5, drawn[1], -3]), torch.tensor([3, 9, 5])))
