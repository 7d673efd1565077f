"""Shows what the tests are worth: plants small faults in a copy of the repository, one by one, and runs the tests.

    python scripts/mutants.py                        all faults; prints JSON, and each result on stderr (half an hour)
    python scripts/mutants.py losses advantages      the faults of the files with these words in their path

A fault is caught if a named test fails. A fault that survives is a missing test. Run it before and after you shorten
tests. It stops with one line if a fault's old text does not stand exactly once in its file: then repair faults.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300
"""A fault may make a test wait forever. The tests of a fault that take longer have caught it."""


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


def fails(tests: Sequence[str], folder: Path) -> bool:
    """Return True if one of the tests fails, or hangs."""
    paths = [f"tests/{test}" if (folder / "tests" / test).is_dir() else f"tests/{test}.py" for test in tests]
    options = ["-q", "-x", "-m", "not slow and not gpu", "-p", "no:cacheprovider", *paths]
    env = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *options]
    try:
        code = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return True
    if code not in (0, 1):
        sys.exit(f"error: pytest {' '.join(paths)} ended with exit code {code}; see it in the repository")
    return code == 1


def main(words: Sequence[str]) -> None:
    if problems := stale():
        sys.exit(f"error: {problems[0]}; repair scripts/faults.py")
    chosen = {key: faults for key, faults in FAULTS.items() if not words or any(word in key[0] for word in words)}
    results: dict[str, list[str]] = {"caught": [], "survived": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = copied(Path(temporary))
        if fails(sorted({test for _, tests in chosen for test in tests.split()}), folder):
            sys.exit("error: the tests fail without any fault; repair them first")
        for (name, tests), faults in chosen.items():
            file = folder / f"arpo/{name}.py"
            text = file.read_text()
            for old, new in faults:
                file.write_text(text.replace(old, new))
                outcome = "caught" if fails(tests.split(), folder) else "survived"
                results[outcome].append(f"arpo/{name}.py: {old} -> {new}")
                print(f"{outcome}: {results[outcome][-1]}", file=sys.stderr, flush=True)
            file.write_text(text)
    print(json.dumps({**results, "totals": {outcome: len(faults) for outcome, faults in results.items()}}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
