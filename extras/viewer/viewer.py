"""Branch trees of a run as web pages: `python -m extras.viewer RUN [--step N | --file PATH] [--out FILE.html]`.

    RUN/viewer.html                      the newest dump, or the dump of --step or --file
    RUN/viewer/step_000100.html ...      one page per dump, for the step picker of the pages
    RUN/viewer/gaia.html ...             one page per set of questions, if RUN is an evaluation
    RUN/beside_OTHER.html                with --beside OTHER: each question with the trajectories of both runs

A picture of one tree: open `file://$PWD/RUN/viewer.html#0/0&poster` with chromium --headless --screenshot=tree.png
--window-size=1330,480; growing.py makes an animated tree.

Each page is self-contained: it opens with file://, loads nothing, and shows the model's output as text only. The page
contains the dump's data, packed with gzip, so page and dump have about the same size. A page is written again only if
the dump, the options or this code have changed; the list of steps and the trend are renewed each time. If a page was
not written by this user's viewer (seal.py), the viewer makes the page again from the dump, or leaves it out.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from arpo.errors import UserError
from arpo.evals.records import grades_path
from arpo.evals.tables import replace_file
from arpo.start.load import run_or_exit
from extras.viewer.groups import put_beside, read_groups
from extras.viewer.seal import RUN_DATA, own_page, sealed
from extras.viewer.trend import entropy_scale, read_trend

SCRIPTS = ("elements.js", "base.js", "tree.js", "text.js", "filters.js", "trend.js", "main.js")
REPORTS = ("report.md", "eval/report.md")
"""Possible paths of evaluate.py's report in a run folder."""
DUMP_NAME = re.compile(r"(.+)_(\d+)\.jsonl(\.gz)?")
SET_NAME = re.compile(r"(.+)\.\d+\.jsonl")
PAGE_NAME = re.compile(r"(.+)_(\d+)\.html")


@dataclass(frozen=True)
class Dump:
    """Names the files of one page: a training's step_000100.jsonl.gz, or all dumps of a set of an evaluation."""

    name: str
    """step_000100; gaia"""
    kind: str
    """ "step" (training), "valid", "test", "nonfinite", or the name of the set. """
    step: int | None
    """Step of the training; None for a set."""
    paths: tuple[Path, ...]
    grades: Path | None = None
    """File of the set's grades; None for a set without grades."""

    @classmethod
    def of_file(cls, path: Path) -> Dump:
        """Return the dump of a file with any name."""
        if (match := DUMP_NAME.fullmatch(path.name)) is None:
            return cls(path.name.partition(".")[0], "", None, (path,))
        return cls(path.name.partition(".")[0], match[1], int(match[2]), (path,))

    @property
    def order(self) -> tuple[str, int]:
        return self.kind, self.step or 0


def dumps_of(run: Path) -> list[Dump]:
    """Return a run's dumps, oldest first within each kind. Raises UserError if the run does not exist."""
    if not run.is_dir():
        raise UserError(f"{run}: no such run folder; pass runs/NAME")
    paths = sorted((run / "trajectories").glob("*"))
    dumps = [Dump.of_file(path) for path in paths if DUMP_NAME.fullmatch(path.name)]
    sets: dict[str, list[Path]] = {}
    for path in paths:
        if match := SET_NAME.fullmatch(path.name):
            sets.setdefault(match[1], []).append(path)
    for name, files in sets.items():
        grades = grades_path(run, name)
        dumps.append(Dump(name, name, None, tuple(files), grades if grades.exists() else None))
    return sorted(dumps, key=lambda dump: (dump.order, dump.paths))


def choose_dump(run: Path, dumps: list[Dump], *, step: int | None = None) -> Dump:
    """Return the dump of training step `step`, by default the newest. A run without training dumps gives the newest
    validation or test dump.

    Raises UserError if there is no dump.
    """
    training = {dump.step: dump for dump in dumps if dump.kind == "step"}
    if step is not None and step not in training:
        known = ", ".join(map(str, training)) or "of no training step"
        raise UserError(f"{run}: --step {step} was not dumped; there are dumps {known}; or name one with --file")
    if not dumps:
        raise UserError(f"{run}: no trajectory dumps in {run / 'trajectories'}; train with run.dump_every above 0")
    return training[step] if step is not None else max(dumps, key=lambda dump: (dump.kind == "step", dump.step or 0))


# ---- one page


def template() -> str:
    """Return the page including style and scripts, without data."""
    parts = map(resources.files("extras.viewer").joinpath, ("viewer.html", "viewer.css", *SCRIPTS))
    page, style, *scripts = (part.read_text(encoding="utf-8") for part in parts)
    return page.replace("@@STYLE@@", style).replace("@@SCRIPT@@", "\n".join(scripts))


