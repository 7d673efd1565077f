"""Shows what the tests are worth: plants small faults in a copy of the repository, one by one, and runs the tests.

    python scripts/mutants.py                        all faults; prints JSON, and each result on stderr (half an hour)
    python scripts/mutants.py losses advantages      the faults of the files with these words in their path

A fault is caught if a named test fails. A fault that survives is a missing test. Run it before and after you shorten
tests. It stops with one line if a fault's old text does not stand exactly once in its file: then repair faults.py.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch  # noqa: F401 (here once, instead of in the tests of each fault)
import transformers  # noqa: F401
from faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900
"""A fault may make a test wait forever. After this time it counts as hung, which is neither caught nor survived."""


def stale() -> list[str]:
    """Return the faults whose old text does not stand exactly once in its file."""
    found = []
    for (name, _), faults in FAULTS.items():
        text = (ROOT / f"arpo/{name}.py").read_text()
        counts = [(old, text.count(old)) for old, _ in faults]
        found += [f"arpo/{name}.py has {old!r} {count} times, not once" for old, count in counts if count != 1]
    return found


def copied(folder: Path) -> Path:
    """Copy all files of the repository that git does not ignore, and return the copy."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def outcome_of(tests: Sequence[str], folder: Path, *, is_quiet: bool = True) -> str:
    """Run the tests of the copy: "caught" if one of them fails, "survived" if none does, "hung" if they do not end."""
    child = multiprocessing.get_context("fork").Process(target=run_tests, args=(tests, folder, is_quiet))
    child.start()
    child.join(LIMIT_S if is_quiet else None)
    if child.exitcode is None:
        os.killpg(child.pid, signal.SIGKILL)
        return "hung"
    if child.exitcode not in (0, 1):
        sys.exit(f"error: pytest ended with {child.exitcode} on {' '.join(tests)}; run it to see why")
    return "caught" if child.exitcode else "survived"


def run_tests(tests: Sequence[str], folder: Path, is_quiet: bool) -> None:
    """Run the tests of the copy in this process, a fork that has torch but nothing of the repository yet."""
    os.setpgid(0, 0)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = f"{folder}:{folder}/tests"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(folder), str(folder / "tests")]
    os.dup2(os.open(os.devnull, os.O_WRONLY) if is_quiet else 2, 1)
    paths = [f"tests/{test}" if (folder / "tests" / test).is_dir() else f"tests/{test}.py" for test in tests]
    options = ["-q", "-x", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    os._exit(pytest.main([*options, *paths]))


def main(words: Sequence[str]) -> None:
    if problems := stale():
        sys.exit(f"error: {problems[0]}; repair scripts/faults.py")
    chosen = {key: faults for key, faults in FAULTS.items() if not words or any(word in key[0] for word in words)}
    results: dict[str, list[str]] = {"caught": [], "survived": [], "hung": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = copied(Path(temporary))
        all_tests = sorted({test for _, tests in chosen for test in tests.split()})
        if outcome_of(all_tests, folder, is_quiet=False) == "caught":
            sys.exit("error: the tests fail without any fault; repair them first")
        for (name, tests), faults in chosen.items():
            file = folder / f"arpo/{name}.py"
            text = file.read_text()
            for old, new in faults:
                file.write_text(text.replace(old, new))
                outcome = outcome_of(tests.split(), folder)
                results[outcome].append(f"arpo/{name}.py: {old} -> {new}")
                print(f"{outcome}: {results[outcome][-1]}", file=sys.stderr, flush=True)
            file.write_text(text)
    print(json.dumps({**results, "totals": {outcome: len(faults) for outcome, faults in results.items()}}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
