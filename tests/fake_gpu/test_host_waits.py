"""How often the trainer makes the host wait for a (pretended) GPU: a few times for an update, however many micro-batches.

While the host waits it queues nothing, and the GPU runs dry. The engine's part is below.
"""

from collections import Counter

import pytest
import torch
from fake_gpu.fake_cuda import CUDA, ROOT, fake_cuda
from fake_gpu.trainer_step import TrainerStep, tiny_policy
from helpers.models import random_rows
from helpers.ranks import mesh_of_one
from test_update import CASES

import train_sft
from arpo.batch import microbatches
from arpo.model.head import sampled_and_entropy
from arpo.model.optim import build_optimizer
from arpo.options import OptimConfig
from arpo.ranks import Ranks
from arpo.trajectory import Metrics

FEW = ("ppo, token_mean", "everything in the loss", "gae")
OTHERS = [case for case in CASES if case not in FEW]


@pytest.fixture(scope="module")
def trainer(tiny_model_dir):
    """The trainer's step on the pretended GPU, and the stalls that it counts."""
    with mesh_of_one(), fake_cuda() as stalls:
        yield TrainerStep(tiny_model_dir), stalls


def waits_of(trainer, case: str, layout: str, max_tokens: int) -> tuple[int, Counter[str]]:
    """Of a whole step with two updates: number of micro-batches, waits by line."""
    step, stalls = trainer
    stages, [minibatch], _ = step.run(stalls, *CASES[case], layout=layout, max_tokens=max_tokens)
    m = len(minibatch.micros)
    for name, stage in stages.items():
        assert stage.waits.total() <= 2 * m + 10, (name, stage.waits)
    assert not stages["collate"].waits and (layout == "tree" or not stages["collate"].uploads)
    assert not sum((stage.uploads for name, stage in stages.items() if name != "collate"), Counter())
    return m, sum((stage.waits for stage in stages.values()), Counter())


def check(trainer, case: str, layout: str) -> None:
    few, waits = waits_of(trainer, case, layout, 80)
    many, more_waits = waits_of(trainer, case, layout, 40)
    assert many > few and waits.total() <= 2 * few + 10
    # mean_over_turns asks how many turns there are, once for each micro-batch and update
    per_micro = {line: count for line, count in (more_waits - waits).items() if "mean_over_turns" not in line}
    assert not per_micro, "the host waits for each micro-batch at these lines"


@pytest.mark.parametrize("layout", ["packed", "tree"])
@pytest.mark.parametrize("case", FEW)
def test_a_step_waits_a_few_times_and_not_for_each_micro_batch(trainer, case, layout):
    check(trainer, case, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["packed", "tree"])
@pytest.mark.parametrize("case", OTHERS)
def test_so_does_every_other_algorithm(trainer, case, layout):
    check(trainer, case, layout)


def test_supervised_training_waits_for_the_gradient_norm_only(tiny_model_dir):
    with mesh_of_one(), fake_cuda(ROOT / "train_sft.py") as stalls:
        policy, ranks = tiny_policy(tiny_model_dir), Ranks(0, 1, CUDA, None)
        optimizer = build_optimizer(policy, OptimConfig())
        rows = random_rows()
        micros = train_sft.share(rows, 24, ranks)
        assert len(micros) > 1 and not stalls.uploads
        num_loss_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        metrics = train_sft.update_policy(policy, optimizer, micros, num_loss_tokens, 1.0, ranks)
        assert all("clip_grad_norm" in line for line in stalls.waits) and stalls.waits.total() <= 2, stalls.waits
        stalls.clear()
        validation = train_sft.validation_nll(policy, rows, 24, ranks)
        assert stalls.waits.total() == 1, stalls.waits
    assert metrics["loss/nll"] > 0 and validation > 0
