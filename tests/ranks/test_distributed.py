"""Real gloo ranks; every mini-batch is run on world sizes 1 and 2, and must give the same step."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.forked import in_processes
from helpers.losses import loss_of
from helpers.models import build_tiny_model
from helpers.processes import is_running
from helpers.ranks import PATIENCE_S, ROOT, mesh_of_one, run_ranks
from torch.distributed.tensor import DTensor

from arpo.batch import Row, microbatches
from arpo.config.sections import ModelConfig, OptimConfig
from arpo.engine.team import form_team
from arpo.engine.weight_sync import full_tensors
from arpo.errors import UserError
from arpo.losses import AGGREGATIONS, loss_denominator, mean_and_std, token_moments
from arpo.metrics import Metrics
from arpo.model import load_policy
from arpo.model.optim import build_optimizer, clip_grad_norm
from arpo.model.policy import accumulating
from arpo.ranks import init_ranks
from arpo.ranks.peers import current_line, nccl_backends
from arpo.ranks.random_state import seed_everything
from arpo.ranks.ranks import Timers, _log_once_per_node, make_group, make_mesh

# (prompt, response) lengths: nothing divides evenly, one row fills a micro-batch
# nearly alone. Of one row, the second of two ranks has nothing but an empty micro-batch.
MINIBATCHES = {
    "unequal": [(3, 40), (5, 9), (1, 4), (7, 13), (3, 1), (2, 30), (6, 6)],
    "one row": [(4, 20)],
    "several each": [(4, 30 + n) for n in range(9)],  # of four ranks
}
MAX_TOKENS = 44


def make_rows(lengths) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for num_prompt, num_response in lengths:
        mask = (rng.random(num_response) < 0.7).astype(np.int64)
        mask[0] = 1
        logprobs = (-6 + rng.normal(size=num_response)).astype(np.float32)
        rows.append(
            Row(
                rng.integers(0, 380, num_prompt),
                rng.integers(0, 380, num_response),
                mask,
                rollout_logprobs=logprobs,
            )
        )
    return rows


CASES = [f"{name}, {aggregation}" for name in MINIBATCHES for aggregation in AGGREGATIONS]
OF_COPIES = [f"{name}, token_mean" for name in MINIBATCHES]
"""The cases where what differs is how gradients are exchanged, whatever the loss."""


def steps(ranks, folder: str, cases: list[str], **settings) -> dict[str, dict]:
    """One optimizer step per case, each from the same start."""
    found = {}
    for case in cases:
        name, aggregation = case.split(", ")
        found[case] = step(ranks, folder, MINIBATCHES[name], aggregation, **settings)
    return found


def step(ranks, folder: str, lengths, aggregation: str, **settings) -> dict:
    cfg = ModelConfig(folder, compute_dtype="float32", recompute_every_n_layers=1, **settings)
    policy = load_policy(cfg, ranks.mesh, device=ranks.device)
    policy.head_chunk_tokens = 16
    optimizer = build_optimizer(policy, OptimConfig(lr=1e-2, weight_decay=0.1))
    micros = microbatches(make_rows(lengths), ranks.rank, ranks.world_size, MAX_TOKENS)
    values = np.random.default_rng(1).normal(size=len(lengths))
    advantages = [np.full(num_response, a) for (_, num_response), a in zip(lengths, values, strict=True)]
    [count] = ranks.all_reduce_sum(float(sum(loss_denominator(m.loss_mask, aggregation) for m in micros)))
    moments = torch.zeros(3, dtype=torch.float64)
    for micro in micros:
        with torch.no_grad():
            _, micro.old_entropies = policy(micro)
        moments += token_moments(micro.at_loss_tokens(micro.old_entropies))
    statistics = mean_and_std(torch.tensor(ranks.all_reduce_sum(*moments.tolist()), dtype=torch.float64))
    metrics, num_exchanges, num_gathered = Metrics(), 0, 0
    for micro in accumulating(policy, micros):
        logprobs, entropies = policy(micro)
        loss, loss_metrics = loss_of(
            logprobs,
            micro.rollout_logprobs,  # far from on-policy, so that the clip bites
            micro.rows_to_tensor(
                [np.full(num_response, a) for (_, num_response), a in zip(lengths, advantages, strict=True)]
            ),
            micro.loss_mask,
            entropy=entropies,
            entropy_balanced_advantage=True,
            entropy_balanced_clipping=True,
            entropy_statistics=statistics,
            aggregation=aggregation,
            denominator=count,
        )
        (loss * ranks.world_size).backward()
        num_exchanges += any(isinstance(parameter.grad, DTensor) for parameter in policy.parameters())
        num_gathered += not isinstance(policy.hf.model.layers[0].mlp.up_proj.weight, DTensor)
        metrics.sum("loss", loss.item())
        metrics.merge(loss_metrics)
    metrics.mean("grad_norm", clip_grad_norm(policy, 1e9))
    gradients = {name: p.grad.full_tensor().numpy() for name, p in policy.hf_parameters()}
    optimizer.step()
    parameters = {name: p.detach().full_tensor().numpy() for name, p in policy.hf_parameters()}
    return {
        "num_micros": len(micros),
        "num_exchanges": num_exchanges,
        "num_gathered": num_gathered,
        "num_empty": sum(not micro.row_ids for micro in micros),
        "metrics": ranks.reduce_metrics(metrics).values(),
        "gradients": gradients,
        "parameters": parameters,
    }


@pytest.fixture(scope="module")
def outcomes(tiny_model_dir):
    """world size -> [rank][mini-batch, aggregation]"""
    return {world_size: run_ranks(world_size, steps, str(tiny_model_dir), CASES) for world_size in (1, 2)}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_do_not_depend_on_the_world_size(outcomes, case):
    [alone], pair = outcomes[1], outcomes[2]
    for rank in pair:
        assert rank[case]["metrics"] == pytest.approx(alone[case]["metrics"], rel=1e-5)
        for name, gradient in alone[case]["gradients"].items():
            scale = np.abs(gradient).max()
            assert scale > 0
            np.testing.assert_allclose(rank[case]["gradients"][name], gradient, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("case", CASES)
def test_one_optimizer_step_gives_the_same_parameters_on_any_world_size(outcomes, case):
    """AdamW's first step is lr * sign(gradient) where |gradient| >> eps: what is nearly 0 may round either way."""
    [alone], pair = outcomes[1], outcomes[2]
    for name, expected in alone[case]["parameters"].items():
        for rank in pair:
            clear = np.abs(alone[case]["gradients"][name]) > 1e-6
            assert clear.mean() > 0.2, name
            ours = rank[case]["parameters"][name]
            np.testing.assert_allclose(ours[clear], expected[clear], rtol=1e-5, atol=1e-6)


