"""A tool from an environment with `reset(seed=...)` and `step(action)`: Gymnasium's interface, and that of its likes.

An environment of yours is a subclass in a file of yours (tools.names my_env.py:FrozenLake), which needs no gymnasium:

    from extras.tools.environment import EnvironmentTool

    class FrozenLake(EnvironmentTool):
        tag = "lake"
        about = About("a frozen lake", "to move, write <lake> 2 </lake>: 0 left, 1 down, 2 right, 3 up", "...")

        def make(self, context):
            return gymnasium.make("FrozenLake-v1", map_name=context.row["map"])

Each trajectory has an environment of its own, reset with the group's seed. Its rewards are in the calls' `info`.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from arpo.protocol.prompts import About
from arpo.tools.interface import ToolContext, ToolResult
from arpo.tools.threads import on_thread
from extras.tools.session_tool import CannotFork, SessionTool

LOOK = "look"
"""The argument that shows the newest observation again, the first one before any step."""


@dataclass
class Episode:
    """A trajectory's session."""

    env: Any
    observation: Any
    total_reward: float = 0.0
    terminated: bool = False
    truncated: bool = False

    @property
    def info(self) -> dict[str, Any]:
        """Facts for a reward about the episode so far; the reward of the newest step comes beside them."""
        return {"return": self.total_reward, "terminated": self.terminated, "truncated": self.truncated}


class EnvironmentTool(SessionTool):
    """Takes the action that the argument names, and answers with the observation.

    A subclass has `tag`, `about` and `make`.

    `ToolCall.info` has "reward" (of that step), "return" (of the episode so far), "terminated" and "truncated".
    """

    tag: str
    about: About
    copies_exactly = False
    """True where `copy.deepcopy` gives an environment that goes on alike. Else a branch replays its parent's actions in
    a new one, which a seeded environment answers alike; where it does not, tools/replay_mismatch says so."""
    deadline_s = 60.0
    """Longest time of a reset, a step, a copy or a closing in seconds. An environment that takes longer counts as an
    exception of the tool, and its trajectory is dropped."""

    def make(self, context: ToolContext) -> Any:
        """Return a new environment. `context.row` has the columns of the prompt's row."""
        raise NotImplementedError

    def seed(self, context: ToolContext) -> int:
        """Return the seed of `reset`: the row's own, if it has a column `seed`, else the group's."""
        return int(context.row.get("seed", context.seed))

    def parse(self, argument: str, env: Any) -> Any:
        """Return the action that the model has written: JSON, else the text as it is. Raises ValueError for others."""
        try:
            action = json.loads(argument)
        except (ValueError, RecursionError):  # the latter where it is nested too deeply
            action = argument.strip()
        space = getattr(env, "action_space", None)
        if space is not None and not space.contains(action):
            raise ValueError(f"{argument.strip()!r} is no action of {space}")
        return action

    def show(self, observation: Any) -> str:
        """Return an observation as the model reads it."""
        return str(observation)

    async def open(self, context: ToolContext) -> Episode:
        return await self._in_time(self._open, context)

    def _open(self, context: ToolContext) -> Episode:
        env = self.make(context)
        observation, _ = env.reset(seed=self.seed(context))
        return Episode(env, observation)

    async def run(self, argument: str, context: ToolContext, session: Episode) -> ToolResult:
        return await self._in_time(self._run, argument, session)

    def _run(self, argument: str, episode: Episode) -> ToolResult:
        if argument.strip() == LOOK:
            return ToolResult(self.show(episode.observation), ok=True, info={"reward": 0.0} | episode.info)
        if episode.terminated or episode.truncated:
            text = "Error: the episode has ended."
            return ToolResult(text, ok=False, error_kind="ended", info={"reward": 0.0} | episode.info)
        try:
            action = self.parse(argument, episode.env)
        except ValueError as error:
            info = {"reward": 0.0} | episode.info
            return ToolResult(f"Error: {error}", ok=False, error_kind="bad_action", info=info)
        episode.observation, reward, terminated, truncated, _ = episode.env.step(action)
        episode.total_reward += float(reward)
        episode.terminated, episode.truncated = bool(terminated), bool(truncated)
        text = self.show(episode.observation)
        if terminated or truncated:
            text += "\nThe episode has ended."
        return ToolResult(text, ok=True, info={"reward": float(reward)} | episode.info)

    async def fork(self, session: Episode, context: ToolContext) -> Episode:
        if not self.copies_exactly:
            raise CannotFork("the environment is replayed")
        return await self._in_time(copy.deepcopy, session)

    async def close(self, session: Episode) -> None:
        if hasattr(session.env, "close"):
            await self._in_time(session.env.close)

    async def _in_time(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `work` returns. Raises TimeoutError after the deadline; what hangs is left to itself."""
        async with asyncio.timeout(self.deadline_s):
            return await on_thread(f"arpo-{self.tag}", work, *arguments)

    async def aclose(self) -> None:
        """Nothing to release: the sessions are closed."""
