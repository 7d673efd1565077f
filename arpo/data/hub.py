"""Data sets of the Hub by name: OWNER/NAME, OWNER/NAME:FILE, OWNER/NAME@REVISION:FILE.

    name = pin("data.train", "openai/gsm8k:main/train-00000-of-00001.parquet")    # fetched
    # "openai/gsm8k@e53f048856ff4f594e959d75785d2c2d37b678ee:main/train-00000-of-00001.parquet"
    local_file(name)    # the file, in the Hub's cache

A config is pinned before torch is imported, so that a mistake shows at once, and what a run's config.yaml has is the
commit: a run goes on with the rows that it was begun with, whatever happens to the data set. Files lie in the Hub's own
cache (HF_HOME). Ranks need not wait for each other here: the cache locks a file that is being fetched, and a disk that
is not shared gets its own.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields, is_dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from arpo.data.hub_catalog import CATALOG
from arpo.data.hub_remote import digest_of, remote_files, said
from arpo.errors import UserError

C = TypeVar("C")
SUFFIXES = (".parquet", ".jsonl", ".json")
DATA_OPTIONS = ("data.train", "data.valid", "eval.files")
"""Options that take a data set's name."""
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[^:]+))?(?::(?P<file>.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFile:
    """A file of a data set on the Hub; parts that the name leaves open are empty."""

    repo: str
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}:{self.file}"


def parse(name: str) -> HubFile | None:
    """Return what a name says of the Hub; None for a path. OWNER/FILE.parquet is a path, and so is what exists."""
    match = _NAME.fullmatch(name)
    if not match or Path(name).exists() or (name.endswith(SUFFIXES) and not match["file"]):
        return None
    return HubFile(match["repo"], match["revision"] or "", match["file"] or "")


def pin_config(cfg: C) -> C:
    """Return a script's config with all data sets of the Hub fetched, and their names pinned. Raises UserError.

    A run that was begun goes on with the commit that it was begun with, unless the name has a revision.
    """
    begun = _begun_with(cfg)

    def walk(node: Any, prefix: str) -> Any:
        changed = {}
        for field in fields(node):
            key, value = f"{prefix}{field.name}", getattr(node, field.name)
            if is_dataclass(value):
                changed[field.name] = walk(value, f"{key}.")
            elif key in DATA_OPTIONS:
                several = isinstance(value, tuple)
                changed[field.name] = (
                    tuple(pin(key, name) for name in value) if several else pin(key, value, begun.get(key, ""))
                )
        changed = {name: value for name, value in changed.items() if value != getattr(node, name)}
        return replace(node, **changed) if changed else node

    return walk(cfg, "")


def pin(option: str, name: str, begun: str = "") -> str:
    """Return the name with its commit and file, which then lies in the cache; a path stays what it is.

    A name that has both already is left alone; `begun` is such a name of the same run. Raises UserError, which begins
    with the option, where the data set cannot be had, or has several files.
    """
    wanted = parse(name)
    if wanted is None or (_COMMIT.fullmatch(wanted.revision) and wanted.file):
        return name
    if Path(wanted.repo.partition("/")[0]).is_dir() and not wanted.file:
        raise UserError(f"{option}={name}: no such file (a data set of the Hub in a folder's place: OWNER/NAME:FILE)")
    before = parse(begun)
    if before and not wanted.revision and before.repo == wanted.repo and wanted.file in ("", before.file):
        wanted = before
    pinned, path = _fetch(f"{option}={name}", wanted)
    if _is_main():
        as_begun = ", as the run was begun" if pinned == before else ""
        print(f"{option}: {pinned} ({path.stat().st_size / 1e6:,.1f} MB, in {path.parent}){as_begun}", flush=True)
    return str(pinned)


def _begun_with(cfg: Any) -> dict[str, str]:
    """Return data.train and data.valid of the run's folder; {} for a new run."""
    import yaml

    folder = Path(cfg.run.dir) / cfg.run.name
    try:
        data = yaml.safe_load((folder / "config.yaml").read_text())["data"]
        begun = {f"data.{name}": data[name] for name in ("train", "valid")}
        changes = folder / "changes.jsonl"
        for line in changes.read_text().splitlines() if changes.exists() else ():
            begun |= {key: now for key, (_, now) in json.loads(line)["changes"].items() if key in begun}
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError):
        return {}  # a new run, or a folder of which check_run_folder says what is wrong
    return begun


def local_file(name: str) -> Path:
    """Return the file of a pinned name, fetched unless it lies in the cache; of a path, that path. Raises UserError."""
    wanted = parse(name)
    if wanted is None:
        return Path(name)
    return _cached(wanted) or _fetch(name, wanted)[1]


def check_hub_model(option: str, name: str) -> None:
    """Raise UserError where a model is no folder, not in the cache, and not on the Hub either, or that is out of reach.

    transformers finds that out too, but only after minutes of retries.
    """
    from huggingface_hub import try_to_load_from_cache

    if not Path(name).is_dir() and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        with said(f"{option}={name}", name, "model", lead="no such folder here, and "):
            remote_files(name, "model")


def source_of(name: str) -> str:
    """Return the data source of rows that name none: the data set's name on the Hub; "" for a path."""
    wanted = parse(name)
    return wanted.repo.partition("/")[2] if wanted else ""


def _choose(what: str, wanted: HubFile, files: list[str]) -> str:
    data = [file for file in files if file.endswith(SUFFIXES)]
    if wanted.file in files:
        return wanted.file
    pattern = wanted.file or (CATALOG[wanted.repo].train if wanted.repo in CATALOG else "")
    found = [file for file in data if fnmatch(file, pattern)] or ([] if wanted.file else data)
    if len(found) == 1:
        return found[0]
    listed = ", ".join((found or data)[:8]) + (", ..." if len(found or data) > 8 else "")
    if not data:
        raise UserError(
            f"{what}: the data set has no parquet, jsonl or json file; see https://hf.co/datasets/{wanted.repo}"
        )
    if not found:
        raise UserError(f"{what}: the data set has no {wanted.file}; choose one of {listed}")
    raise UserError(f"{what}: the data set has {len(found)} files; choose one: {wanted.repo}:FILE, of {listed}")


def _cached(wanted: HubFile) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(wanted.repo, wanted.file, revision=wanted.revision, repo_type="dataset")
    return Path(path) if isinstance(path, str) else None


def _fetch(what: str, wanted: HubFile) -> tuple[HubFile, Path]:
    """Fetch a file into the cache, unless it is there, and compare its bytes with the checksum on the Hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    if not _is_main():
        disable_progress_bars()
    if _COMMIT.fullmatch(wanted.revision) and wanted.file and (path := _cached(wanted)):
        return wanted, path
    with said(what, wanted.repo, "dataset", lead="no file here, and "):
        commit, files = remote_files(wanted.repo, "dataset", wanted.revision)
        found = HubFile(wanted.repo, commit, _choose(what, wanted, list(files)))
        if path := _cached(found):
            return found, path
        path = Path(hf_hub_download(found.repo, found.file, repo_type="dataset", revision=commit))
    digest = files[found.file].digest
    if digest and digest_of(path, like=digest) != digest:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise UserError(f"{what}: came with a wrong checksum and was thrown away; run the same command again")
    return found, path


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"
