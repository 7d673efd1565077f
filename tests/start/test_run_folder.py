"""A run goes on only under the settings it was begun with; what has changed is on record."""

import fcntl
import json
import os
import socket
import subprocess
import sys

import pytest
import yaml
from helpers.vllm_serve import SERVER

from arpo.config.facts import may_change
from arpo.errors import UserError
from arpo.evals.inputs import check_evaluation
from arpo.log.settings import changes, record_settings
from arpo.start.load import load_config
from arpo.start.run_folder import check_run_folder
from evaluate import EvalConfig
from train_rl import RLConfig

HOLDS = "import sys, time; from pathlib import Path; from arpo.start.run_folder import claim_folder; "
HOLDS += "claim_folder(Path(sys.argv[1]), 'train_rl'); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def config(tmp_path):
    """config(*flags) -> a config of train_rl.py whose run is in tmp_path."""

    def config(*flags: str) -> RLConfig:
        return load_config(RLConfig, ["--data.train", "x", "--run.dir", str(tmp_path), "--run.name", "r", *flags])

    return config


@pytest.fixture
def begun(tmp_path, config):
    """Folder of a run that has a checkpoint of step 4."""
    record_settings_of(config(), tmp_path / "r", 0)
    (tmp_path / "r/checkpoints/step_000004").mkdir(parents=True)
    return tmp_path / "r"


def check(cfg) -> None:
    check_run_folder(cfg.run, cfg)


def record_settings_of(cfg, folder, step: int) -> None:
    check(cfg)
    record_settings(folder, cfg, step)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--branching.selector", "none"], r"branching\.selector=arpo, and now it is none"),
        (["--optim.lr", "1e-5"], r"optim\.lr=1e-06, and now it is 1e-05"),
        (["--model.path", "other"], r"model\.path=Qwen/Qwen2\.5-7B-Instruct, and now it is other"),
        (["--run.seed", "1"], r"run\.seed=0, and now it is 1"),
        (["--tools.search.backend", "local"], r"tools\.search\.backend=replay, and now it is local"),
        (["--tools.names", "python"], r"tools\.names=\['python', 'search'\], and now it is \['python'\]"),
        (["--engine.dtype", "float32"], r"engine\.dtype=bfloat16, and now it is float32"),
    ],
)
def test_a_run_is_not_continued_under_settings_that_learn_something_else(config, begun, flags, words):
    before = (begun / "config.yaml").read_text()
    with pytest.raises(UserError, match=rf"r was begun with {words}; choose another --run\.name, or"):
        check(config(*flags))
    check(config(*flags, "--run.resume_changed", "True"))
    assert (begun / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    "flags",
    [
        ["--run.num_steps", "90"],
        ["--run.silence_timeout_s", "9"],
        ["--engine.max_num_seqs", "8"],
        ["--update.max_tokens_per_microbatch", "99999"],
        ["--tools.python.wall_s", "5"],
        ["--tools.search.cache", "x.sqlite"],
        ["--model.recompute_every_n_layers", "0"],
        ["--rollout.dispatch", "pull"],
    ],
)
def test_how_long_how_often_and_how_fast_may_change(config, begun, flags):
    check(config(*flags))
    assert changes(begun, config(*flags))


def test_where_dead_groups_are_refilled_the_dispatch_decides_what_is_drawn(config):
    refilled = config("--advantage.dead_groups", "resample")
    assert may_change("rollout.dispatch", config()) and not may_change("rollout.dispatch", refilled)


def test_each_change_is_on_record_with_its_step_and_is_what_the_next_start_is_compared_with(config, begun):
    slower = config("--optim.lr", "1e-7", "--run.resume_changed", "True", "--run.num_steps", "50")
    record_settings_of(slower, begun, 4)
    [line] = (begun / "changes.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 4,
        "changes": {"run.num_steps": [0, 50], "run.resume_changed": [False, True], "optim.lr": [1e-06, 1e-07]},
    }
    assert yaml.safe_load((begun / "config.yaml").read_text())["optim"]["lr"] == 1e-06
    check(config("--optim.lr", "1e-7", "--run.num_steps", "50"))
    with pytest.raises(UserError, match=r"optim\.lr=1e-07, and now it is 1e-06"):
        check(config())
    record_settings_of(slower, begun, 8)
    assert len((begun / "changes.jsonl").read_text().splitlines()) == 1, "nothing has changed since"


def test_larger_steps_need_a_number_of_steps(config, begun):
    """Twice the size halves run.num_epochs' steps, and a run past the half ended at once: SimpleTuner PR 3093."""
    larger = ["--run.resume_changed", "True", "--data.num_prompts_per_step", "256"]
    with pytest.raises(UserError, match=r"num_prompts_per_step=128, and now it is 256: .*; set run\.num_steps, the "):
        check(config(*larger))
    check(config(*larger, "--run.num_steps", "50"))


def test_a_run_without_a_checkpoint_begins_anew_under_any_settings(config, tmp_path):
    record_settings_of(config(), tmp_path / "r", 0)
    record_settings_of(config("--optim.lr", "1e-5"), tmp_path / "r", 0)
    assert yaml.safe_load((tmp_path / "r/config.yaml").read_text())["optim"]["lr"] == 1e-05


def test_resume_false_refuses_to_touch_an_existing_run(config, begun, tmp_path):
    with pytest.raises(UserError, match=r"run\.resume is False but this run exists"):
        check(config("--run.resume", "False"))
    check(config("--run.resume", "False", "--run.name", "other"))


