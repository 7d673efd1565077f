"""A reward of one's own: a function in a Python file, called per response or once per batch, which may be async.

def compute_score(data_source, solution_str, ground_truth, extra_info): ...   # -> float, or dict with "score"
def compute_score(trajectory, prompt): ...       # a whole Trajectory and its Prompt (trajectory.py)
def compute_score(trajectories, prompts): ...    # lists of them, of equal length -> a list

An object with a method `begin` hears of each group during the rollout, before it is called for the scores.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from arpo.config.exits import watched
from arpo.config.named import brief, find
from arpo.config.returned import number, whole_text
from arpo.errors import UserError
from arpo.protocol import Codec
from arpo.trajectory import Group, Prompt, StopReason, Trajectory, Turn

FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
ONE, ALL = ("trajectory", "prompt"), ("trajectories", "prompts")
"""Names of the parameters of a function that gets whole trajectories: one, or all at once."""
MAX_CONCURRENT = 64
"""Most calls of an async function of one response that are under way at the same time."""
MAX_REASON_CHARS = 80
TAKEN = {"mean", "std", "solved_share", "positive_share", "kl_penalty"}
"""Names of other metrics under reward/."""
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Pairs = Sequence[tuple[Trajectory, Prompt]]


@dataclass(frozen=True)
class RewardResult:
    """The reward of a response, and what it is made of."""

    total: float | None
    """None only from a function of the user's: there is no reward, and the trajectory is not trained on."""
    parts: dict[str, float]
    """By rule: format (1 or 0), accuracy (of the boxed answer, even if the format is wrong), tool_bonus. Of a function:
    the numbers that its dict holds besides `score`."""
    reason: str = ""
    """Short stable name of the defect if the total by rule is -1 ("missing_answer", "call_without_result", ...); what a
    function says; else ""."""


@dataclass(frozen=True)
class CustomReward:
    """A loaded reward function."""

    function: Callable
    takes: Literal["text", "one", "all"]
    """Whether it takes the text of a response, a whole trajectory, or all trajectories at once."""
    place: str
    """File and function, like "my_reward.py: compute_score", for messages."""
    runner: asyncio.Runner = field(default_factory=asyncio.Runner, repr=False, compare=False)
    """Has the event loop of an async function: one for the run, since what such a function keeps (a session, say)
    belongs to a loop."""

    @property
    def begins(self) -> bool:
        """True where it wants to hear of each group as soon as that is whole."""
        return hasattr(self.function, "begin")

    def begin(self, group: Group) -> None:
        """Tell it of a group whose trajectories have all ended. Raises UserError."""
        with _named(self, f"prompt {group.prompt.prompt_id}"):
            self.function.begin(group)

    def try_on(self, prompt: Prompt, codec: Codec) -> None:
        """Score two invented responses to a real prompt, so that what is wrong is known before any is sampled: the
        right answer, and one that was cut off before it. Raises UserError, as the scoring of a rollout does."""
        answer = [*codec.encode(codec.answer_text(prompt.answers[0])), codec.tokenizer.eos_token_id]
        invented = []
        for ids, stop_reason in ((answer, StopReason.EOS), (codec.encode("I do"), StopReason.LENGTH)):
            segments = codec.segments(ids, mask := [1] * len(ids))
            response = Trajectory(
                prompt.prompt_id, "invented, before the run", ids, mask, rollout_logprobs=[0.0] * len(ids),
                turns=[Turn(0, len(ids), len(ids))], stop_reason=stop_reason, text=segments[0][0], segments=segments,
            )  # fmt: skip
            invented.append((response, prompt))
        custom_results(self, invented)


def load_custom(option: str, value: str) -> CustomReward:
    """Import the function that an option's value, FILE.py:FUNCTION, names. The names of its parameters say what it
    takes. Raises UserError where the file cannot be imported or holds no such function."""
    found, place = find(option, value, {}), value.replace(":", ": ")
    if not callable(found):
        raise UserError(f"{option}={value} is no function")
    signature = inspect.signature(found)
    required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in VARIADIC]
    if tuple(required) in (ONE, ALL):
        return CustomReward(found, "one" if tuple(required) == ONE else "all", place)
    try:
        signature.bind(*FIELDS)
    except TypeError:
        takes = ", ".join(signature.parameters) or "nothing"
        forms = " or ".join(f"({', '.join(names)})" for names in (FIELDS, ONE, ALL))
        raise UserError(f"{place} takes ({takes}); it must take {forms}") from None
    return CustomReward(found, "text", place)