def hybrid_steps(ranks, folder: str) -> tuple[list[str], dict[str, dict], dict[str, np.ndarray]]:
    """The cases on two copies of the model of two ranks each; and its weights as a weight sync gathers them."""
    ranks = replace(ranks, mesh=make_mesh("cpu", ranks.world_size, 2))
    policy = load_policy(ModelConfig(folder, compute_dtype="float32"), ranks.mesh, device=ranks.device)
    weights = full_tensors(policy.hf_parameters(), dtype=torch.float32, device=ranks.device)
    names = [f"{name} of {size}" for name, size in zip(ranks.mesh.mesh_dim_names, ranks.mesh.shape, strict=True)]
    return names, steps(ranks, folder, OF_COPIES), {name: tensor.numpy() for name, tensor in weights}


def test_two_copies_of_two_ranks_learn_what_one_rank_learns(outcomes, tiny_model_dir):
    from safetensors.numpy import load_file

    [alone], stored = outcomes[1], load_file(tiny_model_dir / "model.safetensors")
    for names, by_case, weights in run_ranks(4, hybrid_steps, str(tiny_model_dir)):
        assert names == ["replicate of 2", "shard of 2"]
        assert all(by_case[case]["num_exchanges"] == 1 for case in OF_COPIES)
        assert any(by_case[case]["num_micros"] > 1 for case in OF_COPIES)
        assert weights.keys() == stored.keys() and all(np.array_equal(weights[n], stored[n]) for n in stored)
        for case in OF_COPIES:
            assert by_case[case]["metrics"] == pytest.approx(alone[case]["metrics"], rel=1e-5)
            for name, gradient in alone[case]["gradients"].items():
                scale = np.abs(gradient).max()
                np.testing.assert_allclose(by_case[case]["gradients"][name], gradient, rtol=1e-5, atol=1e-5 * scale)


def whole_steps(ranks, folder: str, reshards: bool) -> dict[str, dict]:
    """The cases on ranks of which each has the whole model."""
    mesh = make_mesh("cpu", ranks.world_size, 1)
    return steps(replace(ranks, mesh=mesh), folder, OF_COPIES, shard_size=1, reshard_after_forward=reshards)