def test_an_option_that_another_version_of_the_code_had_or_lacks_is_no_difference(config, begun):
    tree = yaml.safe_load((begun / "config.yaml").read_text())
    tree["loss"]["of_old"] = tree["loss"].pop("clip_low")
    (begun / "config.yaml").write_text(yaml.safe_dump(tree))
    check(config())


@pytest.mark.parametrize("text", ["", "[1]", "run: {", None])
def test_a_run_whose_settings_are_lost_is_named(config, begun, text):
    (begun / "config.yaml").unlink()
    if text is not None:
        (begun / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"r: its settings cannot be read \(.*\); choose another run\.name"):
        check(config())


@pytest.mark.parametrize("directory", ["file", "/proc/arpo"])
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_loaded(config, tmp_path, directory):
    (tmp_path / "file").touch()
    folder = str(tmp_path / directory)  # the second is absolute
    with pytest.raises(UserError, match=r"cannot write the run's folder \(.+\); set run\.dir"):
        check(config("--run.dir", folder))
    assert not os.path.exists(f"{folder}/r")


def test_a_second_writer_of_a_folder_is_refused_with_host_and_process_until_the_first_is_gone(config, tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        words = rf"r is being written by process {holder.pid} on {socket.gethostname()}; stop that, or choose another"
        with pytest.raises(UserError, match=words):
            check(config())
        with pytest.raises(UserError, match=words):
            check_evaluation(load_config(EvalConfig, ["--eval.regrade", str(tmp_path / "r")]))
        check(config("--run.name", "other"))
    finally:
        holder.kill()
        holder.wait()
    check(config())  # the lock of a killed process is stale
    check(config())  # and a process may come back to its own


def test_the_lock_is_not_inherited_and_other_ranks_take_none(config, tmp_path, monkeypatch):
    check(config())
    child = subprocess.Popen(["sleep", "600"])
    try:
        code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "r/.lock")], capture_output=True).returncode
    finally:
        child.kill()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(fcntl, "lockf", lambda *_: pytest.fail("rank 1 locks"))
    check(config())


def test_where_nothing_can_be_locked_a_line_says_so(config, monkeypatch, capsys):
    def lockf(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    check(config())
    assert "cannot be locked (No locks available)" in capsys.readouterr().out


def test_a_folder_belongs_to_the_script_that_began_it(config, tmp_path):
    record_settings_of(config(), tmp_path / "r", 0)
    files = ["--eval.files", str(tmp_path / "q.jsonl"), "--eval.server", f"{SERVER}=http://127.0.0.1:1"]
    (tmp_path / "q.jsonl").write_text('{"question": "q?", "answer": "1"}\n')
    place = ["--run.dir", str(tmp_path), "--run.name", "r", "--tools.names", "python"]
    words = r"r is a run of train_rl\.py, and this is evaluate\.py; choose another --run\.name"
    for flags in ([*files, *place], ["--eval.regrade", str(tmp_path / "r")]):
        with pytest.raises(UserError, match=words):
            check_evaluation(load_config(EvalConfig, flags))
    assert (tmp_path / "r/config.yaml").read_text().startswith("script: train_rl\nrun:\n")
    assert load_config(RLConfig, [str(tmp_path / "r/config.yaml")]) == config()
    with pytest.raises(UserError, match=r"config\.yaml: the settings of a run of train_rl\.py, and this is evaluate"):
        load_config(EvalConfig, [str(tmp_path / "r/config.yaml")])


def test_a_run_goes_on_with_the_contents_it_was_begun_with_by_whatever_path(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"data.train": "train.jsonl", "reward.file": "mine.py", "model.path": "model/model.safetensors"}
    (tmp_path / "model").mkdir()
    for name in files.values():
        (tmp_path / name).write_text("def compute_score(trajectory, prompt): return 1.0\n")
    flags = ["--data.train", "train.jsonl", "--reward.file", "mine.py", "--model.path", "model"]
    record_settings_of(config(*flags), tmp_path / "r", 0)
    (tmp_path / "r/checkpoints/step_000004").mkdir(parents=True)
    assert (tmp_path / "r/code/reward.file-mine.py").read_text() == (tmp_path / "mine.py").read_text()
    assert load_config(RLConfig, [str(tmp_path / "r/config.yaml")]) == config(*flags)

    absolute = ["--data.train", str(tmp_path / "train.jsonl"), "--model.path", str(tmp_path / "model")]
    check(config("--reward.file", "./mine.py", *absolute))
    for option, name in files.items():
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before + "# edited\n")
        with pytest.raises(UserError, match=rf"r was begun with other contents of {option}=.*; choose another"):
            check(config(*flags))
        changed = config(*flags, "--run.resume_changed", "True")
        check(changed)
        record_settings(tmp_path / "r", changed, 4)
        check(config(*flags))  # those are now what it goes on with
        (tmp_path / name).write_text(before)
        record_settings(tmp_path / "r", changed, 4)


def test_each_start_is_on_record_with_its_code(config, tmp_path):
    for step in (0, 4):
        record_settings_of(config(), tmp_path / "r", step)
    starts = [json.loads(line) for line in (tmp_path / "r/sessions.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 4]
    for start in starts:
        assert start.keys() == {"step", "date", "code", "versions", "command"}
        assert {"python", "torch", "transformers"} <= start["versions"].keys()
        assert start["code"].startswith(("commit ", "not recorded"))
