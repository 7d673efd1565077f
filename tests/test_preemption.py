"""A signal that asks a training to stop: the step ends, is saved, and the run goes on later as if nothing had been.

Real ranks and real signals. A run that comes back must write the metrics of the undisturbed one, all but times.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.mounts import under_mount
from helpers.processes import is_running
from helpers.ranks import PATIENCE_S, ROOT, run_script, script_on_ranks, wait_for_all, wait_for_step
from helpers.runs import differing
from helpers.sft_world import build_sft_world
from helpers.torchrun import ForkedTorchrun, torchrun
from helpers.toy_run import build_toy_world

from arpo.checkpoint.checkpoints import verify
from arpo.log import read_metrics


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return build_sft_world(tmp_path_factory.mktemp("sft"), num_steps=40)


@pytest.fixture(scope="module")
def undisturbed(world) -> Path:
    run_script("train_sft.py", str(world / "config.yaml"), "--run.name", "whole")
    return world / "runs" / "whole"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--run.save_every", "1", "--run.async_save", "True")])
def test_a_signal_to_one_rank_ends_all_of_them_well_after_a_saved_step(world, undisturbed, flags):
    run = world / "runs" / f"signal_{len(flags)}"
    argv = (str(world / "config.yaml"), "--run.name", run.name, *flags)
    with script_on_ranks("train_sft.py", *argv) as (ranks, output):
        wait_for_step(run, 2, lambda: all(rank.is_alive() for rank in ranks))
        os.kill(ranks[1].pid, signal.SIGTERM)
        assert wait_for_all(ranks, 30) == 0, output.read_text()
        assert "asked to stop by a signal" in output.read_text()
    last = read_metrics(run)[-1]["step"]
    assert 2 <= last < 40
    newest = run / "checkpoints" / f"step_{last:06d}"
    assert verify(newest) is None and (run / "hf").resolve() == newest / "hf"
    assert f"from step {last}" in run_script("train_sft.py", *argv)
    assert differing(undisturbed, run) == []


@pytest.mark.slow
def test_torchrun_hands_sigterm_on_and_waits_for_the_save(world):
    run = world / "runs" / "agent"
    process = torchrun("train_sft.py", str(world / "config.yaml"), "--run.name", run.name)
    wait_for_step(run, 2, lambda: process.poll() is None)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert "asked to stop by a signal" in output, output[-3000:]
    last = read_metrics(run)[-1]["step"]
    assert 2 <= last < 40 and verify(run / "checkpoints" / f"step_{last:06d}") is None


@pytest.mark.slow
def test_a_killed_peer_still_ends_the_others_at_once(world):
    """Under torchrun, which sends them SIGTERM, and waits 30 s for those that do not end."""
    run = world / "runs" / "killed"
    process = ForkedTorchrun("train_sft.py", str(world / "config.yaml"), "--run.name", run.name)
    wait_for_step(run, 2, lambda: process.poll() is None)
    started = time.monotonic()
    os.kill(process.workers()[0], signal.SIGKILL)
    process.communicate(PATIENCE_S)
    assert process.returncode != 0 and time.monotonic() - started < 25


@pytest.mark.slow
def test_rl_continues_after_sigterm_as_if_nothing_had_been(tmp_path):
    """Its last step is dumped, wherever it ends (ecmwf/anemoi-training#183: no last checkpoint)."""
    world = build_toy_world(tmp_path)
    flags = (str(world / "config.yaml"), "--run.num_steps", "6", "--run.save_every", "0", "--run.validate_every", "3")
    flags = (*flags, "--run.dump_every", "9")
    run_script("train_rl.py", *flags, "--run.name", "whole")
    run = world / "runs" / "stopped"
    with script_on_ranks("train_rl.py", *flags, "--run.name", run.name) as (ranks, output):
        wait_for_step(run, 2, lambda: all(rank.is_alive() for rank in ranks))
        os.kill(ranks[0].pid, signal.SIGTERM)
        assert wait_for_all(ranks, 60) == 0, output.read_text()
    last = read_metrics(run)[-1]["step"]
    assert 2 <= last < 6 and verify(run / "checkpoints" / f"step_{last:06d}") is None
    assert [dump.name for dump in run.glob("trajectories/step_*")] == [f"step_{last:06d}.jsonl.gz"]
    assert f"from step {last}" in run_script("train_rl.py", *flags, "--run.name", run.name)
    assert differing(world / "runs" / "whole", run) == []


# ---- Ctrl-C

BOTH_TOOLS = ("--tools.names", "python", "search")


def python(script: str, *args: str, within: Sequence[str]) -> subprocess.Popen:
    """A script without a launcher, in a process group of its own."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    default = ["env", "--default-signal=INT"]  # a background job ignores it
    command = [*within, *default, sys.executable, script, *args]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **output)


def descendants(pid: int) -> dict[int, str]:
    """The command lines of a process's children, and theirs, by pid."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            for child in map(int, file.read_text().split()):
                found |= {child: Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")[:200]}
                found |= descendants(child)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_ctrl_c_leaves_no_process_no_shared_memory_and_no_temporary_folder(tmp_path, monkeypatch, launcher):
    """In the middle of RL, with vLLM and the Python tool's sandbox; as a terminal does it, to all at once."""
    world = build_toy_world(tmp_path / "world")
    temporary, shared_memory = tmp_path / "tmp", tmp_path / "shm"
    temporary.mkdir()
    shared_memory.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    within = under_mount("--bind", str(shared_memory), "/dev/shm")
    start = torchrun if launcher == "torchrun" else python
    process = start("train_rl.py", str(world / "config.yaml"), "--run.num_steps", "1000", *BOTH_TOOLS, within=within)
    wait_for_step(world / "runs" / "rl", 2, lambda: process.poll() is None)
    assert Path(f"/proc/{process.pid}/root/dev/shm").samefile(shared_memory)
    others = descendants(process.pid)
    assert any("train_rl.py" not in line for line in others.values())  # the sandbox
    os.killpg(process.pid, signal.SIGINT)
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    if launcher == "python":  # torchrun itself says more, and has a code of its own
        assert process.returncode == 130 and "Traceback" not in output
        assert output.count("interrupted: the same command continues the run") == 1
    deadline = time.monotonic() + 60
    while left := {pid: line for pid, line in others.items() if is_running(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert list(shared_memory.iterdir()) == []
    # torchrun leaves the folder of its ranks' error files behind after every run; it has no part in this.
    leftovers = [path.name for path in temporary.iterdir() if not path.name.startswith("torchelastic_")]
    assert leftovers == [], output[-3000:]
