"""Trackers: the real packages, without a network; and that none of them ever ends a run."""

import json
import shutil

import pytest
from helpers.tracked import Config, log_of

from arpo.errors import UserError
from arpo.log import read_metrics
from arpo.log.trackers import TRACKERS, TrackedRun
from arpo.start.load import load_config
from extras.tracked_ids import IDS, id_of
from train_rl import RLConfig


class Recording:
    """A tracker that notes what it is told, and fails where it is told to."""

    where = "recorded"

    def __init__(self, fails_at=""):
        self.told, self.fails_at = [], fails_at

    def _note(self, what, *details):
        if what == self.fails_at:
            raise OSError(f"no {what}\nfor you")
        self.told.append((what, *details))

    def begin(self, run):
        self._note("begin")
        return self

    def scalars(self, step, values, histograms):
        self._note("scalars", step, dict(values))

    def text(self, step, name, text):
        self._note("text", step, name)

    def close(self):
        self._note("close")


@pytest.mark.parametrize(
    "name, words",
    [
        ("tensorbord", r"='tensorbord' is unknown; did you mean 'tensorboard'\? use one of tensorb"),
        ("wandb", r": wandb is now FILE\.py:NAME; docs/training\.md"),
    ],
)
def test_an_unknown_tracker_is_named(name, words):
    with pytest.raises(UserError, match=rf"run\.trackers{words}"):
        load_config(RLConfig, ["--data.train", "x", "--run.trackers", "tensorboard", name])


@pytest.mark.parametrize("fails_at", ["begin", "scalars", "text", "close"])
def test_a_tracker_that_fails_is_one_warning_and_then_it_is_off(tmp_path, monkeypatch, capsys, fails_at):
    bad, good = Recording(fails_at), Recording()
    monkeypatch.setitem(TRACKERS, "bad", bad.begin)
    monkeypatch.setitem(TRACKERS, "good", good.begin)
    log = log_of(tmp_path, "bad", "good")
    for step in (1, 2):
        log.scalars(step, {"reward/mean": 0.5})
        log.trackers.text(step, "step/0", "text")
    log.finish()
    assert [what for what, *_ in good.told] == ["begin", "scalars", "text", "scalars", "text", "close"]
    printed = capsys.readouterr().out.splitlines()
    warnings = [line for line in printed if "warning" in line]
    assert warnings == [
        f"warning: run.trackers: bad failed (OSError: no {fails_at} for you); it is off, and the run goes on"
    ]
    assert len(read_metrics(tmp_path)) == 2 and ("recorded" in printed)


class WithoutWhere:
    def __init__(self, run): ...

    def scalars(self, step, values, histograms): ...

    def text(self, step, name, text): ...

    def close(self): ...


class Awaited(Recording):
    async def scalars(self, step, values, histograms): ...


@pytest.mark.parametrize(("kind", "why"), [
    (WithoutWhere, "it has no 'where'"),  # its lack ended the run, as another one's did in huggingface/trl PR 6715
    (Awaited, "its 'scalars' is a coroutine; write `def scalars`"),  # no number arrived, as in hynek/structlog 666
])  # fmt: skip
def test_a_tracker_that_is_not_complete_is_off_from_the_start(tmp_path, monkeypatch, capsys, kind, why):
    monkeypatch.setitem(TRACKERS, "bad", kind)
    log = log_of(tmp_path, "bad")
    log.scalars(1, {"reward/mean": 0.5})
    log.finish()
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert warnings == [f"warning: run.trackers: bad failed (TypeError: {why}); it is off, and the run goes on"]


def test_a_continued_run_has_the_id_that_its_folder_keeps_and_a_new_one_another(tmp_path):
    def run(step):
        return TrackedRun(tmp_path, Config(), {}, resume_step=step)

    first = id_of(run(0), "wandb")
    assert id_of(run(3), "wandb") == first and id_of(run(3), "trackio") != first
    assert json.loads((tmp_path / IDS).read_text()).keys() == {"wandb", "trackio", "folder"}
    assert id_of(run(0), "wandb") != first


def test_a_copy_of_a_run_that_continues_is_another_run_of_the_tracker(tmp_path):
    """Two runs mixed into one: mlfoundations/open_clip#340, ray-project/ray PR 29916."""

    def run(name, step):
        (tmp_path / name).mkdir(exist_ok=True)
        return TrackedRun(tmp_path / name, Config(), {}, resume_step=step)

    first = id_of(run("a", 0), "wandb")
    (tmp_path / "b").mkdir()
    shutil.copyfile(tmp_path / "a" / IDS, tmp_path / "b" / IDS)
    second = id_of(run("b", 3), "wandb")
    assert second != first
    assert (id_of(run("a", 3), "wandb"), id_of(run("b", 3), "wandb")) == (first, second)
