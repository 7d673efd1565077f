"""Weights & Biases, the real package, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.ranks import script_on_ranks, wait_for_all
from helpers.toy_run import build_toy_world
from helpers.tracked import Config, logged_twice
from helpers.wandb_files import history

from arpo.errors import UserError
from arpo.log import read_metrics
from arpo.log.trackers import TrackedRun, check_installed
from extras.tracker_ids import IDS, id_of

TRACKER = f"{Path(__file__).resolve().parents[2] / 'extras' / 'wandb_tracker.py'}:Wandb"


@pytest.mark.parametrize("found", [None, ModuleType("wandb")])
def test_without_its_package_no_run_starts(monkeypatch, found):
    """A folder of its name, like the one that it makes in a run's, is an empty module, and not the package."""
    monkeypatch.setitem(sys.modules, "wandb", found)
    with pytest.raises(UserError, match=r"^run\.trackers=.*wandb_tracker\.py:Wandb: cannot be imported \(.*wandb"):
        check_installed([TRACKER])


@pytest.mark.slow
def test_wandb_offline_has_the_numbers_and_one_run_goes_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "mine"
    folder.mkdir()
    logged_twice(folder, TRACKER)
    rows = history(folder, 4)
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.875)]
    assert rows[0]["histogram/reward/_type"] == "histogram"
    [one, other] = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert one.name == other.name == f"run-{json.loads((folder / IDS).read_text())['wandb']}.wandb"
    out = capsys.readouterr().out
    assert "warning" not in out and f"wandb sync {one.parent}" in out


def test_a_continued_run_has_the_id_that_its_folder_keeps_and_a_new_one_another(tmp_path):
    def run(step):
        return TrackedRun(tmp_path, Config(), {}, resume_step=step)

    first = id_of(run(0), "wandb")
    assert id_of(run(3), "wandb") == first and id_of(run(3), "trackio") != first
    assert json.loads((tmp_path / IDS).read_text()).keys() == {"wandb", "trackio"}
    assert id_of(run(0), "wandb") != first


@pytest.mark.slow
def test_wandb_without_a_key_is_a_warning_and_no_question(tmp_path):
    pytest.importorskip("wandb")
    code = (
        "import sys; from pathlib import Path; from tests_config import Config; from arpo.log import RunLog\n"
        "log = RunLog(Path(sys.argv[1]), Config(), is_main=True, trackers=[sys.argv[2]])\n"
        "log.scalars(1, {'reward/mean': 1.0}); log.finish(); print('finished')\n"
    )
    (tmp_path / "tests_config.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Config:\n    lr: float = 1.0\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    path = os.pathsep.join([*sys.path, str(tmp_path)])
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": path, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), TRACKER], env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and "finished" in done.stdout, done.stderr[-3000:]
    assert done.stdout.count(f"warning: run.trackers: {TRACKER} failed (") == 1
    assert len(read_metrics(tmp_path / "run")) == 1


# ---- in a training


def offline(rank: int) -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


@pytest.mark.slow
def test_a_training_and_its_continuation_have_the_same_numbers_in_each_tracker(tmp_path):
    pytest.importorskip("wandb")
    world = build_toy_world(tmp_path)
    flags = [str(world / "config.yaml"), "--run.trackers", "tensorboard", TRACKER, "--run.save_every", "1"]
    for steps in ("1", "2"):
        with script_on_ranks("train_rl.py", *flags, "--run.num_steps", steps, ranks=1, prepare=offline) as (
            ranks,
            output,
        ):
            assert wait_for_all(ranks, 30) == 0, output.read_text()[-4000:]
            assert "wandb sync " in output.read_text() and "tensorboard --logdir" in output.read_text()
    run = world / "runs" / "rl"
    rows, sent = read_metrics(run), history(run, 3)
    assert [row["step"] for row in sent] == [row["step"] for row in rows] == [0, 1, 2]
    assert [row["reward/mean"] for row in sent[1:]] == pytest.approx([row["reward/mean"] for row in rows[1:]])
    assert len({file.name for file in run.glob("wandb/offline-run-*/*.wandb")}) == 1 and (run / "tb").is_dir()
