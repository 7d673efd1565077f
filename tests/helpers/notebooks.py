"""Talking to notebooks in tests."""

import asyncio
from collections.abc import Callable

from helpers.python_tools import HANG_S

from arpo.tools.base import ToolContext, ToolResult
from extras.tools.notebook import Notebook, NotebookConfig, NotebookTool

CFG = NotebookConfig(wall_s=60.0, session_cpu_s=60.0, memory_mib=256, max_concurrent=4)
CONTEXT = ToolContext("p0", "0", 0)


def talk(tool: NotebookTool, story: Callable):
    """Run an async story(session) in a notebook of its own."""

    async def tell():
        session = await tool.open(CONTEXT)
        try:
            return await asyncio.wait_for(story(session), HANG_S)
        finally:
            await tool.close(session)

    return asyncio.run(tell())


def cells(tool: NotebookTool, *codes: str) -> list[ToolResult]:
    async def story(session: Notebook) -> list[ToolResult]:
        return [await tool.run(code, CONTEXT, session) for code in codes]

    return talk(tool, story)


def texts(tool: NotebookTool, *codes: str) -> list[str]:
    return [result.text for result in cells(tool, *codes)]


def answers_to(tool: NotebookTool, session: Notebook, *codes: str):
    async def ask() -> list[str]:
        return [(await tool.run(code, CONTEXT, session)).text for code in codes]

    return ask()