def title_of(run: Path, dump: Dump) -> str:
    return f"{run.resolve().name} · {dump.name}"


def origin_of(run: Path, dump: Dump, max_groups: int) -> str:
    """Return a digest of the sources of a page: the dump, the options and the viewer's code.

    Raises UserError for a missing dump.
    """
    origin = [template(), max_groups, title_of(run, dump)]
    for path in (*dump.paths, *filter(None, [dump.grades])):
        try:
            stat = path.stat()
        except OSError as error:
            raise UserError(f"{path}: cannot read the dump ({error.strerror}); check the path") from None
        origin += [stat.st_size, stat.st_mtime_ns]
    return hashlib.sha256(repr(origin).encode()).hexdigest()[:32]


def page_path(run: Path, dump: Dump) -> Path:
    """Return the path for the page of a run's dump."""
    return run / "viewer" / f"{dump.name}.html"


def pages_of(run: Path) -> list[Path]:
    """Return the pages in RUN/viewer written by this user's viewer, also for removed dumps. Report foreign pages."""
    pages = sorted((run / "viewer").glob("*.html"))
    strange = [path for path in pages if own_page(path) is None]
    if strange:
        told = f"{strange[0]}{f' and {len(strange) - 1} more' if len(strange) > 1 else ''}"
        print(f"warning: left out, as this user's arpo-view did not write it: {told}; remove it")
    return [path for path in pages if path not in strange]


def current_page(run: Path, dump: Dump, max_groups: int) -> bytes | None:
    """Return the dump's page if it exists and is up to date; None if not. Raises UserError for a missing dump."""
    return own_page(page_path(run, dump), origin_of(run, dump, max_groups))


def page_of(run: Path, dump: Dump, max_groups: int, other: tuple[str, Dump] | None = None) -> bytes:
    """Return the page of a dump, without the data about the whole run (with_run_data). With `other`, the name and the
    dump of another run, the other run's trajectories of the same prompts follow below."""
    groups, num_groups = read_groups(dump.paths, dump.grades, max_groups)
    if other:
        put_beside(groups, read_groups(other[1].paths, other[1].grades, sys.maxsize)[0], other[0])
    title = title_of(run, dump) + (f" beside {other[0]}" if other else "")
    data = {"title": title, "num_groups": num_groups, "groups": groups}
    try:
        script = script_json(data).encode()
    except RecursionError:
        raise UserError(f"{dump.paths[0]}: a trajectory is nested too deep; drop its line or dump again") from None
    # mtime 0: the same dump makes the same page, byte for byte
    packed = base64.b64encode(gzip.compress(script, 6, mtime=0)).decode()
    return sealed(template().replace("@@DATA@@", packed).encode(), origin_of(run, dump, max_groups))


def script_json(tree: object) -> str:
    r"""Return JSON for a script element of a page: ASCII without "<". So no output of a model can end the element or
    start a comment. JSON has no NaN: non-finite numbers become the words "nan", "inf", "-inf".

    >>> script_json({"text": "</script>", "loss": math.nan})
    '{"text":"\\u003c/script>","loss":"nan"}'
    """
    words = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
    finite = json.loads(json.dumps(tree), parse_constant=words.get)
    return json.dumps(finite, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def with_run_data(page: bytes, data: dict) -> bytes:
    """Replace the page's list of steps, trend and links by `data`."""
    packed = script_json(data).encode()
    return RUN_DATA.sub(lambda match: match[1] + packed + match[3], page, count=1)


def run_data(
    run: Path, dumps: list[Dump], trend: list[dict], *, pages: list[Path], page: Path, shown: str | None
) -> dict:
    """Return the page's data about the whole run: steps, links to pages, trend. `shown`: name of the page's dump."""

    def link(target: Path, there: bool) -> str | None:
        return Path(os.path.relpath(target, page.parent)).as_posix() if there else None

    shown_as = {dump.name: dump for dump in dumps}
    for path in pages:  # a page stays when its dump is pruned
        if path.stem not in shown_as and (match := PAGE_NAME.fullmatch(path.name)):
            shown_as[path.stem] = Dump(path.stem, match[1], int(match[2]), ())
    return {
        "trend": trend,
        "entropy": entropy_scale(run),
        "reports": [link(run / report, True) for report in REPORTS if (run / report).exists()],
        "steps": [
            {
                "kind": one.kind,
                "step": one.step,
                "shown": one.name == shown,
                "page": link(page_path(run, one), page_path(run, one) in pages),
            }
            for one in sorted(shown_as.values(), key=lambda dump: dump.order)
        ],
    }


# ---- the command


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.viewer", description="Branch trees of a run as web pages.")
    parser.add_argument("run", type=Path, help="runs/NAME")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="training step that RUN/viewer.html shows; default: the newest")
    which.add_argument(
        "--file", type=Path, help="a dump by its path, e.g. runs/NAME/trajectories/valid_000100.jsonl.gz"
    )
    parser.add_argument("--out", type=Path, help="write this page only; default: RUN/viewer.html and RUN/viewer/")
    parser.add_argument(
        "--beside", type=Path, help="another run, or a dump: RUN/beside_NAME.html shows both for each prompt"
    )
    parser.add_argument("--max_groups", type=int, default=200, help="show only the first N prompts (default 200)")
    parser.add_argument(
        "--pages", type=int, default=20, help="newest dumps of each kind that get a page in RUN/viewer/ (default 20)"
    )
    run_or_exit(make_pages, parser.parse_args(argv))


