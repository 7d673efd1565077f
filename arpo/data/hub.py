"""Data sets of the Hub by name: OWNER/NAME, OWNER/NAME:FILE, OWNER/NAME@REVISION:FILE.

    name = pin("data.train", "openai/gsm8k:main/train-00000-of-00001.parquet")    # fetched
    # "openai/gsm8k@e53f048856ff4f594e959d75785d2c2d37b678ee:main/train-00000-of-00001.parquet"
    local_file(name)    # the file, in the Hub's cache

A config is pinned before torch is imported, so that a mistake shows at once, and what a run's config.yaml has is the
commit: a run goes on with the rows that it was begun with, whatever happens to the data set. Files lie in the Hub's own
cache (HF_HOME), whose lock lets one rank of a disk fetch. HF_ENDPOINT names a mirror, HF_TOKEN opens what is behind a
form, and HF_HUB_OFFLINE=1 keeps to the cache.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from arpo.errors import UserError

SUFFIXES = (".parquet", ".jsonl", ".json")
TIMEOUT_S = 30.0
TRAIN_FILES = {
    "PeterJinGo/nq_hotpotqa_train": "train.parquet",
    "dongguanting/ARPO-SFT-54K": "final_*.jsonl",
    "dongguanting/ARPO-RL-Reasoning-10K": "train_10k.parquet",
    "dongguanting/ARPO-RL-DeepSearch-1K": "hard_search*.parquet",
}
"""The papers' data sets and Search-R1's: pattern of the file to train on, which may have others beside it."""
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[^:]+))?(?::(?P<file>.+))?")
_ADDRESS = re.compile(
    r"(?:hf://|https://huggingface\.co/)datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?"
    r"(?:/(?:blob|resolve|tree)/(?P<branch>[^/]+))?(?:/(?P<file>[^?]+?))?/?(?:\?.*)?"
)
"""Addresses of a data set or its file, as the Hub's pages and its file system have them."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class HubFile:
    """A file of a data set on the Hub; parts that the name leaves open are empty."""

    repo: str
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}:{self.file}"

    @property
    def is_pinned(self) -> bool:
        return bool(_COMMIT.fullmatch(self.revision) and self.file)


def parse(name: str) -> HubFile | None:
    """Return what a name or an address says of the Hub; None for a path. OWNER/FILE.parquet is a path, and so is what
    exists."""
    if at := _ADDRESS.fullmatch(name):
        return HubFile(at["repo"], at["revision"] or at["branch"] or "", at["file"] or "")
    match = _NAME.fullmatch(name)
    if not match or Path(name).exists() or (name.endswith(SUFFIXES) and not match["file"]):
        return None
    return HubFile(match["repo"], match["revision"] or "", match["file"] or "")


def pin(option: str, name: str, begun: str = "") -> str:
    """Return the name with its commit and file, which then lies in the cache; a path stays what it is.

    A name that has both already is left alone; `begun` is such a name of the same run. Raises UserError, which begins
    with the option, where the data set cannot be had, or has several files.
    """
    wanted = parse(name)
    if wanted is None or wanted.is_pinned:
        return str(wanted or name)
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


def local_file(name: str) -> Path:
    """Return the file of a pinned name, fetched unless it lies in the cache; of a path, that path. Raises UserError."""
    wanted = parse(name)
    return _fetch(name, wanted)[1] if wanted else Path(name)


def source_of(name: str) -> str:
    """Return the data source of rows that name none: the data set's name on the Hub; "" for a path."""
    wanted = parse(name)
    return wanted.repo.partition("/")[2] if wanted else ""


def check_hub_model(option: str, name: str) -> None:
    """Raise UserError where a model is no folder, not in the cache, and not on the Hub either, or that is out of reach.

    transformers finds that out too, but only after minutes of retries.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    _check_answers()
    if not Path(name).is_dir() and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        with _said(f"{option}={name}", name, "model", lead="no such folder here, and "):
            HfApi().model_info(name, timeout=TIMEOUT_S)


def _checked(commit: str | None) -> str:
    """Return the commit that the server says. Raises ValueError."""
    if not _COMMIT.fullmatch(commit or ""):
        raise ValueError(f"not the Hub's answer: commit {commit}")
    return commit


def _check_answers() -> None:
    """Have every answer that huggingface_hub gets looked at, also those to questions of its own and of transformers'.

    It names files of the cache after the commit and the checksum that the server says, and a mirror's could point out
    of the cache.
    """
    from huggingface_hub import get_session

    session = get_session()
    hooks = session.event_hooks
    if _check_answer not in hooks["response"]:
        session.event_hooks = hooks | {"response": [*hooks["response"], _check_answer]}


def _check_answer(response: Any) -> None:
    """Raise ValueError for a commit or a checksum that is none."""
    if (commit := response.headers.get("X-Repo-Commit")) is None:  # no file of a repository
        return
    etag = response.headers.get("X-Linked-Etag") or response.headers.get("ETag") or "0" * 40
    if not _COMMIT.fullmatch(commit) or not _DIGEST.fullmatch(etag.removeprefix("W/").strip('"')):
        raise ValueError(f"not the Hub's answer: commit {commit}, checksum {etag}")


def _fetch(what: str, wanted: HubFile) -> tuple[HubFile, Path]:
    """Fetch a file into the cache, unless it is there, and compare its bytes with the checksum on the Hub."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import disable_progress_bars

    _check_answers()
    if not _is_main():
        disable_progress_bars()
    with _said(what, wanted.repo, "data set", lead="no file here, and "):
        if not wanted.is_pinned:
            commit, files = _commit_and_files(wanted)
            wanted = HubFile(wanted.repo, commit, _choose(what, wanted, files))
        repo, commit, file = wanted.repo, wanted.revision, wanted.file
        cached = try_to_load_from_cache(repo, file, repo_type="dataset", revision=commit)
        if isinstance(cached, str):
            return wanted, Path(cached)
        digest = get_hf_file_metadata(hf_hub_url(repo, file, repo_type="dataset", revision=commit)).etag
        path = Path(hf_hub_download(repo, file, repo_type="dataset", revision=commit))
    if _digest_of(path, like=digest) != digest:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise UserError(f"{what}: came with a wrong checksum and was thrown away; run the same command again")
    return wanted, path


