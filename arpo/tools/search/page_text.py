"""The text of a fetched page, and the passage of it that answers a query.

Pages are hostile: some are made to hang a parser or to fill the memory. So this file is also a program that extracts
text in a process of its own, in a jail, with limits on time and memory and without the environment's keys:

    trainer:  kind (5 bytes), charset of the HTTP header (32), number of bytes (8, big-endian), the page
    worker:   number of bytes (8), the UTF-8 text

It imports nothing of arpo, since the worker is started by its path.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import importlib
import io
import os
import re
import resource
import signal
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import BinaryIO

START_S = 30.0
"""Longest start of the worker, on a busy machine."""
MAX_WORKER_BYTES = 2 << 30
"""Largest address space of the worker."""
MAX_TEXT_CHARS = 50_000
"""Longest text of a page; the rest of it is not looked at."""
_REQUEST, _ANSWER = struct.Struct(">5s32sQ"), struct.Struct(">Q")
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
_PARSERS = {"html": "trafilatura", "pdf": "pypdf"}
_TOKEN = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]|\w+")  # a word; in Chinese and the like a character


def best_passage(text: str, needle: str, max_chars: int) -> str:
    """Return at most `max_chars` characters around the place with most different words of `needle`, closest together.

    >>> best_passage("Foxes run. Otters swim in rivers. Owls fly by night.", "do otters swim?", 28)
    '… run. Otters swim in …'
    """
    if len(text) <= max_chars:
        return text
    wanted = {word.casefold() for word in _TOKEN.findall(needle)}
    hits = [(m.start(), m.end(), word) for m in _TOKEN.finditer(text) if (word := m.group().casefold()) in wanted]
    window_chars = max(1, max_chars - 4)  # two ellipses
    best, first, last = (1, -window_chars - 1), 0, 0  # (different words, -width); from, to
    inside: Counter[str] = Counter()
    left = 0
    for _, end, word in hits:
        inside[word] += 1
        while left < len(hits) and (end - hits[left][0] > window_chars or inside[hits[left][2]] > 1):
            inside[hits[left][2]] -= 1
            left += 1
        if left < len(hits) and (score := (sum(map(bool, inside.values())), hits[left][0] - end)) > best:
            best, first, last = score, hits[left][0], end
    start = min(max(0, (first + last - window_chars) // 2), len(text) - window_chars)
    return _cut(text, start, start + window_chars)


def _cut(text: str, start: int, stop: int) -> str:
    """Return text[start:stop] without short halves of words at its ends; an ellipsis says that there is more."""
    part = text[start:stop]
    if start > 0 and (broken := re.match(r"\S{0,40}\s+", part)):
        part = part[broken.end() :]
    if stop < len(text) and (broken := re.search(r"\s+\S{0,40}$", part)):
        part = part[: broken.start()]
    return f"{'… ' if start > 0 else ''}{part}{' …' if stop < len(text) else ''}"


class ExtractionError(OSError):
    """The page has no text, or could not be read within the limits."""


class Extractor:
    """A worker process, which the first page starts; one that a page has broken is replaced. For one event loop."""

    def __init__(self, *, limit_s: float = 10.0):
        """`limit_s` is the longest time of one extraction."""
        self._limit_s = limit_s
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def text(self, page: bytes, kind: str, charset: str = "") -> str:
        """Return the main text of a page of a `kind` (html, pdf or plain). `charset` is what its HTTP header names.
        Raises ExtractionError."""
        async with self._turn:
            try:
                async with asyncio.timeout(START_S + self._limit_s):  # the worker's own limit comes first, if it obeys
                    text = await self._ask(page, kind, charset)
            except BaseException as error:  # also if cancelled: what comes out of the pipe then belongs to nobody
                await self.aclose()
                if not isinstance(error, asyncio.IncompleteReadError | ConnectionError | TimeoutError):
                    raise
                raise ExtractionError(f"no text within {self._limit_s:g} s and the memory limit") from None
        if not text.strip():
            raise ExtractionError("no text in it")
        return text

    async def _ask(self, page: bytes, kind: str, charset: str) -> str:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(Path(__file__).resolve()), str(self._limit_s)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            )
        self._process.stdin.write(_REQUEST.pack(kind.encode(), charset.encode("ascii", "replace"), len(page)) + page)
        await self._process.stdin.drain()
        [num_bytes] = _ANSWER.unpack(await self._process.stdout.readexactly(_ANSWER.size))
        if num_bytes > 4 * MAX_TEXT_CHARS:  # a worker that a page has taken over may say anything
            raise ConnectionError("an answer that no worker gives")
        return (await self._process.stdout.readexactly(num_bytes)).decode(errors="replace")

    async def aclose(self) -> None:
        """End the worker. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            process.stdin.close()
            await process.wait()


# ---- the worker


def extract(page: bytes, kind: str, charset: str = "") -> str:
    """Return the main text of a page, at most MAX_TEXT_CHARS; empty where there is none."""
    if kind == "html":
        import trafilatura

        # without a charset of the header, trafilatura looks for the page's own
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
    """Return a page as text: by its byte order mark, else as the header says, else as UTF-8, else as it looks.

    >>> decoded("Zürich".encode("latin-1"), "iso-8859-1"), decoded("Zürich".encode(), ""), decoded(b"a", "no-charset")
    ('Zürich', 'Zürich', 'a')
    """
    if mark := next((mark for mark in _MARKS if page.startswith(mark)), None):
        return page.decode(_MARKS[mark], "replace")
    name = charset.strip().lower()
    name = _WIDER.get(name.replace("_", "-"), name)
    for candidate in filter(None, (name, "utf-8")):
        with contextlib.suppress(ValueError, LookupError):
            "".encode(candidate)  # refuses zlib and the like, which are codecs of bytes
            return codecs.getincrementaldecoder(candidate)().decode(page)  # the last character may have been cut
    with contextlib.suppress(ValueError, LookupError):
        if name:
            return page.decode(name, "replace")
    text = page.decode(errors="replace")
    if 4 * text.count("\ufffd") < sum(not c.isascii() for c in text):  # UTF-8 with a few broken bytes
        return text
    from charset_normalizer import from_bytes  # comes with trafilatura

    return str(from_bytes(page).best() or text)


def serve(requests: BinaryIO, answers: BinaryIO, limit_s: float) -> None:
    """Answer until the trainer is gone. A page that takes longer than `limit_s` ends this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_WORKER_BYTES, MAX_WORKER_BYTES))
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from jail.parser_jail import confine_parser

    confine_parser()
    while len(header := requests.read(_REQUEST.size)) == _REQUEST.size:
        *names, num_bytes = _REQUEST.unpack(header)
        kind, charset = (name.rstrip(b"\0").decode() for name in names)
        page = requests.read(num_bytes)
        if parser := _PARSERS.get(kind):
            importlib.import_module(parser)  # takes a second, which is not the page's fault
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # its default action stops C code and endless loops alike
        try:
            text = extract(page, kind, charset)
        except Exception:  # whatever a broken page does to a parser: it has no text
            text = ""
        signal.setitimer(signal.ITIMER_REAL, 0)
        body = text.encode(errors="replace")
        answers.write(_ANSWER.pack(len(body)) + body)
        answers.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a parser that prints must not speak in our channel
    serve(sys.stdin.buffer, answers, float(sys.argv[1]))
