"""Checkpoints that a thread writes while training goes on: what is in them, when they are seen, and how they end."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks, run_ranks_until_killed, try_script
from helpers.records import logged
from helpers.saving import begin, begin_again, change

from arpo.checkpoint.checkpoints import verify
from arpo.checkpoint.manifest import MANIFEST
from arpo.ranks import seed_everything

ASIDE = {"async_save": True}


def hold(rank: int, own: int, *, until: threading.Event | None = None, seconds: float = 30.0) -> threading.Event:
    """Have the writing of a checkpoint's tensors wait on that rank, in the thread that does it. Set once it waits."""
    waits = threading.Event()

    def wait(name: str, args: tuple) -> None:
        if name == "open" and str(args[0]).endswith(".distcp") and "w" in str(args[1]) and rank == own:
            waits.set()
            (until or threading.Event()).wait(seconds)

    sys.addaudithook(wait)
    return waits


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def save_and_go_on(ranks, model: str, folder: str, aside: bool) -> None:
    """Two saves; what was saved changes at once after each, and so does what the sampler has said of itself."""
    saver, _ = begin(ranks, model, folder, async_save=aside)
    written = threading.Event()
    waits = hold(ranks.rank, 0, until=written) if aside else None
    for step in (1, 2):
        seed_everything(step)
        change(saver)
        with torch.no_grad():
            for state in saver.optimizer.state.values():
                state["exp_avg"].add_(1.0)
                state["step"].add_(1)
        progress = {"drawn": [step]}
        written.clear()
        saver.save(step, progress, b"of rank %d" % ranks.rank, is_final=False)
        if waits and ranks.rank == 0:
            assert waits.wait(60)  # else the next save would wait for one that waits for what comes after it
            waits.clear()
        change(saver)
        with torch.no_grad():
            for state in saver.optimizer.state.values():
                state["exp_avg"].add_(7.0)
        torch.rand(3)
        progress["drawn"].append("later")
        written.set()
    saver.wait()


@pytest.mark.slow
def test_a_save_beside_the_training_has_the_files_of_one_that_it_waited_for(tiny_model_dir, tmp_path):
    found = {}
    for aside in (False, True):
        folder = tmp_path / str(aside)
        run_ranks(2, save_and_go_on, str(tiny_model_dir), str(folder), aside)
        found[aside] = files_of(folder / "run" / "checkpoints")
        assert (folder / "run" / "hf").resolve() == folder / "run" / "checkpoints" / "step_000002" / "hf"
    assert found[True].keys() == found[False].keys()
    assert {"latest", "step_000001/hf/model.safetensors", "step_000001/random_states.pt"} <= found[True].keys()
    different = {name.partition("/")[2] for name, data in found[True].items() if data != found[False][name]}
    assert different == {".metadata", MANIFEST}  # a number that torch draws, and the checksum of its file


def look_while_one_rank_writes(ranks, model: str, folder: str) -> tuple:
    """Rank 1 takes its time with its tensors of step 2; what is seen meanwhile and afterwards, and what was logged."""
    saver, _ = begin(ranks, model, folder, **ASIDE)
    checkpoints, link, go_on = saver.checkpoints.folder, saver.link, threading.Event()
    saver.save(1, is_final=False)
    saver.wait()
    waits = hold(ranks.rank, 1, until=go_on)
    with logged() as lines:
        saver.save(2, is_final=False)
        if ranks.rank == 1:
            assert waits.wait(60)
        meanwhile = [ranks.all_reduce_sum(1.0), (checkpoints / "latest").read_text(), link.resolve().parent.name]
        time.sleep(0.5)  # rank 0 has long written its part
        meanwhile += [(checkpoints / "step_000002").exists()]
        ranks.barrier()
        threading.Timer(1.0, go_on.set).start()
        saver.save(3, is_final=True)
    return meanwhile, (checkpoints / "latest").read_text(), link.resolve().parent.name, lines


def test_nobody_sees_a_checkpoint_before_all_ranks_have_written_it_and_the_run_goes_on(tiny_model_dir, tmp_path):
    seen = run_ranks(2, look_while_one_rank_writes, str(tiny_model_dir), str(tmp_path))
    for meanwhile, *after, _ in seen:
        assert meanwhile == [[2.0], "step_000001\n", "step_000001", False]
        assert after == ["step_000003\n", "step_000003"]
    assert seen[0][-1] == ["waiting for the save of step 2", "step 2 is saved", "step 3 is saved"]
    assert verify(tmp_path / "run" / "checkpoints" / "step_000002") is None


def killed_while_it_writes(ranks, model: str, folder: str) -> None:
    saver, _ = begin(ranks, model, folder, **ASIDE)
    saver.save(1, is_final=False)
    saver.wait()
    waits = hold(ranks.rank, 1)
    saver.save(2, is_final=False)
    if ranks.rank == 1:
        assert waits.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    saver.wait()


def test_a_kill_while_it_is_written_costs_that_save_alone(tiny_model_dir, tmp_path):
    run_ranks_until_killed(2, killed_while_it_writes, str(tiny_model_dir), str(tmp_path))
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000001", "step_000002.tmp"]
    assert [step for step, _ in run_ranks(2, begin_again, str(tiny_model_dir), str(tmp_path))] == [1, 1]


ENDS_WITH_AN_ERROR = """
import sys, time
from helpers.saving import begin
from arpo.start.load import run_or_exit
from arpo.errors import UserError
from arpo.ranks import init_ranks

def slowly(name, args):
    if name == "open" and str(args[0]).endswith(".distcp"):
        time.sleep(1)

def main(argv):
    saver, _ = begin(init_ranks(), *argv, async_save=True)
    sys.addaudithook(slowly)
    saver.save(1, is_final=False)
    raise UserError("the gradient is not finite")

run_or_exit(main, sys.argv[1:])
"""


def test_a_run_that_ends_with_an_error_has_its_last_save(tiny_model_dir, tmp_path):
    (tmp_path / "ends.py").write_text(ENDS_WITH_AN_ERROR)
    done = try_script(str(tmp_path / "ends.py"), str(tiny_model_dir), str(tmp_path))
    assert done.code == 2, done.output
    assert "error: the gradient is not finite" in done.output and "step 1 is saved" in done.output
    assert verify(tmp_path / "run" / "checkpoints" / "step_000001") is None