def make_pages(args: argparse.Namespace) -> None:
    """Write the pages of the command line, and print the path of each. The last path is the page to open."""
    if args.max_groups < 1:
        raise UserError(f"--max_groups {args.max_groups}: must be at least 1")
    if args.pages < 0:
        raise UserError(f"--pages {args.pages}: must be at least 0")
    run = args.run
    dumps = dumps_of(args.run)
    if (run / "viewer").is_symlink():  # a link may lead anywhere
        raise UserError(f"{run / 'viewer'}: is a link, to which no page is written; remove it")
    shown = known_dump(args.file, dumps) if args.file else choose_dump(run, dumps, step=args.step)
    if args.beside:
        name, other = beside(args.beside, shown)
        out = args.out or run / f"beside_{name}.html"
        write(out, page_of(run, shown, args.max_groups, (name, other)))
        print(out)
        return
    trend = read_trend(run)
    page = current_page(run, shown, args.max_groups) or page_of(run, shown, args.max_groups)
    damaged = [] if args.out else write_folder(run, newest(dumps, args.pages), args.max_groups, (shown, page))
    out = args.out or run / "viewer.html"
    name = shown.name if shown in dumps else None
    pages = pages_of(run)
    write(out, with_run_data(page, run_data(run, dumps, trend, pages=pages, page=out, shown=name)))
    for path in [] if args.out else pages:
        old = path.read_bytes()
        new = with_run_data(old, run_data(run, dumps, trend, pages=pages, page=path, shown=path.stem))
        if new != old:
            write(path, new)
    for message in damaged:
        print(f"warning: left out: {message}")
    print(out)


def known_dump(path: Path, dumps: list[Dump]) -> Dump:
    """Return the run's dump with this file, or a new dump of this file alone."""
    known = [dump for dump in dumps if path.resolve() in [own.resolve() for own in dump.paths]]
    return known[0] if known else Dump.of_file(path)


def beside(path: Path, shown: Dump) -> tuple[str, Dump]:
    """Return name and dump of another run, or of a single file. The dump of a run has the same name as the shown dump.
    Raises UserError."""
    if path.is_file():
        dump = Dump.of_file(path)
        return dump.name, dump
    dumps = {dump.name: dump for dump in dumps_of(path)}
    if shown.name not in dumps:
        raise UserError(f"{path}: no dump {shown.name}; it has {', '.join(dumps) or 'none'}; name one by its file")
    return path.resolve().name, dumps[shown.name]


def newest(dumps: list[Dump], count: int) -> list[Dump]:
    """Return the newest `count` dumps of each kind."""
    kinds = {dump.kind: [other for other in dumps if other.kind == dump.kind] for dump in dumps}
    return [dump for of_kind in kinds.values() for dump in of_kind[max(len(of_kind) - count, 0) :]]


def write_folder(run: Path, dumps: list[Dump], max_groups: int, known: tuple[Dump, bytes]) -> list[str]:
    """Write all outdated pages in RUN/viewer/. Return the errors of dumps without a page.

    `known`: a dump and its finished page, so that this page is not made twice.
    """
    problems = []
    for dump in dumps:
        if current_page(run, dump, max_groups):
            continue
        try:
            page = known[1] if dump == known[0] else page_of(run, dump, max_groups)
        except UserError as error:
            problems.append(str(error))
            continue
        write(page_path(run, dump), page, make_folder=True)
        print(page_path(run, dump), flush=True)
    return problems


def write(path: Path, page: bytes, *, make_folder: bool = False) -> None:
    """Write a page, completely or not at all. Raises UserError if this fails."""
    try:
        if make_folder:
            path.parent.mkdir(exist_ok=True)
        replace_file(path, [page.decode()])
    except OSError as error:
        raise UserError(f"{path}: cannot write the page ({error.strerror}); choose another --out") from None
