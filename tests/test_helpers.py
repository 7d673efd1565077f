"""The tests' own house rule, that what two test files need is a helper's, and what of the helpers may hang."""

import ast
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
from helpers.browser import needs_browser
from helpers.devtools import Browser, BrowserLost

TESTS = Path(__file__).parent


def test_no_test_file_imports_anything_of_another():
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [f"{path.name}: {name}" for name in names if name.split(".")[-1].startswith(("test_", "conftest"))]
    assert found == []


@pytest.mark.slow
@needs_browser
def test_a_browser_that_does_not_answer_is_given_up():
    with closing(Browser()) as browser:
        assert browser.js("1 + 1") == 2
        os.killpg(browser.process.pid, signal.SIGSTOP)
        browser.patience_s = 0.5
        with pytest.raises(BrowserLost, match=r"no answer in 0\.5 s"):
            browser.js("1 + 1")
        assert browser.is_lost


@pytest.mark.slow
@needs_browser
def test_a_page_that_has_crashed_is_known_at_once():
    with closing(Browser()) as browser, pytest.raises(BrowserLost, match="the page has crashed"):
        browser._call("Page.navigate", url="chrome://crash")
        browser.js("1 + 1")
