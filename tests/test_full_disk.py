"""The log of a run on a disk that is full for a while: a real one, of 3 MB."""

import json
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.files import read_jsonl
from helpers.mounts import under_mount

from arpo.log import read_metrics
from arpo.log.metrics_file import MetricsFile

RUN = """
import sys
from pathlib import Path
from helpers.sample_groups import group
from arpo.log import RunLog
from arpo.config.sections import RunConfig

folder, disk = Path(sys.argv[1]) / "run", Path(sys.argv[1])
log = RunLog(folder, RunConfig(), is_main=True, trackers=("tensorboard",))

def step(number):
    log.trajectories(number, [group()])
    log.dumps.wait()
    log.scalars(number, {"reward/mean": number / 10, **{f"value/{i}": i / 7 for i in range(300)}})

def fill():
    with (disk / "junk").open("wb", buffering=0) as junk:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    junk.write(b"x" * size)
            except OSError:
                pass

step(1)
step(2)
fill()
step(3)
step(4)
(disk / "junk").unlink()
step(5)
fill()
step(6)
if "free" in sys.argv:
    (disk / "junk").unlink()
log.finish()
print("ended")
sys.stdout.flush()
copies = Path(sys.argv[2])
for path in [folder / "metrics.jsonl", *sorted((folder / "trajectories").iterdir())]:
    (copies / path.name).write_bytes(path.read_bytes())
"""


def run_on_small_disk(tmp_path: Path, *args: str) -> list[str]:
    """Run RUN on a disk of its own. Return what it printed; its files are in tmp_path/copies."""
    disk, copies = tmp_path / "disk", tmp_path / "copies"
    disk.mkdir()
    copies.mkdir()
    tests = Path(__file__).resolve().parent
    within = under_mount("-t", "tmpfs", "-o", "size=3m", "none", str(disk))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    command = [*within, sys.executable, "-c", RUN, str(disk), str(copies), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr  # TensorBoard's thread
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_run_goes_on_over_a_full_disk_and_its_rows_come_when_there_is_room(tmp_path):
    told = run_on_small_disk(tmp_path, "free")
    rows = read_metrics(tmp_path / "copies")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["reward/mean"] == row["step"] / 10 and len(row) >= 302 for row in rows)
    assert [row.get("log/lost_dumps") for row in rows] == [None, None, 1, 2, 2, 3]
    dumps = sorted((tmp_path / "copies").glob("step_*"))
    assert [path.name for path in dumps] == [f"step_00000{n}.jsonl.gz" for n in (1, 2, 5)]
    assert all(len(read_jsonl(path)) == 2 for path in dumps) and len(list((tmp_path / "copies").iterdir())) == 4
    assert sum("metrics.jsonl: cannot write step 3 (No space left on device)" in line for line in told) == 1
    assert sum("metrics.jsonl: cannot write" in line for line in told) == 2  # once for each time that it is full
    assert any("metrics.jsonl: the 2 rows that waited are written" in line for line in told)
    assert sum("cannot write the trajectory dump (No space left on device)" in line for line in told) == 3
    assert sum("run.trackers: tensorboard failed (OSError: [Errno 28]" in line for line in told) == 1
    assert told[-1] == "ended"


@pytest.mark.slow
def test_a_run_that_ends_on_a_full_disk_says_what_is_missing(tmp_path):
    told = run_on_small_disk(tmp_path)
    assert [row["step"] for row in read_metrics(tmp_path / "copies")] == [1, 2, 3, 4, 5]
    assert any("metrics.jsonl: lacks the rows of steps 6 (No space left on device)" in line for line in told)
    assert told[-1] == "ended"


@contextmanager
def files_of(num_bytes: int):
    """Let no file grow beyond that: a write has room for its first part."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_part_of_a_row_stays_and_the_rows_come_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    assert metrics.write({"step": 1, "x": 0.5}) == ""
    size = path.stat().st_size
    for room in (0, 1, size - 1, size + 5):  # in the last one a row has room, and the next one has not
        with files_of(size + room):
            assert metrics.write({"step": len(metrics.waiting_steps) + 2, "x": 0.5}) == "File too large"
        assert path.stat().st_size == size and [row["step"] for row in read_metrics(tmp_path)] == [1]
    assert metrics.waiting_steps == [2, 3, 4, 5]
    assert metrics.write({"step": 6}) == "" and metrics.write() == ""
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_what_a_resumed_run_forgets_needs_no_room(tmp_path):
    """The file was written anew, and lost all rows where that failed."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 9)) + '{"step": 9, "x')
    with files_of(1):
        metrics = MetricsFile(path, 6)
        assert metrics.write({"step": 7, "x": 1}) == "File too large"
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert metrics.write() == ""
    assert read_metrics(tmp_path)[-1] == {"step": 7, "x": 1}
