"""Two nodes with a rank each: what happens when one is gone, and that a run continues as if nothing had been."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from helpers.files import read_jsonl
from helpers.models import searching_model
from helpers.nodes import two_nodes
from helpers.processes import is_running
from helpers.redis_server import redis_server
from helpers.torchrun import ForkedTorchrun
from helpers.toy_run import CONFIG, build_toy_world

from arpo.log import read_metrics

HANG_S = 300

# argv: folder, seconds until a collective gives up, seconds of silence, what rank 1 does when told to
WORKER = """
import ctypes, os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from arpo.ranks import init_ranks, peers

folder, wait_s, silence_s, mood = pathlib.Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
rank, attempt = os.environ["RANK"], len(list(folder.glob(f"started{os.environ['RANK']}*")))
(folder / f"started{rank}.{attempt}").write_text(str(os.getpid()))
if mood == "rank 0 is late" and rank == "0":
    time.sleep(5)
ranks = init_ranks(wait_s / 60, silence_s)
(folder / f"joined{rank}.{attempt}").write_text(str(os.getpid()))

def rest():
    time.sleep(3)  # long enough for a sign
    (folder / "rests").touch()
    time.sleep(600)

def pull():
    # rank 0 has sampled its prompt, and cannot know whether another one is needed until rank 1 has sampled the second
    from arpo.engine.team import Team
    from arpo.growing import GroupState
    from arpo.options import BranchingConfig, RolloutConfig
    from arpo.sampling.sampler import Sampler
    from arpo.sampling.sources import Refilled
    from arpo.trajectory import Prompt, Trajectory

    class Idle:
        num_running = 0

    cfg, none = RolloutConfig(group_size=1, dispatch="pull"), BranchingConfig("none")
    sampler = Sampler(
        engine=Idle(), tools=None, codec=None, team=Team(ranks), log=None, seed=0, rollout=cfg, branching=none,
        max_num_seqs=8, score=lambda groups: None,
    )  # fmt: skip
    queue = Refilled(sampler, [Prompt(f"p{i}", [], [""]) for i in range(9)], "q", num_wanted=2)
    place = queue.take()
    queue.started[f"p{place}"] = place
    (folder / f"pulled{rank}").touch()
    if rank == "1":
        time.sleep(600)
    while not (folder / "pulled1").exists():  # else rank 0 would have the second prompt, too
        time.sleep(0.02)
    mine = GroupState(queue.prompts[place], 1, budget=None)
    mine.trajectories[0,] = Trajectory(mine.prompt.prompt_id, "0", [1], [1], [0.0], reward=1.0)
    queue.on_finished(mine)
    while queue.take() is None:
        queue.idle(has_calls=False)

class PretendedNccl:
    # what the watch asks: a peer that is gone breaks connections, one that does not come uses up the time
    def __init__(self):
        self.since, self.peer = time.monotonic(), int(next(folder.glob("joined1.*")).read_text())

    def get_error(self):
        if not pathlib.Path(f"/proc/{self.peer}").exists():
            return ErrorType.COMM_ERROR if "breaks" in mood else ErrorType.SUCCESS
        return ErrorType.TIMEOUT if time.monotonic() - self.since > wait_s else ErrorType.SUCCESS

def wait_in_c():
    # as the main thread waits for the GPU: in C, without the interpreter's lock, and without an exception
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0" and peers.nccl_backends() == []
    nccl = PretendedNccl()
    peers.nccl_backends = lambda: [nccl]
    ctypes.CDLL(None).sleep(600)

if mood == "they pull":
    pull()
for step in range(600 if attempt == 0 else 3):
    ranks.all_reduce_sum(1.0)
    if "rank 1 rests" in mood and rank == "1" and step == 3:
        rest()
    if "on NCCL" in mood and rank == "0" and step == 3:
        wait_in_c()
    time.sleep(0.2)
(folder / f"done{rank}").write_text("")
ranks.close()
"""


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture
def work(tmp_path, cluster):
    """start(wait_s, silence_s, mood) -> the two nodes' torchruns, once both ranks have met."""
    (tmp_path / "worker.py").write_text(WORKER)
    processes: list[ForkedTorchrun] = []

    def start(wait_s: float, silence_s: float, mood: str = "", max_restarts: int = 0) -> list[ForkedTorchrun]:
        arguments = (str(tmp_path), str(wait_s), str(silence_s), mood)
        processes.extend(cluster.launch(tmp_path / "worker.py", *arguments, max_restarts=max_restarts))
        wait_until(lambda: all((tmp_path / f"joined{rank}.0").exists() for rank in (0, 1)), processes)
        return processes

    yield start
    for process in processes:
        process.kill()
        process.close()


