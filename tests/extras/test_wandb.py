"""Weights & Biases, the real package, without a network."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.ranks import script_on_ranks, wait_for_all
from helpers.toy_run import build_toy_world
from helpers.tracked import log_of, logged_twice
from helpers.wandb_files import history

from arpo.config.named import find
from arpo.errors import UserError
from arpo.log import read_metrics
from arpo.log.trackers import TRACKERS
from extras.tracked_ids import IDS

TRACKER = f"{Path(__file__).resolve().parents[2] / 'extras' / 'wandb_tracker.py'}:Wandb"


@pytest.mark.parametrize("found", [None, ModuleType("wandb")])
def test_without_its_package_no_run_starts(monkeypatch, found):
    """A folder of its name, like the one that it makes in a run's, is an empty module, and not the package."""
    monkeypatch.setitem(sys.modules, "wandb", found)
    with pytest.raises(UserError, match=r"^run\.trackers=.*wandb_tracker\.py:Wandb: cannot be imported \(.*wandb"):
        find("run.trackers", TRACKER, TRACKERS)


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


@pytest.mark.slow
def test_wandb_shows_texts_as_they_are_written_and_not_as_a_page(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = log_of(tmp_path, TRACKER)
    log.scalars(1, {"reward/mean": 0.25})
    log.trackers.text(1, "step/0", "<script>1 < 2</script>")
    log.finish()
    rows = history(tmp_path, 2)
    assert rows[1]["step"] == 1 and rows[1]["step/0/_type"] == "html-file"
    [file] = tmp_path.glob("wandb/offline-run-*/files/media/html/step/*.html")
    assert "&lt;script&gt;1 &lt; 2&lt;/script&gt;" in file.read_text() and "<script" not in file.read_text()
    assert "warning" not in capsys.readouterr().out


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
    rows, logged = read_metrics(run), history(run, 13)
    texts = [row for row in logged if any(re.match(r"(step|valid)/\d", name) for name in row)]
    sent = [row for row in logged if row not in texts]
    assert len(texts) == 10  # two of each step, and of each validation
    assert [row["step"] for row in sent] == [row["step"] for row in rows] == [0, 1, 2]
    assert [row["reward/mean"] for row in sent[1:]] == pytest.approx([row["reward/mean"] for row in rows[1:]])
    assert len({file.name for file in run.glob("wandb/offline-run-*/*.wandb")}) == 1 and (run / "tb").is_dir()