@pytest.mark.parametrize("reshards", [True, False])
def test_ranks_with_the_whole_model_exchange_gradients_once_a_step_and_learn_the_same(
    outcomes, tiny_model_dir, reshards
):
    [alone] = outcomes[1]
    for by_case in run_ranks(2, whole_steps, str(tiny_model_dir), reshards):
        assert all(by_case[case]["num_exchanges"] == 1 for case in OF_COPIES)
        assert any(by_case[case]["num_micros"] > 1 for case in OF_COPIES)
        for case in OF_COPIES:  # between two micro-batches
            assert by_case[case]["num_gathered"] == (0 if reshards else by_case[case]["num_micros"] - 1)
        for case in OF_COPIES:
            assert by_case[case]["metrics"] == pytest.approx(alone[case]["metrics"], rel=1e-5)
            for name, gradient in alone[case]["gradients"].items():
                scale = np.abs(gradient).max()
                np.testing.assert_allclose(by_case[case]["gradients"][name], gradient, rtol=1e-5, atol=1e-5 * scale)


def test_ranks_that_share_a_model_reduce_each_micro_batch(outcomes):
    """Gradients of whole layers would take the memory that the sharding saves."""
    assert all(rank[case]["num_exchanges"] == rank[case]["num_micros"] for rank in outcomes[2] for case in CASES)


def limits_of_groups(ranks) -> list[float]:
    """Minutes that this rank waits in a collective of each kind of group: all, replicate, shard, neighbours, team."""
    timeout = timedelta(minutes=7)
    mesh = make_mesh("cpu", ranks.world_size, 2, timeout)
    team = form_team(replace(ranks, timeout=timeout), 2, str(build_tiny_model(Path(tempfile.mkdtemp()), weights=False)))
    groups = [dist.group.WORLD, *mesh.get_all_groups(), make_group(2, timeout), team.group]
    return [group._get_backend(torch.device("cpu")).options._timeout / timedelta(minutes=1) for group in groups]


def test_every_group_waits_as_long_as_the_run_says():
    """run_ranks says 10 minutes; torch's own limits are 30 minutes (gloo) and 10 (NCCL)."""
    assert run_ranks(4, limits_of_groups) == [[10.0, 7.0, 7.0, 7.0, 7.0]] * 4


@dataclass(frozen=True)
class PretendedGroup:
    backend: str
    device_types: tuple[str, ...]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self.device_types]

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=lambda: self.backend, group=self)


def test_of_all_groups_those_that_run_on_the_gpu_are_asked_whether_they_have_failed(monkeypatch):
    """Real gloo groups, and pretended ones of a GPU."""
    on_gpu, team = PretendedGroup("nccl", ("cpu", "cuda")), PretendedGroup("gloo", ("cpu", "cuda"))
    with mesh_of_one():
        assert nccl_backends() == []
        for group in (on_gpu, team, PretendedGroup("gloo", ("cpu",))):
            monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, None)
        assert [backend.group for backend in nccl_backends()] == [on_gpu]
        monkeypatch.undo()


def test_a_frame_that_ended_while_it_was_looked_at_is_no_error():
    """CPython 3.11 may show another object in the place of its code, as it once did here."""
    ended = SimpleNamespace(f_code=object(), f_back=None, f_lineno=1)
    assert current_line(ended) == "no code of ours"
    assert current_line(SimpleNamespace(f_code=form_team.__code__, f_back=ended, f_lineno=7)) == "team.py:7 form_team"


def test_a_shard_size_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(UserError, match=r"model\.shard_size=3 does not divide the 4 ranks"):
        make_mesh("cpu", 4, 3)


def test_the_cases_are_as_uneven_as_they_claim(outcomes):
    [alone], pair = outcomes[1], outcomes[2]
    unequal, single = (f"{name}, token_mean" for name in ("unequal", "one row"))
    assert alone[unequal]["num_micros"] > pair[0][unequal]["num_micros"] == pair[1][unequal]["num_micros"] > 1
    assert pair[0][single]["num_empty"] == 0 and pair[1][single]["num_empty"] == 1


def helpers(ranks) -> dict:
    metrics = Metrics()
    metrics.mean("mean", 1.0 + ranks.rank, weight=1 + 2 * ranks.rank)
    metrics.sum("sum", 10.0 + ranks.rank)
    metrics.max("max", -3.0 - ranks.rank)
    if ranks.rank == 1:
        metrics.mean("only rank 1", 7.0)
    seed_everything(5 + ranks.rank)

    def make(fails_on: int) -> int:
        if ranks.rank == fails_on:
            raise UserError(f"no service on rank {ranks.rank}")
        return 10 + ranks.rank

    with pytest.raises(UserError) as failure:
        ranks.call_together(lambda: make(fails_on=1))
    return {
        "made": ranks.call_together(lambda: make(fails_on=-1)),
        "problem": str(failure.value),
        "sum": ranks.all_reduce_sum(0.1, ranks.rank, 2.0**53),
        "objects": ranks.all_gather_objects({"rank": ranks.rank, "text": "é" * ranks.rank}),
        "metrics": ranks.reduce_metrics(metrics).values(),
        "is_main": ranks.is_main,
        "mesh": (ranks.mesh.size(), ranks.mesh.mesh_dim_names),
        "draws": (float(torch.rand(())), float(np.random.random())),
    }


