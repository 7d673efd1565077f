"""A tool from an environment with `reset(seed=...)` and `step(action)`, the interface of Gymnasium and others.

A custom environment is a subclass in your own file (tools.names my_env.py:FrozenLake). Gymnasium itself is optional:

    from extras.tools.environment import EnvironmentTool

    class FrozenLake(EnvironmentTool):
        tag = "lake"
        about = About("a frozen lake", "to move, write <lake> 2 </lake>: 0 left, 1 down, 2 right, 3 up", "...")

        def make(self, context):
            return gymnasium.make("FrozenLake-v1", map_name=context.row["map"])

Each trajectory has a separate environment, reset with the group's seed, or with the row's column `seed`. Its rewards
are in the calls' `info`. This command writes rows with seeds, and prompts that end with the first observation:

    python -m extras.tools.environment my_env.py:FrozenLake rows.jsonl --out train.jsonl --seeds 100
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arpo.config.exits import exit_with
from arpo.config.named import find
from arpo.data import BadRow, parse_prompt, read_rows
from arpo.data.prompts import QUESTION_FIELDS
from arpo.errors import UserError
from arpo.protocol.prompts import About
from arpo.tools.function import on_thread
from arpo.tools.interface import ToolContext, ToolResult
from extras.tools.session_tool import CannotFork, SessionTool

LOOK = "look"
"""The argument that shows the newest observation again (the first one before any step)."""


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
        """Facts about the episode so far, for a reward function. The newest step's reward is added elsewhere."""
        return {"return": self.total_reward, "terminated": self.terminated, "truncated": self.truncated}


class EnvironmentTool(SessionTool):
    """Takes the action in the argument, and answers with the observation.

    A subclass has `tag`, `about` and `make`.

    `ToolCall.info` has "reward" (of that step), "return" (of the episode so far), "terminated" and "truncated".
    """

    tag: str
    about: About
    copies_exactly = False
    """True if `copy.deepcopy` gives an environment that continues in the same way. False: a branch replays its parent's
    actions in a new environment. With the same seed its answers should be the same; tools/replay_mismatch counts
    differences."""
    deadline_s = 60.0
    """Largest number of seconds for a reset, a step, a copy or a close. If the environment takes longer, this is an
    exception of the tool, and the trajectory is dropped."""

    def make(self, context: ToolContext) -> Any:
        """Return a new environment. `context.row` has the columns of the prompt's row."""
        raise NotImplementedError

    def seed(self, context: ToolContext) -> int:
        """Return the seed of `reset`: the row's column `seed` if it exists, else the group's seed."""
        return int(context.row.get("seed", context.seed))

    def parse(self, argument: str, env: Any) -> Any:
        """Return the model's action: parsed as JSON, else the text itself. Raises ValueError for an invalid action."""
        try:
            action = json.loads(argument)
        except (ValueError, RecursionError):  # RecursionError: nested too deeply
            action = argument.strip()
        space = getattr(env, "action_space", None)
        if space is not None and not space.contains(action):
            raise ValueError(f"{argument.strip()!r} is no action of {space}")
        return action

    def show(self, observation: Any) -> str:
        """Return an observation as text for the model."""
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
        episode.terminated = bool(terminated)
        episode.truncated = bool(truncated)
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
        """Return the result of `work`. Raises TimeoutError after the deadline; a thread that hangs is left alone."""
        async with asyncio.timeout(self.deadline_s):
            return await on_thread(f"arpo-{self.tag}", work, *arguments)

    async def aclose(self) -> None:
        """Nothing to release: the sessions are closed."""


class FromOpenEnv:
    """An environment from a client of OpenEnv: `make` returns FromOpenEnv(MyEnv(base_url=URL).sync()).

    Such a client waits for its answers: to `reset(seed=...)` and `step(action)` an observation, a reward, and `done`.
    """

    def __init__(self, client: Any, to_action: Callable[[Any], Any] = lambda action: action):
        """to_action: converts the result of the tool's `parse` into an action, like lambda s: Move(s)."""
        self.client = client
        self.to_action = to_action

    def reset(self, *, seed: int) -> tuple[Any, dict]:
        return self.client.reset(seed=seed).observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        result = self.client.step(self.to_action(action))
        return result.observation, float(result.reward or 0.0), bool(result.done), False, {}

    def close(self) -> None:
        self.client.close()


def with_observations(tool: EnvironmentTool, rows: Iterable[tuple[str, dict]], num_seeds: int) -> Iterator[dict]:
    """Yield each row once for each seed below `num_seeds`, with this seed in the column `seed`.

    rows: (place, row) pairs. The first observation of the environment is appended to the question, or replaces
    {observation} in it. Raises UserError for a row that is not a question.
    """

    async def first(context: ToolContext) -> str:
        session = await tool.open(context)
        await tool.close(session)
        return tool.show(session.observation)

    for place, row in rows:
        for seed in range(num_seeds):
            try:
                prompt, _ = parse_prompt(row | {"seed": seed}, place, default_source="")
            except BadRow as error:
                raise UserError(f"{place}: {error}") from None
            shown = asyncio.run(first(ToolContext(prompt.prompt_id, "0", 0, seed=seed, row=prompt.meta)))
            [*before, last] = prompt.messages
            text = last["content"]
            text = text.replace("{observation}", shown) if "{observation}" in text else f"{text}\n\n{shown}"
            others = {name: value for name, value in row.items() if name not in QUESTION_FIELDS}
            yield others | {"prompt": [*before, last | {"content": text}], "seed": seed}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.tools.environment")
    parser.add_argument("tool", help="the environment, FILE.py:NAME")
    parser.add_argument("rows", help="file of prompts")
    parser.add_argument("--out", type=Path, required=True, help="file to write (.jsonl)")
    parser.add_argument("--seeds", type=int, default=1, help="environments, and so rows, of each prompt")
    args = parser.parse_args()
    try:
        rows = with_observations(find("tool", args.tool, {})(), read_rows(args.rows), args.seeds)
        args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except UserError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
