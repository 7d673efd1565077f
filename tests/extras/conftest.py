from pathlib import Path

import pytest
from helpers.notebooks import CFG
from helpers.python_tools import started

from extras.demo.build import write_jsonl
from extras.tools.notebook import NotebookTool


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    """Keep what the tools derive from a test's files out of the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache_home")))


@pytest.fixture(scope="module")
def forking():
    """A tool in the tier that can copy notebooks."""
    with started(CFG, "namespaces", kind=NotebookTool) as tool:
        if not tool.sandbox.host.has_proc:
            pytest.skip("there is no /proc in this jail, so nothing may fork")
        yield tool


@pytest.fixture(scope="module")
def corpus(world, tmp_path_factory) -> Path:
    """The corpus of the module's demo world."""
    path = tmp_path_factory.mktemp("demo") / "corpus.jsonl"
    write_jsonl(path, world.documents())
    return path
