"""The commands arpo-sft, arpo-rl, arpo-eval and arpo-view, installed as `pip install -e .` does it."""

from __future__ import annotations

import os
import shutil
import signal
import site
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from helpers.edits import ROOT
from helpers.hub_server import HubServer
from helpers.sft_world import build_sft_world

from arpo.errors import UserError
from extras import launch

COMMANDS = {
    "arpo-sft": "train_sft.py",
    "arpo-rl": "train_rl.py",
    "arpo-eval": "evaluate.py",
    "arpo-view": "extras.viewer",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The folder of the commands of a new environment, which sees this one's packages, and a checkout of its own."""
    folder = tmp_path_factory.mktemp("installed")
    checkout = folder / "checkout"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("arpo", "extras", "configs"):
        shutil.copytree(ROOT / name, checkout / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "train_sft.py", "train_rl.py", "evaluate.py"):
        shutil.copy(ROOT / name, checkout)
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    code = "import site; print(site.getsitepackages()[0])"
    lib = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    (Path(lib) / "packages.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--no-build-isolation", "-e", checkout]
    done = subprocess.run(pip, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "venv/bin"


def call(installed: Path, command: str, *argv: str, **environment: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RANK", "HF_TOKEN")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment
    cwd = installed.parents[1] / "checkout"
    return subprocess.run([installed / command, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("command, script", COMMANDS.items())
def test_every_command_is_there_after_pip_install(installed, command, script):
    done = call(installed, command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: {script}" in done.stdout or f"usage: python -m {script}" in done.stdout


def test_a_mistake_is_one_line(installed):
    done = call(installed, "arpo-rl", "configs/arpo.yaml", "--data.trian", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: command line: unknown key 'data.trian'; did you mean 'data.train'?\n"


def test_on_several_ranks_too_the_last_line_on_the_screen_is_ours(installed):
    done = call(installed, "arpo-rl", "--nproc_per_node", "2", "configs/arpo.yaml")
    *_, rule, last = done.stderr.strip().splitlines()
    assert done.returncode == 2 and "error: configs/arpo.yaml" in last and "data.train is empty" in last
    assert not rule.strip("=")


def test_two_ranks_train_on_a_data_set_of_the_hub(installed, tmp_path):
    world = build_sft_world(tmp_path, num_steps=1)
    rows = {"README.md": b"# toy", "train.jsonl": (world / "train.jsonl").read_bytes()}
    with HubServer({"datasets/toy/world": rows}) as server:
        flags, env = ["--data.train", "toy/world"], server.environment(tmp_path / "cache")
        done = call(installed, "arpo-sft", "--nproc_per_node=2", str(world / "config.yaml"), *flags, **env)
        assert done.returncode == 0, done.stderr[-3000:]
        assert server.downloads() == [None]  # the ranks share one cache, whose lock lets one of them fetch
    assert done.stdout.splitlines()[-1] == f"tensorboard --logdir {world}/runs/sft/tb"  # as README promises
    assert done.stdout.count("data.train: toy/world@") == 1
    assert f"train: toy/world@{server.commit}:train.jsonl" in (world / "runs/sft/config.yaml").read_text()


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["--nproc_per_node", "2", "a.yaml"], (2, ["a.yaml"])),
        (["--nproc-per-node=4", "a.yaml", "--run.seed", "1"], (4, ["a.yaml", "--run.seed", "1"])),
        (["a.yaml", "--nproc_per_node", "2", "--run.seed", "1"], (2, ["a.yaml", "--run.seed", "1"])),
        (["a.yaml", "--run.seed", "1"], (0, ["a.yaml", "--run.seed", "1"])),
        ([], (0, [])),
        (["--nproc_per_node"], None),
        (["--nproc_per_node", "a.yaml"], None),
        (["--nproc_per_node=0"], None),
    ],
)
def test_the_number_of_ranks_may_stand_anywhere_and_is_at_least_1(argv, expected):
    if expected:
        assert launch.split_ranks(argv) == expected
    else:
        with pytest.raises(UserError, match="must be a number of ranks, at least 1"):
            launch.split_ranks(argv)


def test_the_gpus_are_those_that_the_environment_or_the_driver_names(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "version", lambda package: "2.13.0")
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'GPU 0: H100 (UUID: a)\\n  MIG 1g (UUID: b)\\nGPU 1: H100 (UUID: c)\\n'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert launch.num_gpus({}) == 2
    assert [launch.num_gpus({"CUDA_VISIBLE_DEVICES": value}) for value in ("0,1,2", "5", "", "-1")] == [3, 1, 1, 1]
    monkeypatch.setattr(launch, "version", lambda package: "2.13.0+cpu")
    assert launch.num_gpus({}) == 1  # the CPU's wheels on a machine with GPUs


def test_without_a_checkout_the_commands_say_what_is_missing(tmp_path):
    for name in ("arpo", "extras"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from extras.launch import train_rl; train_rl()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    fix = "the commands need a checkout: clone it, and pip install -e . in it"
    assert done.stderr == f"error: {tmp_path}/train_rl.py is not there; {fix}\n"


RANKS = [sys.executable, "-m", "extras.launch", "--standalone", "--nproc_per_node", "2"]
PLACE = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "text": True}


def test_ctrl_c_ends_several_ranks_without_torchruns_traceback(tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import os, time\ntry:\n    os.write(1, b'started\\n')  # in one piece\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    ranks = subprocess.Popen(
        [*RANKS, str(script)], **PLACE, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert [ranks.stdout.readline() for _ in range(2)] == ["started\n"] * 2
    os.killpg(ranks.pid, signal.SIGINT)
    _, told = ranks.communicate(timeout=60)
    assert ranks.returncode == 130 and told == ""


def test_under_nohup_the_end_of_the_terminal_does_not_end_several_ranks(tmp_path):
    """torchrun hears SIGHUP even where nohup has it ignored (pytorch 76894, ms-swift 5884)."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, sys, time\nos.write(1, b'started\\n')\n"
        "while not os.path.exists(sys.argv[1]):\n    time.sleep(0.1)\n"
    )
    ranks = subprocess.Popen(
        ["nohup", *RANKS, str(script), str(tmp_path / "end")], **PLACE, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert [ranks.stdout.readline() for _ in range(2)] == ["started\n"] * 2
    os.killpg(ranks.pid, signal.SIGHUP)
    time.sleep(2)  # torchrun would end the ranks meanwhile
    (tmp_path / "end").touch()
    _, told = ranks.communicate(timeout=60)
    assert ranks.returncode == 0, told[-3000:]


@pytest.mark.parametrize("end, code", [("sys.exit(75)", 75), ("os.kill(os.getpid(), 9)", 137)])
def test_several_ranks_end_with_the_code_of_the_one_that_failed_first(tmp_path, end, code):
    """torchrun itself ends with 1 after any failure (pytorch 20728: once with 0)."""
    script = tmp_path / "fails.py"
    script.write_text(f"import os, sys, time\nif os.environ['RANK'] == '0':\n    {end}\ntime.sleep(600)\n")
    done = subprocess.run([*RANKS, str(script)], **PLACE, capture_output=True, timeout=600)
    assert done.returncode == code and f"{script} FAILED" in done.stderr, done.stderr[-3000:]
