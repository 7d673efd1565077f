"""The control of an evaluation: the tools that it has otherwise, and every call of them is refused.

    python evaluate.py CONFIG --run.name muted --eval.max_questions 100 --tools.names extras/tools/muted.py:Muted

Where the accuracy stays, the agent does not need its tools.
"""

from __future__ import annotations

from dataclasses import dataclass

from arpo.protocol.schema import ToolSchema
from arpo.tools import schema_of_tool
from arpo.tools.interface import ToolResult


@dataclass(frozen=True)
class MutedConfig:
    """Tools that refuse every call."""

    names: tuple[str, ...] = ("python", "search")
    """The tools, as in tools.names. They are not started."""


@dataclass
class MutedTool:
    """Answers every call with the same refusal."""

    tag: str

    async def run(self, argument: str) -> ToolResult:
        return ToolResult(f"Error: the {self.tag} tool is not available.", ok=False, error_kind="muted")

    async def aclose(self) -> None:
        """Nothing to release."""


class Muted:
    """A set of muted tools, which the prompt offers as it does the real ones."""

    def __init__(self, cfg: MutedConfig):
        self.cfg = cfg

    def schemas(self) -> dict[str, ToolSchema]:
        """Return what the tools take. Raises UserError for an unknown one."""
        return {schema.name: schema for schema in map(schema_of_tool, self.cfg.names)}

    def tools(self) -> dict[str, MutedTool]:
        return {tag: MutedTool(tag) for tag in self.schemas()}
