"""Tools that rows offer, against those that are loaded."""

import pytest

from arpo.errors import UserError
from arpo.tools import check_offered
from arpo.trajectory import Prompt


def rows(*tools: tuple[str, ...] | None) -> list[Prompt]:
    return [Prompt(f"q.jsonl:{i}", [], ["1"], tools=names) for i, names in enumerate(tools, 1)]


@pytest.mark.parametrize(
    "name, fix",
    [("pyhton", r"did the row mean 'python'\?"), ("calculator", "add it there, or take it out of the row")],
)
def test_a_row_that_offers_a_tool_that_is_not_loaded_is_refused(name, fix):
    with pytest.raises(UserError, match=rf"q\.jsonl: q\.jsonl:2 offers the tool '{name}', .* python, search; {fix}"):
        check_offered(rows(None, ("search", name)), ["python", "search"], "q.jsonl")


def test_a_loaded_tool_that_no_row_offers_is_counted_but_rows_without_the_field_offer_all(caplog):
    check_offered(rows(None, ("search",)), ["python", "search"], "q.jsonl")
    check_offered(rows(("search",), ("search",)), ["python", "search"], "q.jsonl")
    assert [r.getMessage() for r in caplog.records] == [
        "q.jsonl: tools.names has python, but none of the 2 rows offers it"
    ]
