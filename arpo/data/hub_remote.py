"""The Hub's description of a repository and its files, and its errors as one line each.

HF_ENDPOINT names a mirror, HF_TOKEN opens what is behind a form, and HF_HUB_OFFLINE=1 keeps to the cache.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from arpo.errors import UserError

Kind = Literal["dataset", "model"]
TIMEOUT_S = 30.0
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file as the Hub describes it."""

    size: int
    digest: str
    """SHA-256 of its bytes (large files), or git's SHA-1 of them (small ones); "" where neither is published."""


def remote_files(repo: str, kind: Kind, revision: str = "") -> tuple[str, dict[str, RemoteFile]]:
    """Return the commit of a revision ("" = main), and its files by name; with HF_HUB_OFFLINE=1, those in the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        info = HfApi().repo_info(
            repo, repo_type=kind, revision=revision or None, files_metadata=True, timeout=TIMEOUT_S
        )
    except OfflineModeIsEnabled:
        return _cached_files(repo, kind, revision)
    found = {}
    for one in info.siblings or ():
        digest = (one.lfs.sha256 if one.lfs else one.blob_id) or ""
        found[one.rfilename] = RemoteFile(one.size or 0, digest if _DIGEST.fullmatch(digest) else "")
    return info.sha, found


def _cached_files(repo: str, kind: Kind, revision: str) -> tuple[str, dict[str, RemoteFile]]:
    """Return the same of the commit in the cache, the newest one unless a revision is given."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound, OfflineModeIsEnabled

    try:
        repos = [one for one in scan_cache_dir().repos if (one.repo_id, one.repo_type) == (repo, kind)]
    except CacheNotFound:
        repos = []
    commits = [c for one in repos for c in one.revisions if not revision or revision in (c.commit_hash, *c.refs)]
    if not commits:
        raise OfflineModeIsEnabled(repo)
    newest = max(commits, key=lambda commit: commit.last_modified)
    names = {str(file.file_path.relative_to(newest.snapshot_path)): file for file in newest.files}
    return newest.commit_hash, {name: RemoteFile(file.size_on_disk, "") for name, file in names.items()}


def digest_of(path: Path, like: str) -> str:
    """Return the digest of a file's bytes, in the kind of `like`: git's SHA-1 has 40 digits, SHA-256 has 64."""
    with path.open("rb") as file:
        if len(like) == 64:
            return hashlib.file_digest(file, "sha256").hexdigest()
        start = hashlib.sha1(b"blob %d\0" % path.stat().st_size)
        return hashlib.file_digest(file, start.copy).hexdigest()


@contextmanager
def said(what: str, repo: str, kind: Kind, lead: str = "") -> Iterator[None]:
    """Turn the Hub's errors into a UserError that begins with `what`, and says what to do. `lead` stands before those
    that a misspelt path has too."""
    from huggingface_hub import errors

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    page = f"{endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    token = "set" if os.environ.get("HF_TOKEN") else "not set"
    try:
        yield
    except errors.GatedRepoError:
        raise UserError(f"{what}: behind a form; accept it at {page}, then set HF_TOKEN (now {token})") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{what}: {page} has no such revision (@...)") from None
    except errors.RepositoryNotFoundError:
        kinds = "data set" if kind == "dataset" else "model"
        raise UserError(
            f"{what}: {lead}{endpoint} has no {kinds} {repo}, or a private one: correct the name, or set "
            f"HF_TOKEN (now {token})"
        ) from None
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        if os.environ.get("HF_HUB_OFFLINE"):
            raise UserError(f"{what}: {lead}it is not in the Hub's cache, and HF_HUB_OFFLINE is set") from None
        raise UserError(f"{what}: {lead}{_unreachable(endpoint)} ({_reason(error)})") from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        fix = f"set HF_TOKEN (now {token}) to a token that is valid" if code in (401, 403) else "try again later"
        raise UserError(f"{what}: {endpoint} answered HTTP {code}; {fix}") from None
    except errors.HTTPError as error:
        raise UserError(f"{what}: {lead}{_unreachable(endpoint)} ({_reason(error)})") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(f"{what}: the disk is full; make room, or take another (--out, HF_HOME)") from None
        raise UserError(f"{what}: {_reason(error)}; run the same command again") from None


def _unreachable(endpoint: str) -> str:
    return (
        f"{endpoint} cannot be reached; check the network or the proxy, set HF_ENDPOINT to a mirror, or "
        "HF_HUB_OFFLINE=1 to take what the cache has"
    )


def _reason(error: Exception) -> str:
    return " ".join(str(error.__cause__ or error).split())[:160] or type(error).__name__
