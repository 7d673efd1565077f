"""Data sets and models of the Hub by name: OWNER/NAME, OWNER/NAME:FILE, OWNER/NAME@REVISION:FILE.

    name = pin("data.train", "openai/gsm8k:main/train-00000-of-00001.parquet")    # fetched
    # "openai/gsm8k@e53f048856ff4f594e959d75785d2c2d37b678ee:main/train-00000-of-00001.parquet"
    local_file(name)    # the file, in the Hub's cache
    model_folder("Qwen/Qwen3-0.6B")    # .../models--Qwen--Qwen3-0.6B/snapshots/COMMIT, fetched

A config is pinned before torch is imported, so that a mistake shows at once. A run's config.yaml has the commit: the
run goes on with the rows that it was begun with, whatever happens to the data set. Cache (HF_HOME), mirror
(HF_ENDPOINT), token (HF_TOKEN) and HF_HUB_OFFLINE=1 are huggingface_hub's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from arpo.errors import UserError

SUFFIXES = (".parquet", ".jsonl", ".json")
ALSO_READ = (".csv", ".gz")
TIMEOUT_S = 30.0
TRAIN_FILES = {
    "PeterJinGo/nq_hotpotqa_train": "train.parquet",
    "dongguanting/ARPO-SFT-54K": "final_*.jsonl",
    "dongguanting/ARPO-RL-Reasoning-10K": "train_10k.parquet",
    "dongguanting/ARPO-RL-DeepSearch-1K": "hard_search*.parquet",
}
"""The papers' data sets and Search-R1's: pattern of the file to train on, which may have others beside it."""
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[^:]+))?(?::(?P<file>.+))?")
_REVISION = r"refs/(?:convert|pr)/[^/?]+|refs%2F(?:convert|pr)%2F[^/?]+|[^/?]+"
_ADDRESS = re.compile(
    rf"(?:hf://|https://huggingface\.co/)datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>{_REVISION}))?"
    rf"(?:/(?:blob|resolve|tree)/(?P<branch>{_REVISION}))?(?:/(?P<file>[^?]+?))?/?(?:\?.*)?"
)
"""Addresses of a data set or its file, as the Hub's pages and its file system have them. Their parts are URL-quoted."""
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
"""The end of a model's folder in the Hub's cache."""
SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken", "README.md")
"""Ends of the names of a model's files, but for weights."""
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
    """Return what a name or an address says of the Hub; None for a path: what exists, or OWNER/FILE.parquet."""
    if at := _ADDRESS.fullmatch(name):
        file = at["file"] or ""
        is_quoted = name.startswith("https:")  # hf:// quotes revisions alone
        return HubFile(
            repo=at["repo"],
            revision=unquote(at["revision"] or at["branch"] or ""),
            file=unquote(file) if is_quoted else file,
        )
    match = _NAME.fullmatch(name)
    if not match or Path(name).exists() or (name.endswith(SUFFIXES + ALSO_READ) and not match["file"]):
        return None
    return HubFile(match["repo"], match["revision"] or "", match["file"] or "")


def pin(option: str, name: str, begun: str = "") -> str:
    """Return the name with its commit and file; a path, and a name that has both already, stays what it is.

    `begun` is the pinned name of the same run: it stays while `name` asks for no other revision or file. Raises
    UserError, which begins with the option, where the data set cannot be had, or has several files.
    """
    wanted, before = parse(name), parse(begun)
    if wanted is None or wanted.is_pinned:
        return str(wanted or name)
    if Path(wanted.repo.partition("/")[0]).is_dir() and not wanted.file:
        raise UserError(f"{option}={name}: no such file (a data set of the Hub in a folder's place: OWNER/NAME:FILE)")
    if before and before.repo == wanted.repo and not wanted.revision and wanted.file in ("", before.file):
        return begun
    path, pinned = _fetch(f"{option}={name}", wanted)
    if os.environ.get("RANK", "0") == "0":
        print(f"{option}: {pinned} ({path.stat().st_size / 1e6:,.1f} MB, in {path.parent})", flush=True)
    return str(pinned)


def local_file(name: str) -> Path:
    """Return the file of a pinned name, fetched unless it lies in the cache; of a path, that path. Raises UserError."""
    wanted = parse(name)
    return _fetch(name, wanted)[0] if wanted else Path(name)


def source_of(name: str) -> str:
    """Return the data source of rows that name none: the data set's name on the Hub; "" for a path."""
    wanted = parse(name)
    return wanted.repo.partition("/")[2] if wanted else ""


