from collections.abc import Iterator

import pytest
from helpers.web_service import FakeTime, WebService, found


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    """Keep what the tools derive from a test's files out of the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache_home")))


@pytest.fixture
def service(monkeypatch) -> Iterator[WebService]:
    """A retriever, which no proxy of the environment hides."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with WebService([found("otters swim")]) as running:
        yield running


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()
