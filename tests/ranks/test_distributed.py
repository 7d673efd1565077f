"""Real gloo ranks: every mini-batch gives the same step on any number of them, however they share the model."""

import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.forked import in_processes
from helpers.models import assert_close_by_name, cfg_of, random_rows
from helpers.processes import is_running
from helpers.ranks import PATIENCE_S, ROOT, mesh_of_one, run_ranks
from safetensors.numpy import load_file
from torch.distributed.tensor import DTensor

from arpo.batch import microbatches
from arpo.config.sections import ModelConfig, OptimConfig
from arpo.engine.team import form_team
from arpo.engine.weight_sync import full_tensors
from arpo.errors import UserError
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
    "unequal": ((3, 40), (5, 9), (1, 4), (7, 13), (3, 1), (2, 30), (6, 6)),
    "one row": ((4, 20),),
    "several each": tuple((4, 30 + n) for n in range(9)),  # of four ranks
}
MAX_TOKENS = 44


def steps(ranks, folder: str, **settings) -> dict[str, dict]:
    """One optimizer step per mini-batch, each from the same start."""
    return {name: step(ranks, folder, lengths, **settings) for name, lengths in MINIBATCHES.items()}


def step(ranks, folder: str, lengths, **settings) -> dict:
    """The losses of arpo/losses.py: tests/test_update.py."""
    cfg = cfg_of(folder, recompute_every_n_layers=1, **settings)
    policy = load_policy(cfg, ranks.mesh, device=ranks.device)
    optimizer = build_optimizer(policy, OptimConfig(lr=1e-2, weight_decay=0.1))
    micros = microbatches(random_rows(lengths), ranks.rank, ranks.world_size, MAX_TOKENS)
    num_exchanges, num_kept, num_gathered = 0, 0, 0
    up = policy.hf.model.layers[0].mlp.up_proj
    for micro in accumulating(policy, micros):
        logprobs, entropies = policy(micro)
        weights = torch.sin(micro.targets.float())  # every token counts, each differently
        loss = (weights * logprobs + (1 - weights) * entropies).sum()
        num_kept += not isinstance(up.weight, DTensor)
        (loss * ranks.world_size).backward()
        num_exchanges += any(isinstance(parameter.grad, DTensor) for parameter in policy.parameters())
        num_gathered += not isinstance(up.weight, DTensor)
    norm = clip_grad_norm(policy, 1e9)
    gradients = {name: p.grad.full_tensor().numpy() for name, p in policy.hf_parameters()}
    optimizer.step()
    return {
        "num_micros": len(micros),
        "num_exchanges": num_exchanges,
        "num_kept": num_kept,  # layers for the backward pass
        "num_gathered": num_gathered,  # between two micro-batches
        "num_empty": sum(not micro.row_ids for micro in micros),
        "grad_norm": norm,
        "gradients": gradients,
        "parameters": {name: p.detach().full_tensor().numpy() for name, p in policy.hf_parameters()},
    }


@pytest.fixture(scope="module")
def alone(tiny_model_dir) -> dict[str, dict]:
    """The steps of one rank, by mini-batch."""
    return run_ranks(1, steps, str(tiny_model_dir))[0]


def assert_same_steps(ours: dict[str, dict], alone: dict[str, dict]) -> None:
    """The same gradients, and parameters after the step.

    AdamW's first step is lr * sign(gradient) where |gradient| >> eps: what is nearly 0 may round either way.
    """
    for case, expected in alone.items():
        assert ours[case]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert_close_by_name(ours[case]["gradients"], expected["gradients"])
        for name, gradient in expected["gradients"].items():
            clear = np.abs(gradient) > 1e-5 * np.abs(gradient).max() + 1e-6
            assert clear.mean() > 0.2, name
            of_step, expected_of_step = (found["parameters"][name][clear] for found in (ours[case], expected))
            np.testing.assert_allclose(of_step, expected_of_step, rtol=1e-5, atol=1e-6)


def test_two_ranks_take_the_step_of_one_and_reduce_each_micro_batch(alone, tiny_model_dir):
    """Gradients of whole layers would take the memory that the sharding saves."""
    pair = run_ranks(2, steps, str(tiny_model_dir))
    for by_case in pair:
        assert_same_steps(by_case, alone)
        assert all(found["num_exchanges"] == found["num_micros"] for found in by_case.values())
        assert alone["unequal"]["num_micros"] > by_case["unequal"]["num_micros"] > 1
    assert [by_case["one row"]["num_empty"] for by_case in pair] == [0, 1]


