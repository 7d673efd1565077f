"""Two nodes with a rank each: what happens when one is gone, and that a run continues as if nothing had been."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from nodes import two_nodes

HANG_S = 300

# argv: folder, seconds until a collective gives up, seconds of silence, what rank 1 does when told to
WORKER = """
import os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
from arpo import distributed

folder, wait_s, silence_s, mood = pathlib.Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
rank, attempt = os.environ["RANK"], len(list(folder.glob(f"started{os.environ['RANK']}*")))
(folder / f"started{rank}.{attempt}").write_text(str(os.getpid()))
if mood == "rank 0 is late" and rank == "0":
    time.sleep(5)
ranks = distributed.init(wait_s / 60, silence_s)
(folder / f"joined{rank}.{attempt}").write_text(str(os.getpid()))

def rest():
    time.sleep(600)

for step in range(600 if attempt == 0 else 3):
    ranks.all_reduce_sum(1.0)
    if mood == "rank 1 rests" and rank == "1" and step == 3:
        rest()
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
    processes: list[subprocess.Popen] = []

    def start(wait_s: float, silence_s: float, mood: str = "", max_restarts: int = 0) -> list[subprocess.Popen]:
        arguments = (str(tmp_path), str(wait_s), str(silence_s), mood)
        processes.extend(cluster.launch(tmp_path / "worker.py", *arguments, max_restarts=max_restarts))
        wait_until(lambda: all((tmp_path / f"joined{rank}.0").exists() for rank in (0, 1)), processes)
        return processes

    yield start
    for process in processes:
        end(process)


def end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def wait_until(condition, processes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        ended = [p for p in processes if p.poll() is not None]
        assert not ended, ended[0].communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pid_of(folder: Path, rank: int, attempt: int = 0) -> int:
    return int((folder / f"joined{rank}.{attempt}").read_text())


def lines_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("error")]


@pytest.mark.slow
def test_a_killed_peer_is_named_in_one_line_and_ends_the_run(work, tmp_path):
    here, _ = work(wait_s=600, silence_s=600)
    os.kill(pid := pid_of(tmp_path, 1), signal.SIGKILL)
    output, _ = here.communicate(timeout=HANG_S)
    [line] = lines_of(output)
    assert here.returncode != 0 and 'Traceback (most recent call last):\n  File "' + str(tmp_path) not in output
    assert re.match(rf"error \(rank 0\): rank 1 \(host \S+, pid {pid}, in (worker|distributed).py:\d+ \S+\)", line), (
        line
    )
    assert "is gone" in line and "run.silence_timeout_s=600, run.peer_timeout_minutes=10" in line, line


@pytest.mark.slow
def test_a_frozen_peer_ends_the_run_after_the_silence_and_not_after_the_long_timeout(work, tmp_path):
    here, _ = work(wait_s=3600, silence_s=4)
    os.kill(pid := pid_of(tmp_path, 1), signal.SIGSTOP)
    started = time.monotonic()
    output, _ = here.communicate(timeout=HANG_S)
    os.kill(pid, signal.SIGCONT)
    [line] = lines_of(output)
    assert line.startswith("error (rank 0): rank 1 (") and "no sign of life for 4 s" in line, line
    assert "run.silence_timeout_s=4" in line and time.monotonic() - started < 200


@pytest.mark.slow
def test_a_peer_that_does_not_come_is_told_by_where_it_stands(work):
    here, there = work(wait_s=8, silence_s=600, mood="rank 1 rests")
    output = here.communicate(timeout=HANG_S)[0] + there.communicate(timeout=HANG_S)[0]
    line = lines_of(output)[0]
    assert "did not meet" in line and "all are alive" in line and "run.peer_timeout_minutes=0.133" in line, line
    assert re.search(r"rank 0 \(.*in distributed.py:\d+ all_reduce_sum\); rank 1 \(.*in worker.py:\d+ rest\)", line)


@pytest.mark.slow
def test_a_cut_cable_ends_both_sides(work, cluster):
    """No connection breaks then: packets just go nowhere."""
    if not cluster.in_namespaces:
        pytest.skip("needs network namespaces, which need root")
    here, there = work(wait_s=3600, silence_s=5)
    cluster.nodes[1].cut_off()
    try:
        [line] = lines_of(here.communicate(timeout=HANG_S)[0])
        assert line.startswith("error (rank 0): rank 1 (") and "no sign of life for 5 s" in line, line
        there.communicate(timeout=HANG_S)
        assert there.returncode != 0
    finally:
        subprocess.run([*cluster.nodes[1].prefix, "ip", "link", "set", cluster.nodes[1].interface, "up"], check=True)


@pytest.mark.slow
def test_restarted_ranks_meet_though_one_of_them_is_seconds_late(work, tmp_path):
    """torchrun's store still holds the addresses of the first attempt; rank 1 must not take them for rank 0's."""
    processes = work(wait_s=600, silence_s=600, mood="rank 0 is late", max_restarts=2)
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    for process in processes:
        output, _ = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, output[-3000:]
    assert all((tmp_path / f"done{rank}").exists() for rank in (0, 1))
    assert not list(tmp_path.glob("started*.2")), "more than one restart"