def _commit_and_files(wanted: HubFile) -> tuple[str, list[str]]:
    """Return the commit of the revision and the names of its files; with HF_HUB_OFFLINE=1, the newest in the cache."""
    from huggingface_hub import HfApi, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound, OfflineModeIsEnabled

    wish = wanted.revision
    with suppress(OfflineModeIsEnabled):
        info = HfApi().dataset_info(wanted.repo, revision=wish or None, timeout=TIMEOUT_S)
        return _checked(info.sha), [one.rfilename for one in info.siblings or ()]
    with suppress(CacheNotFound):
        repos = [one for one in scan_cache_dir().repos if (one.repo_id, one.repo_type) == (wanted.repo, "dataset")]
        there = [c for repo in repos for c in repo.revisions if not wish or wish in (c.commit_hash, *c.refs)]
        if newest := max(there, key=lambda commit: commit.last_modified, default=None):
            return newest.commit_hash, [str(f.file_path.relative_to(newest.snapshot_path)) for f in newest.files]
    raise OfflineModeIsEnabled(wanted.repo)


def _choose(what: str, wanted: HubFile, files: list[str]) -> str:
    if wanted.file in files:
        return wanted.file
    data = [file for file in files if file.endswith(SUFFIXES)]
    pattern = wanted.file or TRAIN_FILES.get(wanted.repo, "*")
    found = [file for file in data if fnmatch(file, pattern)]
    if len(found) == 1:
        return found[0]
    listed = ", ".join((found or data)[:8]) or "no parquet, jsonl or json file"
    raise UserError(f"{what}: {len(found)} files fit; choose one: {wanted.repo}:FILE; the data set has {listed}")


def _digest_of(path: Path, like: str) -> str:
    """Return the digest of a file's bytes, in the kind of `like`: git's SHA-1 has 40 digits, SHA-256 has 64."""
    git = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256" if len(like) == 64 else git.copy).hexdigest()


@contextmanager
def _said(what: str, repo: str, kind: str, lead: str) -> Iterator[None]:
    """Turn the Hub's errors into a UserError that begins with `what`, and says what to do. `lead` stands before those
    that a misspelt path has too."""
    from huggingface_hub import errors

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    page = f"{endpoint}/{'' if kind == 'model' else 'datasets/'}{repo}"
    token = f"HF_TOKEN (now {'set' if os.environ.get('HF_TOKEN') else 'not set'})"
    try:
        yield
        return
    except errors.GatedRepoError:
        reason = f"behind a form; accept it at {page}, then set {token}"
    except errors.RepositoryNotFoundError:
        reason = f"{lead}{endpoint} has no {kind} {repo}, or a private one: correct the name, or set {token}"
    except errors.HfHubHTTPError as error:  # no such revision, a token that is not valid, a Hub that is down
        reason = f"{page}: {_short(error)}; correct the name, set {token}, or try again later"
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.HTTPError) as error:
        fix = "try again, check the proxy, set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to take what the cache has"
        reason = f"{lead}{endpoint} cannot be reached, or broke off; {fix} ({_short(error)})"
        if os.environ.get("HF_HUB_OFFLINE"):
            reason = f"{lead}it is not in the Hub's cache, and HF_HUB_OFFLINE is set"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # a full disk, a name that cannot be, a server that is no Hub
        reason = f"{_short(error)}; check the name, HF_ENDPOINT and the disk's space, and run the same command again"
    raise UserError(f"{what}: {reason}")


def _short(error: Exception) -> str:
    return " ".join(str(error.__cause__ or error).split())[:160] or type(error).__name__


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"
