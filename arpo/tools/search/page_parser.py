"""The program of a child process (arpo/jail/child.py): extracts the text of a fetched page.

Pages are hostile: some are made to hang a parser or to fill the memory.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import importlib
import io

MAX_TEXT_CHARS = 50_000
"""Longest text of a page. Further text is ignored."""
_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_WIDER = {
    **dict.fromkeys(("iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"), "cp1252"),
    **dict.fromkeys(("gb2312", "gbk", "gb-2312-80", "x-gbk"), "gb18030"),
    **dict.fromkeys(("shift-jis", "sjis", "x-sjis", "windows-31j"), "cp932"),
    **dict.fromkeys(("euc-kr", "ks-c-5601-1987", "ksc5601", "windows-949"), "cp949"),
    **dict.fromkeys(("iso-8859-11", "tis-620", "windows-874"), "cp874"),
    "iso-8859-9": "cp1254", "big5": "big5hkscs",
}  # fmt: skip
"""Name in a header -> the larger charset that browsers take for it (WHATWG's table of encodings)."""


def prepare() -> None:
    for parser in ("trafilatura", "pypdf"):  # takes a second, and must not count for the first page
        with contextlib.suppress(ImportError):  # plain texts need no parser
            importlib.import_module(parser)


def answer(request: list[str]) -> str:
    """Answer [page in base64, kind, charset] with the page's text; "" for a broken page."""
    page, kind, charset = request
    try:
        text = extract(base64.b64decode(page), kind, charset)
    except Exception:  # a broken page may raise any exception in a parser
        return ""
    return text.encode(errors="replace").decode()


def extract(page: bytes, kind: str, charset: str = "") -> str:
    """Return the main text of a page, at most MAX_TEXT_CHARS characters; "" for no text."""
    if kind == "html":
        import trafilatura

        # without a charset in the header, trafilatura looks for a charset in the page
        source = decoded(page, charset) if charset or page.startswith(tuple(_MARKS)) else page
        text = trafilatura.extract(source, include_comments=False) or ""
    elif kind == "pdf":
        import pypdf

        text = ""
        for sheet in pypdf.PdfReader(io.BytesIO(page)).pages:
            text += sheet.extract_text() + "\n"
            if len(text) > MAX_TEXT_CHARS:
                break
    else:
        text = decoded(page[: 4 * MAX_TEXT_CHARS], charset)
    return text[:MAX_TEXT_CHARS]


def decoded(page: bytes, charset: str) -> str:
    """Decode a page. Tries in order: byte order mark, charset of the header, UTF-8, a guess from the bytes.

    >>> decoded("Zürich".encode("latin-1"), "iso-8859-1"), decoded("Zürich".encode(), ""), decoded(b"a", "no-charset")
    ('Zürich', 'Zürich', 'a')
    """
    if mark := next((mark for mark in _MARKS if page.startswith(mark)), None):
        return page.decode(_MARKS[mark], "replace")
    name = charset.strip().lower()
    name = _WIDER.get(name.replace("_", "-"), name)
    for candidate in filter(None, (name, "utf-8")):
        with contextlib.suppress(ValueError, LookupError):
            "".encode(candidate)  # raises for zlib and other codecs from bytes to bytes
            return codecs.getincrementaldecoder(candidate)().decode(page)  # the last character may have been cut
    with contextlib.suppress(ValueError, LookupError):
        if name:
            return page.decode(name, "replace")
    text = page.decode(errors="replace")
    if 4 * text.count("\ufffd") < sum(not c.isascii() for c in text):  # UTF-8 with a few broken bytes
        return text
    from charset_normalizer import from_bytes  # comes with trafilatura

    return str(from_bytes(page).best() or text)
