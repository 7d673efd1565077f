"""Asking a tool from a test, which has no event loop of its own."""

import asyncio

from arpo.tools.base import Tool


def ask(tool: Tool, *arguments: str):
    """One result, or a list of those that were asked at the same time."""

    async def all_of_them():
        results = await asyncio.gather(*(tool.run(argument) for argument in arguments))
        await tool.aclose()
        await tool.aclose()  # twice: it may be
        return results

    results = asyncio.run(all_of_them())
    return results[0] if len(arguments) == 1 else results
