"""Tools that refuse every call. tests/test_evaluate.py asks a benchmark with them."""

import asyncio
import json
from pathlib import Path

import pytest

from arpo.config.tools import ToolsConfig
from arpo.errors import UserError
from arpo.tools import make_tools, tool_schemas

MUTED = f"{Path(__file__).parents[2]}/extras/tools/muted.py:Muted"


def muted(*names: str) -> ToolsConfig:
    options = (json.dumps({MUTED: {"names": names}}),) if names else ()
    return ToolsConfig(names=(MUTED,), options=options)


def test_muted_tools_are_offered_as_the_real_ones_and_refuse_every_call():
    assert tool_schemas(muted()) == tool_schemas(ToolsConfig())
    [tool] = make_tools(muted("python")).values()
    result = asyncio.run(tool.run("print(1)"))
    assert (result.ok, result.error_kind, result.infra_error) == (False, "muted", False)
    assert result.text == "Error: the python tool is not available."


def test_an_unknown_tool_cannot_be_muted():
    with pytest.raises(UserError, match="unknown tool 'piano'"):
        tool_schemas(muted("piano"))
