"""A reward of one's own: a function in a Python file, called per response or once per batch, which may be async.

def compute_score(data_source, solution_str, ground_truth, extra_info): ...   # -> float, or dict with "score"
def compute_score(samples): ...                  # list of {output, answer, data_source} -> list of these
def compute_score(trajectory, prompt): ...       # a whole Trajectory and its Prompt (trajectory.py)
def compute_score(trajectories, prompts): ...    # lists of them, of equal length
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from arpo.config.named import brief, find
from arpo.errors import UserError
from arpo.protocol import Codec
from arpo.start.exits import watched
from arpo.trajectory import Prompt, StopReason, Trajectory, Turn

FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
ONE_WHOLE, ALL_WHOLE = ("trajectory", "prompt"), ("trajectories", "prompts")
"""Names of the parameters of a function that gets whole trajectories: one, or all at once."""
MAX_CONCURRENT = 64
"""Most calls of an async function of one response that are under way at the same time."""
Score = tuple[float, dict[str, float], str]
"""Value, the numbers that a dict result holds besides `score`, and its `reason`, if that is text."""
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class CustomReward:
    """A loaded reward function."""

    function: Callable
    batched: bool
    """True if it takes all samples at once."""
    whole: bool
    """True if it takes trajectories and prompts, not just texts and answers."""
    place: str
    """File and function, like "my_reward.py: compute_score", for messages."""
    runner: asyncio.Runner = field(default_factory=asyncio.Runner, repr=False, compare=False)
    """Has the event loop of an async function: one for the run, since what such a function keeps (a session, say)
    belongs to a loop."""

    def try_on(self, prompt: Prompt, codec: Codec) -> None:
        """Score an invented response to a real prompt, so that what is wrong is known before any is sampled.

        Raises UserError, as the scoring of a rollout does.
        """
        ids = [*codec.encode(codec.answer_text(prompt.answers[0])), codec.tokenizer.eos_token_id]
        segments = codec.segments(ids, mask := [1] * len(ids))
        invented = Trajectory(
            prompt.prompt_id, "invented, before the run", ids, mask, rollout_logprobs=[0.0] * len(ids),
            turns=[Turn(0, len(ids), len(ids))], stop_reason=StopReason.EOS, text=segments[0][0], segments=segments,
        )  # fmt: skip
        custom_scores(self, [(invented, prompt)])


def load_custom(option: str, value: str) -> CustomReward:
    """Import the function that an option's value, FILE.py:FUNCTION, names.

    Parameters called as in ONE_WHOLE or ALL_WHOLE mean that it takes whole trajectories. Else one required parameter
    means that it takes all samples at once. Raises UserError where the file cannot be imported or holds no such
    function.
    """
    found, place = find(option, value, {}), value.replace(":", ": ")
    if not callable(found):
        raise UserError(f"{option}={value} is no function")
    batched, whole = form_of(found, place)
    return CustomReward(found, batched, whole, place)


def form_of(function: Callable, place: str) -> tuple[bool, bool]:
    """Return whether the function takes all samples at once, and whether it takes whole trajectories.

    Raises UserError for parameters that fit none of the forms.
    """
    signature = inspect.signature(function)
    required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in VARIADIC]
    takes_keywords = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if tuple(required) in (ONE_WHOLE, ALL_WHOLE):
        return tuple(required) == ALL_WHOLE, True
    if len(required) == 1 and not takes_keywords:
        return True, False
    try:
        signature.bind(*FIELDS)
    except TypeError:
        takes = ", ".join(signature.parameters) or "nothing"
        whole = " or ".join(f"({', '.join(names)})" for names in (ONE_WHOLE, ALL_WHOLE))
        raise UserError(
            f"{place} takes ({takes}); it must take ({', '.join(FIELDS)}), or one list of samples, or {whole}"
        ) from None
    return False, False


def score_with_custom(custom: CustomReward, trajectories: list[Trajectory], prompts_by_id: dict[str, Prompt]) -> None:
    """Fill reward, parts (the numbers a dict result holds besides `score`) and reason (its `reason`, if text)."""
    scores = custom_scores(custom, [(t, prompts_by_id[t.prompt_id]) for t in trajectories])
    for t, values in zip(trajectories, scores, strict=True):
        t.reward, t.reward_parts, t.reward_reason = values


def custom_scores(custom: CustomReward, pairs: Sequence[tuple[Trajectory, Prompt]]) -> list[Score]:
    """Return what the function says of each trajectory, in order. Raises UserError that names file and sample."""
    if not pairs:  # on ranks that share the engine of another; few functions of batches can do with none
        return []
    if custom.batched:
        where = f"{len(pairs)} samples from {_sample(pairs[0][0])}"
        [results] = _call(custom, [(where, _batch(custom, pairs))])
        if len(results) != len(pairs):
            raise UserError(f"{custom.place} returned {len(results)} scores for {where}; return one per sample")
    else:
        results = _call(custom, [(_sample(t), _single(custom, t, prompt)) for t, prompt in pairs])
    return [_parse(result, f"{custom.place}: {_sample(t)}") for (t, _), result in zip(pairs, results, strict=True)]


def _single(custom: CustomReward, t: Trajectory, prompt: Prompt) -> tuple:
    if custom.whole:
        return t, prompt
    return prompt.data_source, t.text, _truth(prompt), prompt.meta.get("extra_info", prompt.meta)


def _batch(custom: CustomReward, pairs: Sequence[tuple[Trajectory, Prompt]]) -> tuple:
    if custom.whole:
        return [t for t, _ in pairs], [prompt for _, prompt in pairs]
    return ([{"output": t.text, "answer": _truth(p), "data_source": p.data_source} for t, p in pairs],)


def _call(custom: CustomReward, calls: list[tuple[str, tuple]]) -> list:
    """Return the results of (where, arguments) calls; those of an async function run at the same time."""

    def failed(where: str, error: BaseException) -> UserError:
        return UserError(f"{custom.place} failed on {where} ({brief(error)})")

    def checked(result: object) -> object:
        return list(result) if custom.batched else result

    async def call_all() -> list:
        slots = asyncio.Semaphore(MAX_CONCURRENT)

        async def one(where: str, arguments: tuple) -> object:
            async with slots:
                try:
                    with watched(f"{custom.place} on {where}"):
                        return checked(await custom.function(*arguments))
                except (Exception, SystemExit) as error:
                    raise failed(where, error) from error

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*call)) for call in calls]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    if _is_async(custom.function):
        return custom.runner.run(call_all())
    results = []
    for where, arguments in calls:
        try:
            with watched(f"{custom.place} on {where}"):
                results.append(checked(custom.function(*arguments)))
        except (Exception, SystemExit) as error:
            raise failed(where, error) from error
    return results


def _is_async(function: Callable) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _truth(prompt: Prompt) -> str | list[str]:
    return prompt.answers[0] if len(prompt.answers) == 1 else list(prompt.answers)


def _parse(result: object, where: str) -> Score:
    parts, reason = {}, ""
    if isinstance(result, dict):
        if "score" not in result:
            raise UserError(f"{where}: the returned dict has no 'score' (it has {', '.join(map(str, result))})")
        parts = {k: float(v) for k, v in result.items() if k != "score" and isinstance(v, int | float)}
        reason = result["reason"] if isinstance(result.get("reason"), str) else ""
        result = result["score"]
    try:
        value = float(result)
    except (TypeError, ValueError):
        raise UserError(f"{where}: returned {result!r}; return a number or a dict with 'score'") from None
    if not math.isfinite(value):
        raise UserError(f"{where}: returned {value}; a reward must be finite")
    return value, parts, reason


def _sample(t: Trajectory) -> str:
    return f"prompt {t.prompt_id}, trajectory {t.trajectory_id}"
