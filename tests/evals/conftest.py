import pytest
from helpers.judge_server import judges_by_prediction
from helpers.web_service import WebService


@pytest.fixture
def service(monkeypatch):
    """A judge on loopback, which needs no key."""
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    with WebService([judges_by_prediction]) as running:
        yield running
