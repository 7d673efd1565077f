"""The tests' own house rule, that what two test files need is a helper's, and what of the helpers may hang."""

import ast
import os
import signal
import subprocess
import sys
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
def test_a_worker_that_is_killed_is_missed_at_once_though_what_it_forked_lives_on(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "from helpers.worker_line import close_line_in_forks\n"
        "def pytest_sessionstart(session):\n"
        "    close_line_in_forks(session.config)\n"
    )
    (tmp_path / "test_dies.py").write_text(
        "import os, signal, time\n"
        "def test_dies():\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        time.sleep(1000)\n"
        "    open('child', 'w').write(str(child))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "1", "--max-worker-restart", "0", "--rootdir", ".", "."]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    with (tmp_path / "output").open("w") as output:  # no pipe: the child has it too
        try:
            subprocess.run(command, cwd=tmp_path, env=environment, stdout=output, stderr=output, timeout=120)
        finally:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert "crashed while running" in (tmp_path / "output").read_text()


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
