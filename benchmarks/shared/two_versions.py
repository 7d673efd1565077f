"""A benchmark on two versions of the code in turn, so that other work on the machine slows both versions alike.

Each version is a separate process with today's script. The first uses the present `arpo`, the second uses the `arpo` of
a git ref. For each line of stdin, the script measures one round and prints a JSON object (`serve_rounds`).
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def serve_rounds(measure: Callable[[], dict[str, float]]) -> None:
    """Answer each line of stdin with a line of numbers, until stdin ends. Each of the two versions calls this."""
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def rounds_of_both(
    script: str, arguments: list[str], ref: str, num_rounds: int, *, root: Path = ROOT
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the rounds of the present code, and the rounds of the code at `ref`. The versions take turns to be first.

    script: path below `root`, the repository. Ends the program with one line if the ref does not exist, or if a version
    does not answer.
    """
    rounds: dict[str, list[dict[str, float]]] = {"here": [], ref: []}
    with (
        checked_out(ref, root) as old_root,
        version(root, script, arguments) as new,
        version(old_root, script, arguments) as old,
    ):
        for number in range(num_rounds):
            turns = [("here", new), (ref, old)]
            for name, process in reversed(turns) if number % 2 else turns:
                rounds[name].append(next_round(process, name))
    return rounds["here"], rounds[ref]


@contextlib.contextmanager
def checked_out(ref: str, root: Path) -> Iterator[Path]:
    """Make a folder with the `arpo` of `ref` and today's benchmarks."""
    command = ["git", "-C", str(root), "archive", "--format=tar", ref, "arpo"]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode:
        reason = (archive.stderr.decode().strip() or "git failed").splitlines()[-1]
        sys.exit(f"--against {ref}: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        shutil.copytree(root / "benchmarks", Path(folder) / "benchmarks")
        yield Path(folder)


@contextlib.contextmanager
def version(root: Path, script: str, arguments: list[str]) -> Iterator[subprocess.Popen]:
    """Run the script with the code in `root`. The process ends at the end of stdin."""
    command = [sys.executable, str(root / script), *arguments]
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()


def next_round(process: subprocess.Popen, name: str) -> dict[str, float]:
    """Ask the version for one measurement. Other output of the version is ignored."""
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n")
        process.stdin.flush()
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    sys.exit(f"the version {name} ended with exit status {process.wait()}, its error is above")
