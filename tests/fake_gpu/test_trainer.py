"""The trainer on a pretended CUDA device: no tensor stays behind on the CPU, and the numbers are the CPU's.

Without FSDP2, which needs a real device. What a GPU computes is for tests/test_gpu.py.
"""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
from fake_gpu.fake_cuda import CUDA, fake_cuda, to_fake_cuda
from fake_gpu.flash_kernels import flash_kernels
from fake_gpu.trainer_step import load_hf
from helpers.models import build_tiny_model
from helpers.ranks import mesh_of_one, ranks_of
from helpers.updates import CASES, filled

from arpo.config.sections import OptimConfig
from arpo.model.attention import BY_ROW
from arpo.model.critic import Critic, TrainedCritic, fill_values
from arpo.model.optim import build_optimizer
from arpo.model.policy import Policy
from arpo.ranks import Ranks
from arpo.update import update_policy

CPU = torch.device("cpu")
LAYOUTS = ("packed", "tree")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
FAST = [("everything in the loss", "tree", "varlen"), ("ppo, token_mean", "packed", "flash_attention_2")]
KERNELS = list(itertools.product(LAYOUTS, BY_ROW))
ONE_KERNEL_EACH = [(case, *kernel) for case, kernel in zip(CASES, itertools.cycle(KERNELS), strict=False)]
"""A loss does not see which kernel its logprobs are from: it is computed with one, and the fast ones with all."""
WITH_EVERY_KERNEL = [(case, *kernel) for case, *_ in FAST for kernel in KERNELS]


def some_slow(cases, fast=()):
    """Parameters, each once; those not in `fast` are slow."""
    return [pytest.param(*c, marks=() if c in fast else pytest.mark.slow) for c in dict.fromkeys(cases)]


@pytest.fixture(scope="module")
def folders(tiny_model_dir, tmp_path_factory):
    """The policy, and another model: the reference."""
    return tiny_model_dir, build_tiny_model(tmp_path_factory.mktemp("other"), seed=5)


@pytest.fixture(scope="module")
def ranks():
    with mesh_of_one() as mesh:
        yield ranks_of(mesh)


@contextlib.contextmanager
def on(device: torch.device, dtype: torch.dtype):
    """Kernels for CUDA's attention; they take float32 where its digits are compared."""
    with fake_cuda() if device == CUDA else contextlib.nullcontext(), flash_kernels(dtype):
        yield


def load(folder, device: torch.device, attention: str, dtype: torch.dtype):
    hf = load_hf(folder, attention).train()
    return to_fake_cuda(hf, dtype) if device == CUDA else hf.to(dtype)


def outcome(ranks: Ranks, folders, case: str, layout: str, attention: str, dtype: torch.dtype) -> dict[str, float]:
    """Metrics of two steps on a mini-batch; those of the second depend on all gradients of the first."""
    policy, reference = (Policy(load(folder, ranks.device, attention, dtype)) for folder in folders)
    policy.head_chunk_tokens = 16
    minibatch, metrics = filled(ranks, policy, reference, case, 40, 1, layout)
    assert all(tensor.is_cuda == (ranks.device == CUDA) for micro in minibatch.micros for tensor in tensors_of(micro))
    optimizer = build_optimizer(policy, OptimConfig(lr=1e-3))
    for step in range(2):
        found = update_policy(
            policy,
            optimizer,
            minibatch.micros,
            CASES[case][1],
            temperature=0.9,
            max_grad_norm=1.0,
            ranks=ranks,
            is_first=not step,
        )
        metrics.merge(found, prefix=f"step {step}/")
    return metrics.values()


def tensors_of(micro) -> list[torch.Tensor]:
    return [x for part in (micro, micro.paths) for x in vars(part).values() if isinstance(x, torch.Tensor)]


def compare(ranks: Ranks, folders, case: str, layout: str, attention: str, dtype: torch.dtype) -> None:
    with on(CUDA, dtype):
        ours = outcome(replace(ranks, device=CUDA), folders, case, layout, attention, dtype)
    expected = outcome(ranks, folders, case, layout, "sdpa", dtype)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name] == pytest.approx(value, rel=TOLERANCE[dtype], abs=TOLERANCE[dtype] / 10), name


@pytest.mark.parametrize("case, layout, attention", some_slow([*ONE_KERNEL_EACH, *WITH_EVERY_KERNEL], FAST))
def test_losses_and_gradients_are_the_cpus(ranks, folders, case, layout, attention):
    compare(ranks, folders, case, layout, attention, torch.float32)


@pytest.mark.parametrize("layout, attention", some_slow(KERNELS, [("tree", "varlen")]))
def test_in_bfloat16_each_kernel_gets_what_it_takes(ranks, folders, layout, attention):
    compare(ranks, folders, "ppo, token_mean", layout, attention, torch.bfloat16)


@pytest.mark.parametrize("layout, attention", some_slow(KERNELS))
def test_the_critic_learns_there_what_it_does_on_the_cpu(ranks, folders, layout, attention):
    def learn(ranks: Ranks, attention: str) -> dict[str, float]:
        policy = Policy(load(folders[0], ranks.device, attention, torch.float32))
        minibatch, metrics = filled(ranks, policy, policy, "gae", 40, 1, layout)
        critic = Critic(load(folders[1], ranks.device, attention, torch.float32).base_model)
        if ranks.device == CUDA:
            to_fake_cuda(critic.value_head)
        optim = OptimConfig(lr=1e-2)
        trained = TrainedCritic(critic, build_optimizer(critic, optim), optim, num_updates=2)
        for step in range(2):
            fill_values(critic, minibatch.micros)
            metrics.merge(trained.update(minibatch.micros, step, ranks), prefix=f"step {step}/")
        return metrics.values()

    with on(CUDA, torch.float32):
        ours = learn(replace(ranks, device=CUDA), attention)
    expected = learn(ranks, "sdpa")
    assert expected["step 1/critic/value"] != 0
    assert ours == pytest.approx(expected, rel=1e-4, abs=1e-5)
