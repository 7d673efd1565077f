"""Recognises the pages written by this user's viewer. A stranger's run may contain pages with foreign scripts.

The head of a page has a digest of the page's origin, and a checksum of origin and page. Only the holder of the user's
key can compute the checksum. It does not cover the data about the whole run, because this data is renewed each time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from functools import cache
from pathlib import Path

from arpo.config.bounded import read_file

PLACE = b"@@STAMP@@"
STAMP = re.compile(rb"arpo-view ([0-9a-f]{32}) ([0-9a-f]{32})")
STAMP_WITHIN = 1000
"""Number of bytes at the start of a page to search for the stamp."""
RUN_DATA = re.compile(rb'(<script type="application/json" id="run">)(.*?)(</script>)', re.DOTALL)


def sealed(page: bytes, origin: str) -> bytes:
    """Return a page with the stamp filled in. `origin`: 32 hexadecimal digits."""
    return page.replace(PLACE, f"arpo-view {origin} {_checksum(page, origin)}".encode(), 1)


def own_page(path: Path, origin: str | None = None) -> bytes | None:
    """Return a page written by this user's viewer, and made from `origin` if given. None for any other page."""
    try:
        with path.open("rb") as file:
            found = STAMP.search(file.read(STAMP_WITHIN)) if path.is_file() and not path.is_symlink() else None
        if found is None or (origin and found[1] != origin.encode()):
            return None
        page = read_file(path)
    except (OSError, ValueError):
        return None
    bare = page[: found.start()] + PLACE + page[found.end() :]
    is_own = hmac.compare_digest(_checksum(bare, found[1].decode()).encode(), found[2])
    return page if is_own else None


def _checksum(page: bytes, origin: str) -> str:
    lasting = RUN_DATA.sub(rb"\1\3", page, count=1)
    return hmac.new(_key(), origin.encode() + lasting, hashlib.sha256).hexdigest()[:32]


@cache
def _key() -> bytes:
    """Return the user's key. The first call makes the key. If the key cannot be stored, all pages are made again."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    path = Path(home, "arpo", "viewer.key")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(32))
        except FileExistsError:
            pass
        key = path.read_bytes()
    except OSError:
        key = b""
    return key if len(key) == 32 else secrets.token_bytes(32)
