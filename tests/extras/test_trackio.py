"""Trackio, the real package, without a network."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from extras.tracked_ids import IDS

TRACKER = f"{Path(__file__).resolve().parents[2] / 'extras' / 'trackio_tracker.py'}:Trackio"


@pytest.mark.slow
def test_trackio_has_the_numbers_and_one_run_goes_on(tmp_path):
    """In a process of its own, since the package reads TRACKIO_DIR when it is imported."""
    pytest.importorskip("trackio")
    code = (
        "import sys; from pathlib import Path; from helpers.tracked import logged_twice\n"
        "logged_twice(Path(sys.argv[1]), sys.argv[2])"
    )
    folder, store = tmp_path / "mine", tmp_path / "trackio"
    folder.mkdir()
    path = os.pathsep.join(sys.path)
    environment = os.environ | {"TRACKIO_DIR": str(store), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), TRACKER], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning: run.trackers" not in done.stdout and "trackio show --project arpo-torch" in done.stdout
    [database] = store.glob("arpo-torch*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    found = [(step, json.loads(metrics)["reward/mean"]) for _, step, metrics in rows]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.875)]
    assert {name for name, *_ in rows} == {f"mine-{json.loads((folder / IDS).read_text())['trackio']}"}
