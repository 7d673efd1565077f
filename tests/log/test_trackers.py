"""Trackers: the real packages, without a network; and that none of them ever ends a run."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.ranks import script_on_ranks, wait_for_all
from helpers.toy_run import build_toy_world
from helpers.tracked import Config, log_of, logged_twice
from helpers.wandb_files import history

import arpo.log.trackers
from arpo.config.load import load_config
from arpo.config.sections import RunConfig
from arpo.errors import UserError
from arpo.log import read_metrics
from arpo.log.trackers import IDS, TRACKERS, TrackedRun, check_installed
from train_rl import RLConfig

ROOT = Path(__file__).resolve().parents[2]


class Recording:
    """A tracker that notes what it is told, and fails where it is told to."""

    where = "recorded"

    def __init__(self, fails_at=""):
        self.told, self.fails_at = [], fails_at

    def _note(self, what, *details):
        if what == self.fails_at:
            raise OSError(f"no {what}\nfor you")
        self.told.append((what, *details))

    def scalars(self, step, values, histograms):
        self._note("scalars", step, dict(values))

    def text(self, step, name, text):
        self._note("text", step, name)

    def close(self):
        self._note("close")


# ---- settings


def test_a_misspelt_tracker_is_named():
    with pytest.raises(
        UserError, match=r"run\.trackers='wandbb' is unknown; did you mean 'wandb'\? use one of tensorb"
    ):
        load_config(RLConfig, ["--data.train", "x", "--run.trackers", "tensorboard", "wandbb"])


def test_the_default_is_tensorboard():
    assert RunConfig().trackers == ("tensorboard",) and list(TRACKERS) == ["tensorboard", "wandb"]


def test_a_tracker_that_is_not_installed_is_one_line_that_says_how(monkeypatch):
    monkeypatch.setattr(arpo.log.trackers, "find_spec", lambda name: None)
    check_installed(["tensorboard"])
    with pytest.raises(
        UserError, match=r"^run\.trackers has wandb, which is not installed; pip install -e '\.\[wandb\]'"
    ):
        check_installed(["tensorboard", "wandb"])


def test_a_folder_of_the_trackers_name_is_not_its_package(monkeypatch, tmp_path):
    (tmp_path / "a_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    spec = find_spec("a_tracker")
    assert spec is not None
    monkeypatch.setattr(arpo.log.trackers, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match=r"run\.trackers has wandb, which is not installed"):
        check_installed(["wandb"])


def test_each_tracker_but_the_default_is_an_extra_of_its_name():
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
    assert {name for name in TRACKERS if re.search(rf"^{name} = ", extras, re.MULTILINE)} == {"wandb"}


# ---- failures


@pytest.mark.parametrize("fails_at", ["scalars", "text", "close"])
def test_a_tracker_that_fails_is_one_warning_and_then_it_is_off(tmp_path, monkeypatch, capsys, fails_at):
    bad, good = Recording(fails_at), Recording()
    monkeypatch.setitem(TRACKERS, "bad", lambda run: bad)
    monkeypatch.setitem(TRACKERS, "good", lambda run: good)
    log = log_of(tmp_path, "bad", "good")
    for step in (1, 2):
        log.scalars(step, {"reward/mean": 0.5})
        log.trackers.text(step, "step/0", "text")
    log.finish()
    assert [what for what, *_ in good.told] == ["scalars", "text", "scalars", "text", "close"]
    printed = capsys.readouterr().out.splitlines()
    warnings = [line for line in printed if "warning" in line]
    assert warnings == [
        f"warning: run.trackers: bad failed (OSError: no {fails_at} for you); it is off, and the run goes on"
    ]
    assert len(read_metrics(tmp_path)) == 2 and ("recorded" in printed)


def test_a_tracker_that_cannot_begin_is_a_warning(tmp_path, monkeypatch, capsys):
    def refuses(run):
        raise PermissionError("who are you?")

    monkeypatch.setitem(TRACKERS, "bad", refuses)
    log = log_of(tmp_path, "bad")
    log.scalars(1, {"reward/mean": 0.5})
    log.close()
    assert "bad failed (PermissionError: who are you?)" in capsys.readouterr().out


# ---- one run of the tracker for one of ours


def test_a_continued_run_has_the_id_that_its_folder_keeps_and_a_new_one_another(tmp_path):
    def run(step):
        return TrackedRun(tmp_path, Config(), {}, resume_step=step)

    first = run(0).id_of("wandb")
    assert run(3).id_of("wandb") == first and run(3).id_of("trackio") != first
    assert json.loads((tmp_path / IDS).read_text()).keys() == {"wandb", "trackio"}
    assert run(0).id_of("wandb") != first


@pytest.mark.slow
def test_wandb_offline_has_the_numbers_and_one_run_goes_on(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "mine"
    folder.mkdir()
    logged_twice(folder, "wandb")
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
    log = log_of(tmp_path, "wandb")
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
        "log = RunLog(Path(sys.argv[1]), Config(), is_main=True, trackers=['wandb'])\n"
        "log.scalars(1, {'reward/mean': 1.0}); log.finish(); print('finished')\n"
    )
    (tmp_path / "tests_config.py").write_text(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Config:\n    lr: float = 1.0\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    path = os.pathsep.join([*sys.path, str(tmp_path)])
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": path, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and "finished" in done.stdout, done.stderr[-3000:]
    assert done.stdout.count("warning: run.trackers: wandb failed (") == 1
    assert len(read_metrics(tmp_path / "run")) == 1


# ---- in a training


def offline(rank: int) -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


@pytest.mark.slow
def test_a_training_and_its_continuation_have_the_same_numbers_in_each_tracker(tmp_path):
    pytest.importorskip("wandb")
    world = build_toy_world(tmp_path)
    flags = [str(world / "config.yaml"), "--run.trackers", "tensorboard", "wandb", "--run.save_every", "1"]
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
