"""The search tool."""

from arpo.tools.search.tool import SearchTool

__all__ = ["SearchTool"]