def custom_results(custom: CustomReward, pairs: Pairs) -> list[RewardResult]:
    """Return what the function says of each trajectory, in order. Raises UserError that names file and sample."""
    if not pairs:  # on ranks that share the engine of another; few functions of batches can do with none
        return []
    if custom.takes == "all":
        where = f"{len(pairs)} samples from {_sample(pairs[0][0])}"
        seen = [t.for_custom_code() for t, _ in pairs]
        [returned] = _call(custom, [(where, (seen, [prompt for _, prompt in pairs]))])
        with _named(custom, where):
            results = list(returned)
        if len(results) != len(pairs) or isinstance(returned, str | dict):
            raise UserError(f"{custom.place} returned {len(results)} scores for {where}; return a list, one per sample")
    elif custom.takes == "one":
        results = _call(custom, [(_sample(t), (t.for_custom_code(), prompt)) for t, prompt in pairs])
    else:
        results = _call(custom, [(_sample(t), _text(t, prompt)) for t, prompt in pairs])
    return [_parse(result, f"{custom.place}: {_sample(t)}") for (t, _), result in zip(pairs, results, strict=True)]


def _text(t: Trajectory, prompt: Prompt) -> tuple:
    truth = prompt.answers[0] if len(prompt.answers) == 1 else list(prompt.answers)
    return prompt.data_source, t.text, truth, prompt.meta.get("extra_info", prompt.meta)


def _call(custom: CustomReward, calls: list[tuple[str, tuple]]) -> list:
    """Return the results of (where, arguments) calls; those of an async function run at the same time."""

    async def call_all() -> list:
        slots = asyncio.Semaphore(MAX_CONCURRENT)

        async def one(where: str, arguments: tuple) -> object:
            async with slots:
                with _named(custom, where):
                    return await custom.function(*arguments)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*call)) for call in calls]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    function = custom.function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return custom.runner.run(call_all())
    results = []
    for where, arguments in calls:
        with _named(custom, where):
            results.append(custom.function(*arguments))
    return results


@contextmanager
def _named(custom: CustomReward, where: str) -> Iterator[None]:
    """Name the function where it does not return, and raise what it raises as a UserError that names it."""
    try:
        with watched(f"{custom.place} on {where}"):
            yield
    except (Exception, SystemExit) as error:
        raise UserError(f"{custom.place} failed on {where} ({brief(error)})") from error


def _parse(result: object, where: str) -> RewardResult:
    parts, reason = {}, ""
    if isinstance(result, dict):
        if "score" not in result:
            raise UserError(f"{where}: the returned dict has no 'score' (it has {', '.join(map(str, result))})")
        parts, reason = _parts(result, where), _reason(result.get("reason"))
        result = result["score"]
        if result is None:  # said on purpose, other than by a function that has forgotten its return
            return RewardResult(None, parts, reason or "no_reward")
    return RewardResult(number(result, f"{where}: the returned score"), parts, reason)


def _parts(result: dict, where: str) -> dict[str, float]:
    """Return the numbers of a dict besides its score. Texts are no numbers to log, and None is none that is known."""
    parts = {}
    for name, value in result.items():
        if name == "score" or value is None or isinstance(value, str):
            continue
        if name in TAKEN:
            raise UserError(f"{where}: the part {name!r} would be logged as another number's name; rename it")
        low, high = (0.0, 1.0) if name == "accuracy" else (-math.inf, math.inf)
        parts[str(name)] = number(value, f"{where}: the part {name!r}", low, high)
    return parts


def _reason(reason: object) -> str:
    """Return a reason as one short line: it is the end of a metric's name."""
    text = whole_text(reason) if isinstance(reason, str) else ""
    return " ".join(text.split())[:MAX_REASON_CHARS]


def _sample(t: Trajectory) -> str:
    return f"prompt {t.prompt_id}, trajectory {t.trajectory_id}"