def model_folder(name: str, *, option: str = "model.path", begun: str = "", weights: bool = True) -> Path:
    """Return a model's folder: `name` itself, or of OWNER/NAME or OWNER/NAME@REVISION the folder in the Hub's cache,
    with all that a run needs of it fetched. Later no question goes to the Hub.

    `begun` is the folder of the same run: its commit stays while `name` asks for no revision. Where the Hub does not
    answer, the cache's commit is taken. Raises UserError.
    """
    from huggingface_hub import HfApi, errors, hf_hub_download, try_to_load_from_cache

    if Path(name).is_dir():
        return Path(name)
    _check_answers()
    repo, _, revision = name.partition("@")
    if hub_name(begun).partition("@")[0] == repo and not revision:
        revision = hub_name(begun).partition("@")[2]
    with _said(f"{option}={name}", repo):
        try:
            info = HfApi().model_info(repo, revision=revision or None, timeout=TIMEOUT_S)
        except (errors.OfflineModeIsEnabled, errors.HTTPError):
            cached = try_to_load_from_cache(repo, "config.json", revision=revision or None)
            if not isinstance(cached, str):
                raise
            return Path(cached).parent
        commit = revision if _COMMIT.fullmatch(revision) else info.sha
        listed = [one.rfilename for one in info.siblings or () if one.rfilename]
        fetched = {file: Path(hf_hub_download(repo, file, revision=commit)) for file in listed if _is_small(file)}
        if "config.json" not in fetched:
            raise UserError(f"{option}={name}: no config.json there; it must be a model in Hugging Face's format")
        index = fetched.get("model.safetensors.index.json")
        for file in _weights_of(index and json.loads(index.read_text()), listed) if weights else ():
            hf_hub_download(repo, file, revision=commit)
    return fetched["config.json"].parent


def hub_name(path: str) -> str:
    """Return OWNER/NAME@COMMIT for a model's folder in the Hub's cache; any other path is returned as it is."""
    found = _SNAPSHOT.search(path)
    return f"{found['owner']}/{found['name']}@{found['commit']}" if found else path


def _is_small(file: str) -> bool:
    """Return whether a file of a model's repository is none of its weights, and may be needed."""
    return file.endswith(SMALL) and ("/" not in file or file.startswith("additional_chat_templates/"))


def _weights_of(index: dict[str, Any] | None, listed: list[str]) -> list[str]:
    """Return the weights to fetch: a repository may have the same ones again in other files."""
    if index:
        return sorted(set(index.get("weight_map", {}).values()))
    whole = "model.safetensors"
    return [whole] if whole in listed else [f for f in listed if f.endswith(".safetensors") and "/" not in f]


def _check_answers() -> None:
    """Have every answer that huggingface_hub gets looked at, also those to questions of transformers: it names files of
    its cache after the server's commit and checksum, and a mirror's could point out of the cache."""
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


def _fetch(what: str, wanted: HubFile) -> tuple[Path, HubFile]:
    """Return the file in the cache, fetched unless it is there, and its pinned name."""
    from huggingface_hub import hf_hub_download

    _check_answers()
    with _said(what, f"datasets/{wanted.repo}"):
        file = wanted.file or _only_file(what, wanted)
        path = Path(hf_hub_download(wanted.repo, file, repo_type="dataset", revision=wanted.revision or None))
    commit = path.parents[file.count("/")].name  # .../snapshots/COMMIT/FILE
    return path, HubFile(wanted.repo, commit, file)


def _only_file(what: str, wanted: HubFile) -> str:
    """Return the file to train on; with HF_HUB_OFFLINE=1, of those in the cache. Raises UserError for several."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    revision = wanted.revision or None
    try:
        info = HfApi().dataset_info(wanted.repo, revision=revision, timeout=TIMEOUT_S)
        files = [one.rfilename for one in info.siblings or ()]
    except OfflineModeIsEnabled:
        folder = Path(snapshot_download(wanted.repo, repo_type="dataset", revision=revision))
        files = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    data = [file for file in files if file.endswith(SUFFIXES)]
    found = [file for file in data if fnmatch(file, TRAIN_FILES.get(wanted.repo, "*"))]
    if len(found) == 1:
        return found[0]
    listed = ", ".join((found or data)[:8]) or "no parquet, jsonl or json file"
    raise UserError(f"{what}: {len(found)} files fit; choose one: {wanted.repo}:FILE; the data set has {listed}")


@contextmanager
def _said(what: str, page: str) -> Iterator[None]:
    """Turn the Hub's errors into a UserError that begins with `what`, and says what to do."""
    from huggingface_hub import errors

    page = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{page}"
    try:
        yield
        return
    except errors.GatedRepoError:
        reason = f"behind a form; accept it at {page}, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = f"not here, and no {page}, or a private one: correct the name, or set HF_TOKEN"
    except errors.RemoteEntryNotFoundError:
        reason = f"no such file; choose one of {page}/tree/main"
    except errors.HfHubHTTPError as error:  # no such revision, a token that is not valid, a Hub that is down
        reason = f"{page}: {_short(error)}; correct the name, set HF_TOKEN, or try again later"
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.HTTPError) as error:
        fix = "check the proxy, set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to take what the cache has"
        reason = f"not here, and {page} cannot be reached ({_short(error)}); {fix}"
        if os.environ.get("HF_HUB_OFFLINE"):
            reason = "not here, and it is not in the Hub's cache, and HF_HUB_OFFLINE is set"
    except (OSError, ValueError) as error:  # a full disk, a name that cannot be
        reason = f"{_short(error)}; check the name, HF_ENDPOINT and the disk's space, and run the same command again"
    raise UserError(f"{what}: {reason}")


def _short(error: Exception) -> str:
    return " ".join(str(error.__cause__ or error).split())[:160] or type(error).__name__
