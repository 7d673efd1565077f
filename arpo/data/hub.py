"""Data sets and models of the Hub by name: OWNER/NAME, OWNER/NAME:FILE, OWNER/NAME@REVISION:FILE.

    name = pin("data.train", "openai/gsm8k:main/train-00000-of-00001.parquet")    # fetched
    # "openai/gsm8k@e53f048856ff4f594e959d75785d2c2d37b678ee:main/train-00000-of-00001.parquet"
    local_file(name)    # the file, in the Hub's cache
    model_folder("Qwen/Qwen3-0.6B")    # .../models--Qwen--Qwen3-0.6B/snapshots/COMMIT, fetched

Names are pinned to a commit before torch is imported, so that a mistake shows at once. The commit is in the run's
config.yaml, so a resumed run reads the same rows, even if the data set has changed. huggingface_hub's settings hold:
cache (HF_HOME), mirror (HF_ENDPOINT), token (HF_TOKEN), and HF_HUB_OFFLINE=1.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
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
"""The papers' data sets and Search-R1's: pattern of the file to train on, since these have several files."""
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[^:]+))?(?::(?P<file>.+))?")
_REVISION = r"refs/(?:convert|pr)/[^/?]+|refs%2F(?:convert|pr)%2F[^/?]+|[^/?]+"
_ADDRESS = re.compile(
    rf"(?:hf://|https://huggingface\.co/)datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>{_REVISION}))?"
    rf"(?:/(?:blob|resolve|tree)/(?P<branch>{_REVISION}))?(?:/(?P<file>[^?]+?))?/?(?:\?.*)?"
)
"""Addresses of a data set or a file, as on the Hub's pages and in the Hub's file system. All parts are URL-quoted."""
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
"""The end of a model folder's path in the Hub's cache."""
SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken", "README.md")
"""Endings of the names of a model's files other than weights."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class HubFile:
    """A file of a data set on the Hub. Fields that the name does not give are empty."""

    repo: str
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}:{self.file}"

    @property
    def is_pinned(self) -> bool:
        return bool(_COMMIT.fullmatch(self.revision) and self.file)


def parse(name: str) -> HubFile | None:
    """Return the Hub file of a name or an address. Return None for a local path: it exists, or it ends like a data file
    (OWNER/FILE.parquet)."""
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


def pin(option: str, name: str, previous: Sequence[str] = ()) -> str:
    """Return the name with commit and file. A path, and a name with both, is returned unchanged.

    `previous` are the pinned names of a resumed run. The first one that fits `name` is returned: it has the same data
    set, and `name` asks for no revision and no other file.
    Raises UserError, which begins with the option, if the data set cannot be fetched or has several files.
    """
    wanted = parse(name)
    if wanted is None or wanted.is_pinned:
        return str(wanted or name)
    if Path(wanted.repo.partition("/")[0]).is_dir() and not wanted.file:
        fix = "for a data set of the Hub with the same name, write OWNER/NAME:FILE"
        raise UserError(f"{option}={name}: no such file here; {fix}")
    for earlier in previous:
        before = parse(earlier)
        is_same_repo = before and before.repo == wanted.repo
        if is_same_repo and not wanted.revision and wanted.file in ("", before.file):
            return earlier
    path, pinned = _fetch(f"{option}={name}", wanted)
    if os.environ.get("RANK", "0") == "0":
        print(f"{option}: {pinned} ({path.stat().st_size / 1e6:,.1f} MB, in {path.parent})", flush=True)
    return str(pinned)


def local_file(name: str) -> Path:
    """Return the local path of a name. A file that is not in the cache is fetched. Raises UserError."""
    wanted = parse(name)
    if wanted is None:  # `name` is a path
        return Path(name)
    path, _ = _fetch(name, wanted)
    return path


def source_of(name: str) -> str:
    """Return the data source for rows without one: the data set's name on the Hub; "" for a path."""
    wanted = parse(name)
    return wanted.repo.partition("/")[2] if wanted else ""


def model_folder(name: str, *, option: str = "model.path", previous: str = "", weights: bool = True) -> Path:
    """Return a model's folder: `name` if it is a folder; for OWNER/NAME[@REVISION] the folder in the Hub's cache.

    All files that a run needs are fetched, so that it does not ask the Hub again later. `previous` is the folder of a
    resumed run: its commit is kept unless `name` asks for a revision. If the Hub does not answer, the commit in the
    cache is taken. Raises UserError.
    """
    from huggingface_hub import HfApi, errors, hf_hub_download, try_to_load_from_cache

    if Path(name).is_dir():
        return Path(name)
    _check_answers()
    repo, _, revision = name.partition("@")
    previous_repo, _, previous_revision = hub_name(previous).partition("@")
    if previous_repo == repo and not revision:
        revision = previous_revision
    with _errors_of_hub(f"{option}={name}", repo):
        try:
            info = HfApi().model_info(repo, revision=revision or None, timeout=TIMEOUT_S)
        except (errors.OfflineModeIsEnabled, errors.HTTPError):
            cached = try_to_load_from_cache(repo, "config.json", revision=revision or None)
            if not isinstance(cached, str):
                raise
            return Path(cached).parent
        commit = revision if _COMMIT.fullmatch(revision) else info.sha
        files = [sibling.rfilename for sibling in info.siblings or () if sibling.rfilename]
        fetched = {file: Path(hf_hub_download(repo, file, revision=commit)) for file in files if _is_small(file)}
        if "config.json" not in fetched:
            raise UserError(f"{option}={name}: no config.json there; it must be a model in Hugging Face's format")
        if weights:
            index = fetched.get("model.safetensors.index.json")
            for file in _weights_of(index and json.loads(index.read_text()), files):
                hf_hub_download(repo, file, revision=commit)
    return fetched["config.json"].parent


