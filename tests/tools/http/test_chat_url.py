"""The chat endpoint of an address, as a judge's or a summariser's may be given."""

import pytest

from arpo.tools.http.client import chat_url

WHOLE = "http://host:8001/v1/chat/completions"


@pytest.mark.parametrize(
    "given", ["http://host:8001", "http://host:8001/", "http://host:8001/v1", "http://host:8001/v1/", WHOLE]
)
def test_a_base_url_is_completed(given):
    assert chat_url(given) == WHOLE


@pytest.mark.parametrize("own", ["http://host/judge", "http://host/openai/deployments/x/chat/completions?version=1"])
def test_an_address_with_a_path_of_its_own_is_left_alone(own):
    assert chat_url(own) == own
