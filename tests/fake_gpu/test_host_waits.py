"""How often the host waits for a (pretended) GPU: a few times for an update, however many micro-batches it has.

While the host waits it queues nothing, and the GPU runs dry. One wait is the pretended device's own: torch asks C++ on
which device the gradients are that it clips, and takes the norm there; to C++ they are on the CPU.
"""

import itertools
from collections import Counter

import pytest
import torch
from fake_gpu.fake_cuda import CUDA, ROOT, fake_cuda
from fake_gpu.trainer_step import TrainerStep, tiny_policy
from helpers.models import random_rows
from helpers.ranks import mesh_of_one
from helpers.updates import CASES

import train_sft
from arpo.config.sections import OptimConfig
from arpo.metrics import Metrics
from arpo.model.head import sampled_and_entropy
from arpo.model.optim import build_optimizer
from arpo.ranks import Ranks

FAST = {("everything in the loss", "tree"), ("gae", "packed")}
COMBINATIONS = {*FAST, *zip(CASES, itertools.cycle(["packed", "tree"]), strict=False)}
"""A loss does not see the layout of its rows."""


@pytest.fixture(scope="module", autouse=True)
def process_group():
    with mesh_of_one():
        yield


@pytest.fixture(scope="module")
def trainer(process_group, tiny_model_dir):
    """The trainer's step on the pretended GPU, and the stalls that it counts."""
    with fake_cuda() as stalls:
        yield TrainerStep(tiny_model_dir), stalls


def waits_of(trainer, case: str, layout: str, max_tokens: int) -> tuple[int, Counter[str]]:
    """Of a whole step with two updates: number of micro-batches, waits by line."""
    step, stalls = trainer
    stages, [minibatch], _ = step.run(stalls, *CASES[case], layout=layout, max_tokens=max_tokens)
    m = len(minibatch.micros)
    for name, stage in stages.items():
        assert stage.waits.total() <= 2 * m + 10, (name, stage.waits)
        assert not stage.uploads, (name, stage.uploads)
    assert not stages["collate"].waits
    return m, sum((stage.waits for stage in stages.values()), Counter())


@pytest.mark.parametrize(
    "case, layout",
    [pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow) for pair in sorted(COMBINATIONS)],
)
def test_an_update_waits_a_few_times_and_not_for_each_micro_batch(trainer, case, layout):
    few, waits = waits_of(trainer, case, layout, 500)
    many, more_waits = waits_of(trainer, case, layout, 40)
    assert few == 1 < many and waits.total() > 3  # else nothing would be counted
    # `mean_over_turns` asks how many turns there are, once for each micro-batch and update
    for_each = [line for line in more_waits - waits if "mean_over_turns" not in line]
    assert not for_each, "the host waits for each micro-batch at these lines"


def test_supervised_training_waits_for_the_gradient_norm_only(tiny_model_dir):
    with fake_cuda(ROOT / "train_sft.py") as stalls:
        policy, ranks = tiny_policy(tiny_model_dir), Ranks(0, 1, CUDA, None)
        optimizer = build_optimizer(policy, OptimConfig())
        rows = random_rows()
        micros = train_sft.local_microbatches(rows, 24, ranks)
        assert len(micros) > 1 and not stalls.uploads
        num_loss_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        metrics = train_sft.update_policy(
            policy, optimizer, micros, num_loss_tokens=num_loss_tokens, max_grad_norm=1.0, ranks=ranks
        )
        lines = [line for line in stalls.waits if "update_policy" in line]
        assert stalls.waits.total() == 2 and lines == list(stalls.waits), stalls.waits
        stalls.clear()
        validation = train_sft.validation_nll(policy, rows, 24, ranks)
        assert stalls.waits.total() == 1, stalls.waits
    assert metrics["loss/nll"] > 0 and validation > 0


def test_the_samplers_hook_leaves_its_numbers_on_the_gpu():
    """vLLM reads them with the sampled tokens; the engine's own part of a step waits for nothing."""
    with fake_cuda() as stalls:
        logprobs = torch.randn(4, 50, device=CUDA).log_softmax(-1)
        ids = torch.tensor([3, 1, 4, 1], device=CUDA)
        stalls.clear()
        for temperature in (1.0, 0.6, 0.0):
            assert sampled_and_entropy(logprobs, ids, 3, temperature).is_cuda
        assert not stalls.waits and not stalls.uploads


def test_metrics_of_a_gpu_are_read_once_and_are_those_of_the_cpu():
    def filled(device) -> Metrics:
        one, two = Metrics(), Metrics()
        for metrics, values in ((one, [0.1, 2.5, -1.0]), (two, [3.0, 0.7])):
            for weight, value in enumerate(values):
                number = torch.tensor(value, device=device)
                metrics.mean("mean", number, torch.tensor(weight, device=device))
                metrics.mean("mean", 0.25, weight)
                metrics.sum("sum", number)
                metrics.max("max", number)
                metrics.max("max", 0.2)
                metrics.sum("nothing", number, weight=torch.zeros((), device=device))
        one.merge(two, prefix="")
        return one

    with fake_cuda() as stalls:
        metrics = filled(CUDA)
        stalls.waits.clear()
        values = metrics.values()
        assert metrics.values() == values and stalls.waits.total() == 1
    assert values == filled("cpu").values() and set(values) == {"mean", "sum", "max"}
