"""A run with pages, and a browser that all tests of them share."""

from pathlib import Path

import pytest
from helpers.devtools import Browser
from helpers.sample_groups import sample_groups
from helpers.viewer_pages import make_run, write_page

from arpo.trajectory import Group


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """The second prompt's first trajectory ends in a way of its own, and its question turns the reading direction."""
    groups = sample_groups()
    first = groups[1].trajectories[0]
    first.stop_reason, first.reward_reason = "length", "missing_answer"
    groups[1].prompt.messages[0]["content"] = "question 1: \u202eltr\u202c or rtl?"
    return groups


@pytest.fixture(scope="module")
def shown_run(tmp_path_factory, groups) -> Path:
    """A run with its pages; tests only look at it."""
    run = make_run(tmp_path_factory.mktemp("runs") / "branched", groups)
    (run / "report.md").write_text("# the report")
    write_page(run)
    return run


@pytest.fixture(scope="package")
def browsers():
    """Those that were started so far: one, unless it was lost."""
    started: list[Browser] = []
    yield started
    for browser in started:
        browser.close()


@pytest.fixture
def browser(browsers):
    """The browser, in a window of a desk; its page must not have raised anything."""
    if not browsers or browsers[-1].is_lost:
        browsers.append(Browser())
    shared = browsers[-1]
    shared.errors.clear()
    shared.size(1400, 900)
    yield shared
    assert shared.errors == []
