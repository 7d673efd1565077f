"""A run with dumps and numbers, and what its pages have in them."""

import base64
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path

from arpo.config.sections import RunConfig
from arpo.log import RunLog
from arpo.trajectory import Group
from extras.viewer import viewer

READY = "document.querySelector('.row.selected')"
ROWS = "[...document.querySelectorAll('[role=treeitem]')]"
"""Expressions of a page: true once it is drawn; the trajectories of its tree."""


def make_run(folder: Path, groups: list[Group]) -> Path:
    """A run whose newest training dump, of step 10, has all groups; that of step 9 and a validation have the first."""
    log = RunLog(folder, RunConfig(), is_main=True)
    for step in range(1, 11):
        log.scalars(step, {"reward/mean": step / 10} | ({"valid/reward": 0.5} if step % 5 == 0 else {}))
    log.trajectories(9, groups[:1])
    log.trajectories(10, groups)
    log.trajectories(20, groups[:1], kind="valid")
    log.close()
    return folder


def page_of(folder: Path, *groups: Group, metrics: Sequence[dict] = ({},)) -> Path:
    """The page of a run whose steps all have these groups. `metrics`: the numbers of each step."""
    log = RunLog(folder, RunConfig(), is_main=True)
    for step, values in enumerate(metrics, 1):
        if values:
            log.scalars(step, values)
        log.trajectories(step, list(groups))
    log.close()
    write_page(folder)
    return folder / "viewer.html"


def write_page(run: Path, *flags: str) -> str:
    viewer.main([str(run), *flags])
    return (run / "viewer.html").read_text()


def read_dump(dump: Path) -> str:
    return gzip.decompress(dump.read_bytes()).decode()


def write_dump(dump: Path, text: str) -> None:
    dump.write_bytes(gzip.compress(text.encode()))


def data_of(page: str) -> dict:
    """The dump in a page."""
    packed = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def run_data_of(page: str) -> dict:
    """Return what a page says of the whole run."""
    return json.loads(re.search(r'<script type="application/json" id="run">(.*?)</script>', page)[1])
