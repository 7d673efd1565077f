"""The GPU kit on hosts that lack what ours has: packages, or memory for a section's model."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.edits import ROOT

from benchmarks import update_mfu
from benchmarks.shared.gpu_sections import OF_TRAIN_RL, sections
from benchmarks.shared.shapes import SHAPES

SECTIONS = sections("cuda")
H100_BYTES = 79.1 * 2**30
"""What torch reports of an H100 with 80 GB."""
ABSENT = {*OF_TRAIN_RL, "math_verify", "pydantic", "aiohttp", "tensorboard", "matplotlib"} - {"pytest"}
"""Packages that no section names unless it needs vLLM."""

WITHOUT = """
import importlib.abc, runpy, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def run_without(absent: set[str], code: str) -> str:
    """Run the code in a process that cannot import these packages; return its output."""
    command = [sys.executable, "-c", WITHOUT.format(absent=absent) + code]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"ARPO_GPU_KIT": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_tests_of_the_trainer_run_where_only_torch_transformers_and_pytest_are():
    """As pyphi 142: an import at the top of a file that all tests share takes all of them away."""
    tests = [section.command[-1] for section in SECTIONS if section.needs == ("pytest",)]
    assert len(tests) > 10
    code = f"import pytest; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-m', 'gpu', *{tests}, "
    collected = run_without(ABSENT, code + "'--collect-only']))")
    assert all(test in collected for test in tests), collected
    # a test, too: the fixtures of a session are made only then
    code = code.replace(repr(tests), repr([test for test in tests if "torchs_own_flash" in test]))
    assert "1 passed" in run_without(ABSENT, code + "]))")


def test_a_benchmark_that_names_no_package_can_be_imported_without_any():
    alone = [section.command for section in SECTIONS if not section.needs]
    scripts = sorted({next(part for part in command if part.endswith(".py")) for command in alone})
    assert "benchmarks/update_mfu.py" in scripts and len(scripts) > 4
    code = f"""
sys.path[:0] = ["benchmarks", "benchmarks/gpu"]
for script in {scripts}:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
"""
    assert run_without(ABSENT, code).count("usage: ") == len(scripts)


@pytest.mark.parametrize("shape, measured", [("1.5b", True), ("7b", False)])
def test_the_mfu_of_a_model_whose_training_state_does_not_fit_has_no_optimizer_step(monkeypatch, shape, measured):
    local = SimpleNamespace(numel=lambda: SHAPES[shape].parameters)
    policy = SimpleNamespace(parameters=lambda: [SimpleNamespace(to_local=lambda: local)])
    gpu = SimpleNamespace(total_memory=H100_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(update_mfu, "build_optimizer", lambda *args: None)
    monkeypatch.setattr(update_mfu, "seconds", lambda *args: 0.25)
    found = update_mfu.optimizer_seconds(policy, lambda: None, torch.device("cuda"), 3)
    assert found == (0.25 if measured else "not measured: the training state is 113 GiB")
