"""A tool whose sessions are plain lists, which say whether a branch has got the state that it should have."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from arpo.tools.base import ToolContext, ToolResult
from extras.tools.session_tool import CannotFork, SessionLost, SessionTool


class LeftOpen(BaseException):
    """No Exception: a runner only warns of one in `aclose`, and no test would see it."""


@dataclass
class Notes(SessionTool):
    """Answers with all that its session has been told so far: "a", then "a b". Branches replay."""

    tag: str = "search"
    max_sessions: int = 0
    may_branch: bool = True
    jitter_s: float = 0.0
    contexts: list[ToolContext] = field(default_factory=list)
    """Those of `open`."""
    ran: list[str] = field(default_factory=list)
    """The answer of each call, replays included."""
    num_open: int = 0
    most_open: int = 0

    async def open(self, context: ToolContext) -> list[str]:
        self.contexts.append(context)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(random.random() * self.jitter_s)
        return []

    async def run(self, argument: str, context: ToolContext, session: list[str]) -> ToolResult:
        await asyncio.sleep(random.random() * self.jitter_s)
        session.append(argument)
        self.ran.append(" ".join(session))
        return ToolResult(" ".join(session), ok=True)

    async def close(self, session: list[str]) -> None:
        session.append("closed")  # whoever still has it will see
        self.num_open -= 1

    async def aclose(self) -> None:
        if self.num_open:
            raise LeftOpen(f"{self.num_open} sessions were left open")


@dataclass
class Losing(Notes):
    """Loses a session now and then, at most once for each call."""

    rng: random.Random = field(default_factory=random.Random)
    num_lost: int = 0

    async def run(self, argument: str, context: ToolContext, session: list[str]) -> ToolResult:
        if argument not in self.ran and self.rng.random() < 0.3:
            self.ran.append(argument)
            self.num_lost += 1
            raise SessionLost
        return await super().run(argument, context, session)


@dataclass
class ForkedNotes(Notes):
    """The same with exact copies."""

    num_forks: int = 0
    refuses: bool = False
    """Raise CannotFork."""

    async def fork(self, session: list[str], context: ToolContext) -> list[str]:
        await asyncio.sleep(random.random() * self.jitter_s)
        if self.refuses:
            raise CannotFork("a thread runs")
        assert context.turn >= 0 and "closed" not in session
        self.num_forks += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        return list(session)


@dataclass
class Forgetful(Notes):
    """Loses each session once, before its second call."""

    lost: list[int] = field(default_factory=list)

    async def run(self, argument: str, context: ToolContext, session: list[str]) -> ToolResult:
        if session and not self.lost:
            self.lost.append(len(session))
            raise SessionLost
        return await super().run(argument, context, session)


class Partner:
    """A second tool with the sessions of some notes, in which what it is told stands behind its tag."""

    def __init__(self, tag: str, notes: Notes):
        self.tag, self.notes = tag, notes

    def __getattr__(self, name: str):
        return getattr(self.notes, name)

    async def run(self, argument: str, context: ToolContext, session: list[str]) -> ToolResult:
        return await self.notes.run(f"{self.tag}:{argument}", context, session)


def sharing(kind: type[Notes], **settings) -> list[Notes | Partner]:
    """Two tools, search and python, of which a trajectory has one session."""
    notes = kind(**settings)
    notes.session_name = "search python"
    return [notes, Partner("python", notes)]


def shared_texts(calls: list) -> list[str]:
    """Return what a fresh trajectory reads that makes these calls of the two."""
    told = [call.argument if call.tag == "search" else f"{call.tag}:{call.argument}" for call in calls]
    return [" ".join(told[: n + 1]) for n in range(len(told))]
