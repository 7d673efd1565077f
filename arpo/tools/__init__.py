"""Tools that the policy calls from inside a rollout. A new tool is one file and one line in `make_tools`."""

from __future__ import annotations

from arpo.config import UserError
from arpo.options import ToolsConfig
from arpo.tools.base import Tool


def make_tools(cfg: ToolsConfig) -> dict[str, Tool]:
    """The tools named in the config, by tag. A tool that cannot start raises: training never goes on without it."""
    from arpo.tools.python import PythonTool
    from arpo.tools.search import SearchTool

    table = {
        "python": lambda: PythonTool(cfg.python),
        "search": lambda: SearchTool(cfg.search),
    }
    for name in cfg.names:
        if name not in table:
            raise UserError(f"tools.names: unknown tool {name!r}; there are {', '.join(table)}")
    return {name: table[name]() for name in cfg.names}
