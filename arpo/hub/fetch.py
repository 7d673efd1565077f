"""Fetching repositories of the Hub into folders: resumed after an interruption, and under its name only when checked.

OUT/.fetching/DIGEST    what has come of a file so far; a later call goes on at its end
OUT/train_10k.parquet   a file whose size and checksum are those that the Hub publishes
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

from arpo.data.hub_remote import Kind, RemoteFile, digest_of, remote_files, said
from arpo.errors import UserError

WANTED: dict[Kind, tuple[str, ...]] = {
    "dataset": ("*.parquet", "*.jsonl", "*.json"),
    "model": ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"),
}
"""Patterns of the files that are of use to us, at the top level of a model and anywhere in a data set."""
PARTS = ".fetching"


def fetch(repo: str, kind: Kind, out: Path, *, revision: str = "", say: Callable[[str], None] = print) -> list[Path]:
    """Fetch the files of a repository that are of use into `out`, and return them. Raises UserError.

    A file that is there already is not fetched again, but checked like the others.
    """
    with said(repo, repo, kind):
        commit, files = remote_files(repo, kind, revision)
        wanted = dict(_wanted(kind, files))
        if not wanted:
            raise UserError(f"{repo}: has none of {', '.join(WANTED[kind])}; is it a {kind}?")
        say(f"{repo}@{commit}: {len(wanted)} files, {sum(f.size for f in wanted.values()) / 1e6:,.1f} MB, into {out}")
        for name, file in wanted.items():
            if is_whole(out / name, file):
                say(f"  {name}: there already, {_checked(file)}")
                continue
            _fetch_file(repo, kind, commit, name, file, out)
            say(f"  {name}: {file.size:,} bytes, {_checked(file)}")
    if (out / PARTS).is_dir() and not any((out / PARTS).iterdir()):
        (out / PARTS).rmdir()
    return [out / name for name in wanted]


def is_whole(path: Path, file: RemoteFile) -> bool:
    """Return whether a file has the size and checksum that the Hub publishes of it."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return not file.digest or digest_of(path, like=file.digest) == file.digest


def _wanted(kind: Kind, files: dict[str, RemoteFile]) -> Iterator[tuple[str, RemoteFile]]:
    for name, file in sorted(files.items()):
        is_inside = ".." not in Path(name).parts and not Path(name).is_absolute()
        if (
            is_inside
            and any(fnmatch(name, pattern) for pattern in WANTED[kind])
            and (kind == "dataset" or "/" not in name)
        ):
            yield name, file


def _checked(file: RemoteFile) -> str:
    kinds = {64: "SHA-256 as published", 40: "git's checksum as published"}
    return kinds.get(len(file.digest), "size as published; there is no checksum")


def _fetch_file(repo: str, kind: Kind, commit: str, name: str, file: RemoteFile, out: Path) -> None:
    """Fetch one file, from where an earlier call was interrupted, and give it its name once it is checked.

    huggingface_hub's own downloads begin a file again after a kill; its `http_get` can go on.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    part = out / PARTS / (file.digest or f"{commit}-{name.replace('/', '--')}")
    part.parent.mkdir(parents=True, exist_ok=True)
    url = hf_hub_url(repo, name, repo_type=kind, revision=commit)
    location = get_hf_file_metadata(url).location
    headers = build_hf_headers()
    if urlsplit(location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is the Hub's, and no business of its CDN
    with part.open("ab") as stream:
        if stream.tell() > file.size:
            stream.truncate(0)
        http_get(
            location,
            stream,
            resume_size=stream.tell(),
            headers=headers,
            expected_size=file.size,
            displayed_filename=name,
        )
        stream.flush()
        os.fsync(stream.fileno())
    if not is_whole(part, file):
        part.unlink()
        raise UserError(f"{repo}: {name} came with a wrong checksum and was thrown away; run the same command again")
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    part.replace(out / name)