def wait_until(condition, processes: list[ForkedTorchrun]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        ended = [p for p in processes if p.poll() is not None]
        assert not ended, ended[0].communicate(HANG_S)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pid_of(folder: Path, rank: int, attempt: int = 0) -> int:
    return int((folder / f"joined{rank}.{attempt}").read_text())


def lines_of(output: str) -> list[str]:
    """Its errors, each once: what a rank said last comes again after torchrun's own report."""
    return list(dict.fromkeys(line for line in output.splitlines() if line.startswith("error")))


@pytest.mark.slow
def test_a_killed_peer_is_named_in_one_line_and_ends_the_run(work, tmp_path):
    here, _ = work(wait_s=600, silence_s=600)
    os.kill(pid := pid_of(tmp_path, 1), signal.SIGKILL)
    output = here.communicate(HANG_S)
    [line] = lines_of(output)
    assert here.returncode != 0 and 'Traceback (most recent call last):\n  File "' + str(tmp_path) not in output
    assert output.splitlines()[-1] == line
    assert re.match(rf"error \(rank 0\): rank 1 \(host \S+, pid {pid}, in (worker|ranks).py:\d+ \S+\)", line), line
    assert "is gone" in line and "run.silence_timeout_s=600, run.peer_timeout_minutes=10" in line, line


@pytest.mark.slow
def test_a_frozen_peer_ends_the_run_after_the_silence_and_not_after_the_long_timeout(work, tmp_path):
    here, _ = work(wait_s=3600, silence_s=4)
    os.kill(pid := pid_of(tmp_path, 1), signal.SIGSTOP)
    started = time.monotonic()
    output = here.communicate(HANG_S)
    os.kill(pid, signal.SIGCONT)
    [line] = lines_of(output)
    assert line.startswith("error (rank 0): rank 1 (") and "no sign of life for 4 s" in line, line
    assert "run.silence_timeout_s=4" in line and time.monotonic() - started < 200


@pytest.mark.slow
def test_a_rank_that_waits_at_the_queue_for_one_that_is_gone_ends_with_one_line(work, tmp_path):
    """No connection breaks there: it is the silence that tells."""
    processes = work(wait_s=3600, silence_s=4, mood="they pull")
    wait_until(lambda: all((tmp_path / f"pulled{rank}").exists() for rank in (0, 1)), processes)
    time.sleep(5)  # long enough for a sign, also on a busy machine
    os.kill(pid := pid_of(tmp_path, 1), signal.SIGKILL)
    output = processes[0].communicate(HANG_S)
    [line] = lines_of(output)
    assert re.match(rf"error \(rank 0\): rank 1 \(host \S+, pid {pid}, in worker.py:\d+ pull\): no sign of life", line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mood, said, waits_in",
    [
        ("rank 1 rests", "did not meet", r"ranks.py:\d+ all_reduce_sum"),
        ("on NCCL, rank 1 rests", "did not meet (NCCL: TIMEOUT)", r"worker.py:\d+ wait_in_c"),  # a pretended NCCL
    ],
)
def test_a_peer_that_does_not_come_is_told_by_where_it_stands(work, mood, said, waits_in):
    here, there = work(wait_s=8, silence_s=600, mood=mood)
    output = here.communicate(HANG_S) + there.communicate(HANG_S)
    line = lines_of(output)[0]
    assert said in line and "all are alive" in line and "run.peer_timeout_minutes=0.133" in line, line
    assert re.search(rf"rank 0 \(.*in {waits_in}\); rank 1 \(.*in worker.py:\d+ rest\)", line), line


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [True, False])
def test_a_peer_that_dies_is_named_while_the_others_wait_for_the_gpu(work, tmp_path, breaks):
    """On a pretended NCCL, which raises nothing. Where it sees no connection break, the silence tells."""
    silence_s = 600 if breaks else 4
    here, _ = work(wait_s=600, silence_s=silence_s, mood="on NCCL, rank 1 rests" + ", breaks" * breaks)
    wait_until(lambda: (tmp_path / "rests").exists(), [here])
    os.kill(pid := pid_of(tmp_path, 1), signal.SIGKILL)
    started = time.monotonic()
    [line] = lines_of(here.communicate(HANG_S))
    found = re.match(rf"error \(rank 0\): rank 1 \(host \S+, pid {pid}, in worker.py:\d+ rest\)(.*); limits", line)
    assert found and found[1] == (" is gone (NCCL: COMM_ERROR)" if breaks else ": no sign of life for 4 s"), line
    assert here.returncode != 0 and time.monotonic() - started < 200


