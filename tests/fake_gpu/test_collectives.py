"""All ranks issue the same collectives in the same order with the same shapes, as NCCL asks: a step on 4 ranks.

The ranks and the collectives are real, over gloo; what vLLM's own workers say to each other is not recorded.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from fake_gpu.collectives import Call, Record, mismatch
from helpers.fakes import EchoTool
from helpers.models import cfg_of
from helpers.ranks import run_ranks
from helpers.updates import GAE, GRPO, Trainer, make_groups

from arpo.checkpoint import Checkpoints
from arpo.checkpoint.snapshot import snapshot
from arpo.config.sections import OptimConfig, UpdateConfig
from arpo.engine.team import form_team
from arpo.engine.weight_sync import full_tensors
from arpo.model import load_policy
from arpo.model.critic import TrainedCritic
from arpo.model.optim import build_optimizer
from arpo.options import AdvantageConfig, LossConfig
from arpo.ranks import Ranks, Timers
from arpo.ranks.ranks import make_group, make_mesh

CPU = torch.device("cpu")
KL_IN_LOSS = LossConfig(kl_coefficient=0.1)
KL_IN_REWARD = LossConfig(kl_coefficient=0.1, kl_in="reward")
AEPO = LossConfig(entropy_balanced_clipping=True, entropy_balanced_advantage=True)


@dataclass(frozen=True)
class Case:
    """How a step is spread over the ranks, and what it computes."""

    loss: LossConfig = KL_IN_LOSS
    advantage: AdvantageConfig = GRPO
    layout: str = "packed"
    shard_size: int = 0
    context_parallel: int = 1
    tensor_parallel: int = 1
    lora_rank: int = 0
    recompute_every_n_layers: int = 1


CASES = {
    "plain": Case(),
    "trees": Case(layout="tree", loss=AEPO),
    "HSDP": Case(shard_size=2, loss=AEPO),
    "context parallel": Case(context_parallel=2),
    "a team": Case(tensor_parallel=2, loss=KL_IN_REWARD),
    "LoRA": Case(lora_rank=4, layout="tree"),
    "critic": Case(advantage=GAE, loss=KL_IN_REWARD),
    "critic under HSDP": Case(advantage=GAE, loss=KL_IN_REWARD, shard_size=2, layout="tree"),
}


def steps_of_all_cases(ranks: Ranks, model: str, folder: str) -> dict[str, tuple[list[Call], list[int]]]:
    """Of each case: this rank's collectives, and the number of rows in each of its micro-batches."""
    outcome = {}
    for name, case in CASES.items():
        mesh = make_mesh("cpu", ranks.world_size, case.shard_size)
        group = make_group(case.context_parallel) if case.context_parallel > 1 else None
        with Record() as record:
            rows = step(replace(ranks, mesh=mesh, group=group), case, model, Path(folder) / name)
        outcome[name] = record.calls, rows
    return outcome


def step(ranks: Ranks, case: Case, model: str, run_dir: Path) -> list[int]:
    """What train_rl.py does after a rollout, in its order; two mini-batches. Returns the rows of the micro-batches."""
    cfg = cfg_of(
        model,
        lora_rank=case.lora_rank,
        context_parallel=case.context_parallel,
        recompute_every_n_layers=case.recompute_every_n_layers,
    )
    policy = load_policy(cfg, ranks.mesh, device=CPU)
    reference = load_policy(replace(cfg, lora_rank=0), ranks.mesh, device=CPU).requires_grad_(False)
    optimizer, critic = build_optimizer(policy, OptimConfig()), None
    if case.advantage.needs_critic:
        critic = TrainedCritic.load(replace(cfg, lora_rank=0), OptimConfig(), 4, ranks)
    checkpoints = Checkpoints(run_dir, ranks)
    assert checkpoints.resume(policy, optimizer, critic) == 0

    team = form_team(ranks, case.tensor_parallel, model)
    groups = (
        team.all_gather_groups(team.share(make_groups()), team.share(range(2)))
        if team.num_teams == 2
        else make_groups()
    )
    if team.size > 1:
        call_tools(team)
    update = UpdateConfig(num_prompts_per_minibatch=1, max_tokens_per_microbatch=36, layout=case.layout)
    trainer = Trainer(policy, reference, critic, optimizer, ranks)
    minibatches, metrics = trainer.train(groups, update, case.advantage, case.loss)
    for _ in full_tensors(policy.hf_parameters(), dtype=torch.bfloat16, device=CPU, bucket_bytes=100_000):
        pass  # to the engine
    ranks.step_times(Timers())
    ranks.reduce_metrics(metrics)
    checkpoints.write(1, snapshot(policy, optimizer, critic))
    return [len(micro.row_ids) for minibatch in minibatches for micro in minibatch.micros]


def call_tools(team) -> None:
    runner = team.tool_runner({"search": EchoTool("search", "the book", jitter_s=0.02)})
    for i in range(3):
        runner.start(str(i), "search", "who?")
    while runner.num_pending:
        runner.collect(block=True)
    runner.close()


@pytest.fixture(scope="module")
def outcomes(tiny_model_dir, tmp_path_factory):
    """[rank][case]"""
    return run_ranks(4, steps_of_all_cases, str(tiny_model_dir), str(tmp_path_factory.mktemp("runs")))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_ranks_issue_the_same_collectives_in_one_order(outcomes, case):
    calls = {rank: outcome[case][0] for rank, outcome in enumerate(outcomes)}
    assert mismatch(calls) == ""
    for kind in ("reduce_scatter", "allgather", "allreduce"):  # FSDP2's own are among them
        assert any(kind in call.operation.replace("_", "") or kind in call.operation for call in calls[0]), kind
    groups = {call.ranks for call in calls[0]}
    assert (0, 1, 2, 3) in groups
    if CASES[case].shard_size == 2:
        assert {(0, 1), (0, 2)} <= groups
    if CASES[case].context_parallel == 2 or CASES[case].tensor_parallel == 2:
        assert (0, 1) in groups


@pytest.mark.slow
def test_the_steps_are_uneven(outcomes):
    """Some ranks have micro-batches without rows, which must not change what they issue."""
    rows = [outcome["plain"][1] for outcome in outcomes]
    assert any(0 in own for own in rows) and not all(0 in own for own in rows)


def test_another_shape_dtype_or_operation_and_a_missing_call_are_found():
    def call(operation="allreduce_", shape=(3,), dtype="torch.float32", ranks=(0, 1, 2)):
        return Call(operation, ranks, ((shape, dtype),), ("0",), "arpo/update.py:1")

    same = [call(), call(shape=(4,))]
    assert mismatch({0: same, 1: list(same), 2: [*same, call(ranks=(2, 3))]}) == ""
    for other in (call(shape=(5,)), call(shape=(4,), dtype="torch.bfloat16"), call("broadcast_", (4,))):
        assert "collective 1 of ranks 0 and 2: rank 0 issues" in mismatch({0: same, 1: same, 2: [call(), other]})
    assert "rank 1 issues None" in mismatch({0: same, 1: same[:1], 2: same})
