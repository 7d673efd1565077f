"""Tools that the policy calls from inside a rollout. A new tool is one file and one line here."""

from __future__ import annotations

from arpo.config import UserError
from arpo.options import ToolsConfig
from arpo.tools.base import Tool
from arpo.tools.python import PythonTool
from arpo.tools.search import SearchTool

TOOLS = {
    "python": lambda cfg: PythonTool(cfg.python),
    "search": lambda cfg: SearchTool(cfg.search),
}


def make_tools(cfg: ToolsConfig) -> dict[str, Tool]:
    """The tools named in the config, by tag. A tool that cannot start raises: training never goes on without it."""
    unknown = [name for name in cfg.names if name not in TOOLS]
    if unknown:
        raise UserError(f"tools.names: unknown tool {unknown[0]!r}; there are {', '.join(TOOLS)}")
    return {name: TOOLS[name](cfg) for name in cfg.names}