def hybrid_steps(ranks, folder: str) -> tuple[list[str], dict[str, dict], dict[str, np.ndarray]]:
    """The steps on two copies of the model of two ranks each; and its weights as a weight sync gathers them."""
    ranks = replace(ranks, mesh=make_mesh("cpu", ranks.world_size, 2))
    policy = load_policy(ModelConfig(folder, compute_dtype="float32"), ranks.mesh, device=ranks.device)
    weights = full_tensors(policy.hf_parameters(), dtype=torch.float32, device=ranks.device)
    names = [f"{name} of {size}" for name, size in zip(ranks.mesh.mesh_dim_names, ranks.mesh.shape, strict=True)]
    return names, steps(ranks, folder), {name: tensor.numpy() for name, tensor in weights}


def test_two_copies_of_two_ranks_learn_what_one_rank_learns(alone, tiny_model_dir):
    stored = load_file(tiny_model_dir / "model.safetensors")
    for names, by_case, weights in run_ranks(4, hybrid_steps, str(tiny_model_dir)):
        assert names == ["replicate of 2", "shard of 2"]
        assert weights.keys() == stored.keys() and all(np.array_equal(weights[n], stored[n]) for n in stored)
        assert_same_steps(by_case, alone)
        assert all(found["num_exchanges"] == 1 for found in by_case.values())
        assert any(found["num_micros"] > 1 for found in by_case.values())


def whole_steps(ranks, folder: str, reshards: bool) -> dict[str, dict]:
    """The steps of ranks of which each has the whole model."""
    mesh = make_mesh("cpu", ranks.world_size, 1)
    return steps(replace(ranks, mesh=mesh), folder, shard_size=1, reshard_after_forward=reshards)


@pytest.mark.parametrize("reshards", [True, False])
def test_ranks_with_the_whole_model_exchange_gradients_once_a_step_and_learn_the_same(alone, tiny_model_dir, reshards):
    for by_case in run_ranks(2, whole_steps, str(tiny_model_dir), reshards):
        assert_same_steps(by_case, alone)
        assert any(found["num_micros"] > 1 for found in by_case.values())
        for found in by_case.values():
            assert found["num_exchanges"] == 1
            assert found["num_kept"] == (0 if reshards else found["num_micros"])
            assert found["num_gathered"] == (0 if reshards else found["num_micros"] - 1)


def limits_of_groups(ranks, model_dir: str) -> list[float]:
    """Minutes that this rank waits in a collective of each kind of group: all, replicate, shard, neighbours, team."""
    timeout = timedelta(minutes=7)
    mesh = make_mesh("cpu", ranks.world_size, 2, timeout)
    team = form_team(replace(ranks, timeout=timeout), 2, model_dir)
    groups = [dist.group.WORLD, *mesh.get_all_groups(), make_group(2, timeout), team.group]
    return [group._get_backend(torch.device("cpu")).options._timeout / timedelta(minutes=1) for group in groups]


def test_every_group_waits_as_long_as_the_run_says(tiny_model_dir):
    """run_ranks says 10 minutes; torch's own limits are 30 minutes (gloo) and 10 (NCCL)."""
    assert run_ranks(4, limits_of_groups, str(tiny_model_dir)) == [[10.0, 7.0, 7.0, 7.0, 7.0]] * 4


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


def mesh_of_uneven_nodes(ranks) -> tuple[str, tuple[int, ...]]:
    """Two nodes with a rank each beside one with two: ranks 0 and 1, 2, 3."""
    os.environ["LOCAL_WORLD_SIZE"] = "2" if ranks.rank < 2 else "1"
    with pytest.raises(UserError) as refused:
        make_mesh("cpu", ranks.world_size, 0)
    return str(refused.value), make_mesh("cpu", ranks.world_size, 2).shape


def test_nodes_with_different_numbers_of_ranks_are_refused_on_all_ranks():
    """Each rank would make other groups, and wait for run.peer_timeout_minutes (huggingface/accelerate 1291)."""
    problem = (
        "the nodes have 1 and 2 ranks; start torchrun with the same --nproc_per_node on all nodes, or set "
        "model.shard_size"
    )
    assert run_ranks(4, mesh_of_uneven_nodes) == [(problem, (2, 2))] * 4


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


def test_ranks_agree_on_sums_objects_errors_and_metrics_and_differ_in_their_draws():
    """Sums are in float64."""
    objects = [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}, {"rank": 2, "text": "éé"}]
    metrics = {"mean": (1 * 1 + 2 * 3 + 3 * 5) / 9, "sum": 33.0, "max": -3.0, "only rank 1": 7.0}
    helped = run_ranks(3, helpers)
    for number, rank in enumerate(helped):
        assert rank["sum"] == [pytest.approx(0.3, abs=1e-15), 3.0, 3 * 2.0**53]
        assert rank["objects"] == objects
        assert rank["problem"] == "no service on rank 1" and rank["made"] == 10 + number
        assert rank["metrics"] == pytest.approx(metrics)
        assert rank["is_main"] == (number == 0) and rank["mesh"] == (3, ("dp",))
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
