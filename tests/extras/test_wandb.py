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

EXTRAS = Path(__file__).resolve().parents[2] / "extras"
TRACKER = f"{EXTRAS / 'wandb_tracker.py'}:Wandb"


@pytest.mark.parametrize(
    "package, tracker, found",
    [
        ("wandb", "wandb_tracker.py:Wandb", None),
        # A folder of its name, like the one that it makes in a run's, is an empty module, and not the package.
        ("wandb", "wandb_tracker.py:Wandb", ModuleType("wandb")),
        ("trackio", "trackio_tracker.py:Trackio", None),
    ],
)
def test_without_its_package_no_run_starts(monkeypatch, package, tracker, found):
    monkeypatch.setitem(sys.modules, package, found)
    with pytest.raises(UserError, match=rf"^run\.trackers=.*{tracker}: cannot be imported \(.*{package}"):
        find("run.trackers", f"{EXTRAS}/{tracker}", TRACKERS)


@pytest.mark.slow
def test_wandb_offline_has_the_numbers_and_texts_as_they_are_written_and_one_run_goes_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "mine"
    folder.mkdir()
    logged_twice(folder, TRACKER)
    log = log_of(tmp_path / "other", TRACKER)
    log.trackers.text(1, "step/0", "<script>1 < 2</script>")
    log.finish()
    rows, [of_text] = history(folder, 4), history(tmp_path / "other", 1)
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.875)]
    assert rows[0]["histogram/reward/_type"] == "histogram"
    assert of_text["step"] == 1 and of_text["step/0/_type"] == "html-file"
    [page] = (tmp_path / "other").glob("wandb/offline-run-*/files/media/html/step/*.html")
    assert "&lt;script&gt;1 &lt; 2&lt;/script&gt;" in page.read_text() and "<script" not in page.read_text()
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{json.loads((folder / IDS).read_text())['wandb']}.wandb"] * 2
    out = capsys.readouterr().out
    assert "warning" not in out and f"wandb sync {files[0].parent}" in out


@pytest.mark.slow
def test_wandb_without_a_key_is_a_warning_and_no_question(tmp_path):
    pytest.importorskip("wandb")
    code = (
        "import sys; from pathlib import Path; from helpers.tracked import log_of\n"
        "log = log_of(Path(sys.argv[1]), sys.argv[2])\n"
        "log.scalars(1, {'reward/mean': 1.0}); log.finish(); print('finished')\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), TRACKER], env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and "finished" in done.stdout, done.stderr[-3000:]
    assert done.stdout.count(f"warning: run.trackers: {TRACKER} failed (") == 1
    assert len(read_metrics(tmp_path / "run")) == 1


def offline(rank: int) -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


@pytest.mark.slow
def test_a_training_and_its_continuation_have_the_same_numbers_in_each_tracker(tmp_path):
    pytest.importorskip("wandb")
    world = build_toy_world(tmp_path)
    flags = [str(world / "config.yaml"), "--run.trackers", "tensorboard", TRACKER, "--run.save_every", "1"]
    for steps in ("1", "2"):
        started = script_on_ranks("train_rl.py", *flags, "--run.num_steps", steps, ranks=1, prepare=offline)
        with started as (ranks, output):
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