def hub_name(path: str) -> str:
    """Return OWNER/NAME@COMMIT for a model's folder in the Hub's cache; any other path is returned unchanged."""
    match = _SNAPSHOT.search(path)
    return f"{match['owner']}/{match['name']}@{match['commit']}" if match else path


def _is_small(file: str) -> bool:
    """Return True for a file of a model's repository that a run may need, apart from weights."""
    return file.endswith(SMALL) and ("/" not in file or file.startswith("additional_chat_templates/"))


def _weights_of(index: dict[str, Any] | None, files: list[str]) -> list[str]:
    """Return the weight files to fetch. A repository may have the same weights a second time in other files."""
    if index:
        return sorted(set(index.get("weight_map", {}).values()))
    if "model.safetensors" in files:
        return ["model.safetensors"]
    return [file for file in files if file.endswith(".safetensors") and "/" not in file]


def _check_answers() -> None:
    """Check each answer that huggingface_hub gets, also for requests of transformers.

    It names the files of its cache by the commit and checksum in the answer. Those of a hostile mirror could point out
    of the cache.
    """
    from huggingface_hub import get_session

    session = get_session()
    hooks = session.event_hooks
    if _check_answer not in hooks["response"]:
        session.event_hooks = hooks | {"response": [*hooks["response"], _check_answer]}


def _check_answer(response: Any) -> None:
    """Raise ValueError if the commit or the checksum is not a hexadecimal digest."""
    commit = response.headers.get("X-Repo-Commit")
    if commit is None:  # not about a file of a repository
        return
    etag = response.headers.get("X-Linked-Etag") or response.headers.get("ETag") or "0" * 40
    if not _COMMIT.fullmatch(commit) or not _DIGEST.fullmatch(etag.removeprefix("W/").strip('"')):
        raise ValueError(f"not the Hub's answer: commit {commit}, checksum {etag}")


def _fetch(subject: str, wanted: HubFile) -> tuple[Path, HubFile]:
    """Fetch a file that is not in the cache. Return path and pinned name of the file. Errors begin with `subject`."""
    from huggingface_hub import hf_hub_download

    _check_answers()
    with _errors_of_hub(subject, f"datasets/{wanted.repo}"):
        file = wanted.file or _only_file(subject, wanted)
        path = Path(hf_hub_download(wanted.repo, file, repo_type="dataset", revision=wanted.revision or None))
    commit = path.parents[file.count("/")].name  # .../snapshots/COMMIT/FILE
    return path, HubFile(wanted.repo, commit, file)


def _only_file(subject: str, wanted: HubFile) -> str:
    """Return the data set's file to train on; with HF_HUB_OFFLINE=1, among those in the cache.

    Raises UserError if several files fit.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    revision = wanted.revision or None
    try:
        info = HfApi().dataset_info(wanted.repo, revision=revision, timeout=TIMEOUT_S)
        files = [sibling.rfilename for sibling in info.siblings or ()]
    except OfflineModeIsEnabled:
        folder = Path(snapshot_download(wanted.repo, repo_type="dataset", revision=revision))
        files = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    data_files = [file for file in files if file.endswith(SUFFIXES)]
    fitting = [file for file in data_files if fnmatch(file, TRAIN_FILES.get(wanted.repo, "*"))]
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join((fitting or data_files)[:8]) or "no parquet, jsonl or json file"
    raise UserError(f"{subject}: {len(fitting)} files fit; choose one: {wanted.repo}:FILE; the data set has {listed}")


@contextmanager
def _errors_of_hub(subject: str, page: str) -> Iterator[None]:
    """Turn the Hub's errors into a UserError with the way out. It begins with `subject`."""
    from huggingface_hub import constants, errors

    page = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co').rstrip('/')}/{page}"
    try:
        yield
        return
    except errors.GatedRepoError:
        reason = f"behind a form; accept it at {page}, then set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = f"no such file here, and {page} does not exist or is private; correct the name, or set HF_TOKEN"
    except errors.RemoteEntryNotFoundError:
        reason = f"no such file; choose one of {page}/tree/main"
    except errors.HfHubHTTPError as error:  # no such revision, a token that is not valid, a Hub that is down
        reason = f"{page}: {_short(error)}; correct the name, set HF_TOKEN, or try again later"
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.HTTPError) as error:
        fix = "check the proxy, set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to take what the cache has"
        reason = f"not here, and {page} cannot be reached ({_short(error)}); {fix}"
        if constants.HF_HUB_OFFLINE:
            reason = "not here, and it is not in the Hub's cache, and HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    except (OSError, ValueError) as error:  # a full disk, a name that cannot be
        reason = f"{_short(error)}; check the name, HF_ENDPOINT and the disk's space, and run the same command again"
    raise UserError(f"{subject}: {reason}")


def _short(error: Exception) -> str:
    """Return the error's cause in one line of at most 160 characters."""
    return " ".join(str(error.__cause__ or error).split())[:160] or type(error).__name__