@pytest.mark.slow
def test_a_cut_cable_ends_both_sides(work, cluster, tmp_path):
    """No connection breaks then: packets just go nowhere."""
    if not cluster.in_namespaces:
        pytest.skip("needs network namespaces, which need root")
    here, there = work(wait_s=3600, silence_s=5)
    pid = pid_of(tmp_path, 1)
    cluster.nodes[1].cut_off()
    try:
        [line] = lines_of(here.communicate(HANG_S))
        assert line.startswith("error (rank 0): rank 1 (") and "no sign of life for 5 s" in line, line
        # torchrun itself may hang there, in its own store (Slurm ends it); the rank, which holds the GPU, must not.
        wait_until(lambda: not is_running(pid), [there])
        there.kill()
        [line] = lines_of(there.communicate(HANG_S))
        assert line.startswith("error (rank 1): the store on the first node (") and "not answered for 5 s" in line, line
    finally:
        cluster.nodes[1].joined_again()


@pytest.mark.slow
def test_restarted_ranks_meet_though_one_of_them_is_seconds_late(work, tmp_path):
    """torchrun's store still holds the addresses of the first attempt; rank 1 must not take them for rank 0's."""
    processes = work(wait_s=600, silence_s=600, mood="rank 0 is late", max_restarts=2)
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    for process in processes:
        output = process.communicate(HANG_S)
        assert process.returncode == 0, output[-3000:]
    assert all((tmp_path / f"done{rank}").exists() for rank in (0, 1))
    assert not list(tmp_path.glob("started*.2")), "more than one restart"


# ------------------------------------------------------------------------------------------------ a real training run


@pytest.fixture(scope="module")
def shared_redis(cluster, tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis"), address=cluster.head) as server:
        yield server


@pytest.fixture(scope="module")
def world(cluster, shared_redis, tmp_path_factory) -> Path:
    config = CONFIG.replace("mode: live}", f"mode: record, cache: '{shared_redis.cache}'}}")
    assert config != CONFIG
    folder = build_toy_world(tmp_path_factory.mktemp("world"), config)
    searching_model(folder / "model")
    return folder


def train(cluster, world: Path, name: str, **kwargs) -> list[ForkedTorchrun]:
    flags = ["--run.name", name, "--run.num_steps", "4", "--run.save_every", "2"]
    flags += ["--run.dump_every", "1", "--optim.lr", "1e-3"]  # at 1e-2 the policy is certain of all after three steps
    return cluster.launch("train_rl.py", str(world / "config.yaml"), "--data.valid", "", *flags, **kwargs)


def finish(processes: list[ForkedTorchrun]) -> list[str]:
    outputs = [process.communicate(3 * HANG_S) for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(output[-3000:] for output in outputs)
    return outputs


@pytest.fixture(scope="module")
def trained(cluster, world) -> Path:
    finish(train(cluster, world, "whole"))
    return world / "runs" / "whole"


@pytest.mark.slow
def test_two_nodes_train_with_one_copy_of_the_model_each(trained):
    """A rank per node: hybrid sharding makes two copies. They must stay one model, which the next rollouts show."""
    rows = read_metrics(trained)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["mismatch/abs"] < 1e-4 and row["optim/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_both_nodes_write_their_searches_to_one_redis(trained, shared_redis):
    import redis

    asked: dict[int, set[str]] = {0: set(), 1: set()}
    for file in sorted((trained / "trajectories").glob("step_*.jsonl.gz")):
        for number, record in enumerate(read_jsonl(file)):
            for turn in record["turns"]:
                for call in turn["tool_calls"]:
                    if call["tag"] == "search" and call["ok"]:
                        asked[number // 8 % 2].add(call["argument"].strip())
    kept = redis.Redis(host=shared_redis.address, port=shared_redis.port).dbsize()
    assert asked[0] - asked[1] and asked[1] - asked[0] and kept >= len(asked[0] | asked[1]) > 4


@pytest.mark.slow
def test_after_a_kill_on_the_other_node_torchrun_continues_with_the_same_numbers(cluster, world, trained):
    """Both nodes come back; steps 3 and 4, from the checkpoint of step 2, equal those of the undisturbed run."""
    processes = train(cluster, world, "killed", max_restarts=1)
    metrics = world / "runs" / "killed" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"step": 3' in metrics.read_text(), processes)
    [rank_1] = processes[1].workers()
    os.kill(rank_1, signal.SIGKILL)
    here, _ = finish(processes)
    assert "from step 0" in here and "from step 2" in here
    names = ("reward/mean", "optim/grad_norm", "loss/policy", "loss/entropy", "response/tokens")
    whole, resumed = read_metrics(trained), read_metrics(world / "runs" / "killed")
    assert [row["step"] for row in resumed] == [1, 2, 3, 4]
    for a, b in zip(whole, resumed, strict=True):
        assert {name: a[name] for name in names} == {name: b[name] for name in names}, a["step"]