@pytest.fixture(scope="module")
def helped():
    return run_ranks(3, helpers)


def test_sums_are_in_float64_and_equal_on_every_rank(helped):
    assert [rank["sum"] for rank in helped] == [[pytest.approx(0.3, abs=1e-15), 3.0, 3 * 2.0**53]] * 3


def test_every_rank_sees_all_objects_in_rank_order(helped):
    expected = [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}, {"rank": 2, "text": "éé"}]
    assert [rank["objects"] for rank in helped] == [expected] * 3


def test_what_one_rank_cannot_make_is_the_same_error_on_all(helped):
    assert [rank["problem"] for rank in helped] == ["no service on rank 1"] * 3
    assert [rank["made"] for rank in helped] == [10, 11, 12]


def test_metrics_of_all_ranks_are_merged_by_their_declared_reduction(helped):
    expected = {"mean": (1 * 1 + 2 * 3 + 3 * 5) / 9, "sum": 33.0, "max": -3.0, "only rank 1": 7.0}
    assert all(rank["metrics"] == pytest.approx(expected) for rank in helped)


def test_one_rank_is_main_and_the_mesh_has_all(helped):
    assert [rank["is_main"] for rank in helped] == [True, False, False]
    assert all(rank["mesh"] == (3, ("dp",)) for rank in helped)


def test_seeds_differ_between_ranks_and_repeat(helped):
    draws = [rank["draws"] for rank in helped]
    assert len(set(draws)) == 3
    seed_everything(6)
    assert draws[1] == (float(torch.rand(())), float(np.random.random()))


WORKER = """
import os, pathlib, sys, time
from arpo.ranks import init_ranks
ranks = init_ranks()
pathlib.Path(sys.argv[1], str(ranks.rank)).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.slow
def test_workers_die_with_their_launcher(tmp_path):
    """torchrun itself leaves its workers behind when it is killed, and those keep the GPUs."""
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen([*command, tmp_path / "worker.py", tmp_path], env=environment)
    pids = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(path.exists() and path.read_text() for path in pids))
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not any(is_running(int(path.read_text())) for path in pids))


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_timers_add_up_by_name(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("arpo.ranks.ranks.time.perf_counter", lambda: now_s)
    timers = Timers()
    for _ in range(2):
        with timers("a"):
            now_s += 2.0
    with timers("b"):
        now_s += 1.0
    now_s += 0.5
    assert timers.seconds(prefix="time/") == {"time/a": 4.0, "time/b": 1.0, "time/step": 5.5, "time/idle": 0.5}


PHASES = ("rollout", "reward", "exchange", "update")


def times_of_a_step(ranks) -> tuple[dict[str, float], dict[str, float]]:
    """This rank's seconds by its own clock, and what `step_times` makes of all ranks'."""
    timers = Timers()
    for phase in PHASES:
        with timers(phase):
            time.sleep(0.01 * (1 + ranks.rank))
    own = timers.seconds()
    return {phase: own[phase] for phase in PHASES}, ranks.step_times(timers)


def test_the_wait_for_the_slowest_rank_is_the_same_number_everywhere():
    """It comes from the phases in which ranks work on their own, however long the machine took for them."""
    (own, times), (others_own, others_times) = run_ranks(2, times_of_a_step)
    assert times == others_times
    for phase in PHASES:
        assert times[f"time/{phase}"] == pytest.approx((own[phase] + others_own[phase]) / 2)
    alone, others_alone = (seconds["rollout"] + seconds["reward"] for seconds in (own, others_own))
    assert times["time/rank_wait"] == pytest.approx(abs(alone - others_alone) / 2)
    assert sum(times[f"time/{phase}"] for phase in (*PHASES, "idle")) == pytest.approx(times["time/step"])


def init_again(_) -> bool:
    init_ranks().close()
    return dist.is_initialized()


def test_a_process_group_that_was_there_before_is_left_alone():
    assert run_ranks(1, init_again) == [True]


@pytest.mark.parametrize(
    ("rank", "local_rank", "said"),
    [(0, 0, ["note", "warning"]), (1, 1, []), (8, 0, [f"{os.uname().nodename}: warning"])],
)
def test_notes_come_from_rank_0_and_warnings_from_every_node(rank, local_rank, said, capfd):
    def speak(_: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        _log_once_per_node()
        log = logging.getLogger("arpo.tools")
        log.info("note")
        log.warning("warning")

    in_processes(speak)
    assert capfd.readouterr().out.splitlines() == said
