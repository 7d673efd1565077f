"""Questions to a trained agent: what goes wrong at the start (tests/test_hermes_end_to_end.py has real answers)."""

import subprocess
import sys

from helpers.edits import ROOT


def test_a_model_that_is_not_there_is_one_line():
    command = [sys.executable, "-m", "extras.ask", "--model.path", "runs/nothing/hf"]

    found = subprocess.run(command, cwd=ROOT, input="", capture_output=True, text=True, timeout=120)

    assert found.returncode == 2
    assert found.stderr.splitlines()[-1].startswith("error: model.path=runs/nothing/hf: no such folder")
