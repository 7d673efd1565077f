"""The report as one web page that loads nothing: tables, plots, and a list of all transcripts.

    index     a few numbers per transcript: what the list shows and the plots are drawn from
    blocks    the transcripts, BLOCK at a time: JSON, gzip, base64; a block is unpacked when it is looked at

So a page of ten thousand long transcripts is a few tens of megabytes, and opens at once.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from arpo.evals.grading import Grade, segments_of
from arpo.evals.records import Record
from arpo.evals.tables import Table, replace_file
from arpo.log import script_json

BLOCK = 64
"""Transcripts that are unpacked together."""
MAX_TRANSCRIPT_BYTES = 150_000_000
"""Largest size of all packed blocks in the page. Transcripts beyond it are listed without their text."""
PREVIEW_CHARS = 160

Pair = tuple[str, Record, Grade]
"""A benchmark's name, one of its trajectories, and the grade of that."""


def write_page(
    path: Path,
    *,
    title: str,
    made: Sequence[str],
    links: Sequence[tuple[str, str]],
    notes: Sequence[str],
    tables: Sequence[Table],
    scores: Mapping[str, Mapping[str, Any]],
    pairs: Sequence[Pair],
) -> None:
    """Write the page, whole or not at all. `scores` are by benchmark; `pairs` are all trajectories of these.

    made: how and when the run was made, in a few words each; links: (words, relative address) of other pages.
    """
    order = {name: number for number, name in enumerate(scores)}
    pairs = sorted(pairs, key=lambda pair: (order[pair[0]], pair[1].question_id, pair[1].sample))
    data = {
        "title": title,
        "made": list(made),
        "links": list(links),
        "notes": list(notes),
        "tables": [asdict(table) for table in tables],
        "scores": scores,
        "index": [index_row(*pair) for pair in pairs],
        "block": BLOCK,
    }
    head, tail = template().split("@@BLOCKS@@")
    packed = (f'<script type="text/plain" class="block">{block}</script>\n' for block in blocks(pairs))
    replace_file(path, chain([head.replace("@@DATA@@", script_json(data))], packed, [tail]))


def template() -> str:
    """Return the page without its data, in which @@DATA@@ and @@BLOCKS@@ stand."""
    elements = resources.files("arpo").joinpath("elements.js").read_text(encoding="utf-8")
    page, style, script, plots = (
        resources.files("arpo.evals").joinpath(name).read_text(encoding="utf-8")
        for name in ("report.html", "report.css", "report.js", "plots.js")
    )
    return page.replace("@@STYLE@@", style).replace(
        "@@SCRIPT@@", script.replace("@@ELEMENTS@@\n", elements).replace("@@PLOTS@@\n", plots)
    )


def index_row(benchmark: str, record: Record, grade: Grade) -> list:
    """Return what the page's list and plots need of a transcript; the page's script names the columns."""
    num_failed = sum(not call["ok"] for call in record.tool_calls)
    preview = " ".join(record.question[: 2 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]
    return [
        benchmark, record.question_id, record.sample, grade.correct, grade.reason, record.stop_reason,
        record.num_tokens, len(record.tool_calls), num_failed, record.wall_s, record.split, preview,
    ]  # fmt: skip


def blocks(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield the packed transcripts, BLOCK of them at a time, until the page is full."""
    num_bytes = 0
    for start in range(0, len(pairs), BLOCK):
        views = [transcript(record, grade) for _, record, grade in pairs[start : start + BLOCK]]
        # mtime 0: the same records make the same page, byte for byte
        packed = base64.b64encode(gzip.compress(script_json(views).encode(), 6, mtime=0)).decode()
        num_bytes += len(packed)
        if num_bytes > MAX_TRANSCRIPT_BYTES:
            return
        yield packed


def transcript(record: Record, grade: Grade) -> dict[str, Any]:
    """Return a trajectory as the page shows it; results are in the segments, so calls come without them."""
    shown = ("tag", "ok", "error_kind", "cached", "seconds", "executed")
    return {
        "question": record.question,
        "answers": record.answers,
        "segments": segments_of(record),
        "calls": [{name: call[name] for name in shown} for call in record.tool_calls],
        "sampled": record.num_sampled_tokens,
        "metric": grade.metric,
        "scores": grade.scores,
        "prediction": grade.prediction,
        "judge_reply": grade.judge_reply,
    }
