"""Custom rewards: a function in a Python file, called per response or once per batch. It may be async.

def compute_score(data_source, solution_str, ground_truth, extra_info): ...   # -> float, or dict with "score"
def compute_score(trajectory, prompt): ...       # a Trajectory and its Prompt (trajectory.py)
def compute_score(trajectories, prompts): ...    # two lists of equal length -> a list

If the function is an object with a method `begin`, this method gets each group during the rollout, before the scoring.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from arpo.config.exits import watched
from arpo.config.named import brief, find
from arpo.config.returned import checked_number, whole_text
from arpo.errors import Outage, UserError, innermost
from arpo.protocol import Codec
from arpo.trajectory import Group, Prompt, StopReason, Trajectory, Turn

FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
ONE = ("trajectory", "prompt")
"""Parameter names of a function that gets one trajectory."""
ALL = ("trajectories", "prompts")
"""Parameter names of a function that gets all trajectories at once."""
MAX_CONCURRENT = 64
"""Maximum number of concurrent calls of an async function."""
MAX_REASON_CHARS = 80
RESERVED_NAMES = {"mean", "std", "solved_share", "positive_share", "kl_penalty"}
"""Names of other metrics under reward/. No part may have one of them."""
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Pairs = Sequence[tuple[Trajectory, Prompt]]


@dataclass(frozen=True)
class RewardResult:
    """The reward of a response, with its parts."""

    total: float | None
    """The reward. None (only from a custom function) = no reward: the trajectory is not trained on."""
    parts: dict[str, float]
    """By rule: format (1 or 0), accuracy (of the boxed answer, even with a wrong format), tool_bonus. From a custom
    function: the numbers in its dict besides `score`."""
    reason: str = ""
    """By rule: short stable name of the defect behind a total of -1 ("missing_answer", "call_without_result", ...).
    From a custom function: its `reason`. Otherwise ""."""


@dataclass(frozen=True)
class CustomReward:
    """A loaded reward function."""

    function: Callable
    takes: Literal["text", "named", "one", "all"]
    """Input of the function: FIELDS of a response by their order ("text") or by their names, one trajectory, or all
    trajectories at once."""
    place: str
    """File and function, like "my_reward.py: compute_score", for messages."""
    runner: asyncio.Runner = field(default_factory=asyncio.Runner, repr=False, compare=False)
    """Runs the event loop of an async function. There is one loop per run, since the objects of such a function (like
    an HTTP session) belong to a loop."""

    @property
    def has_begin(self) -> bool:
        """True if the function wants each group as soon as it is finished."""
        return hasattr(self.function, "begin")

    def begin(self, group: Group) -> None:
        """Pass a finished group to the function. Raises UserError."""
        with _errors_named(self, f"prompt {group.prompt.prompt_id}"):
            self.function.begin(group)

    def try_on(self, prompt: Prompt, codec: Codec) -> None:
        """Score two invented responses to a real prompt, to find errors before any response is sampled.

        The responses are the right answer, and one without an answer that ran out of tokens. Raises UserError, as in a
        real scoring.
        """
        answer = [*codec.encode(codec.answer_text(prompt.answers[0])), codec.tokenizer.eos_token_id]
        unfinished = codec.encode("I do")
        pairs = []
        for token_ids, stop_reason in ((answer, StopReason.EOS), (unfinished, StopReason.LENGTH)):
            num_tokens = len(token_ids)
            loss_mask = [1] * num_tokens
            segments = codec.segments(token_ids, loss_mask)
            response = Trajectory(
                prompt_id=prompt.prompt_id,
                trajectory_id="invented, before the run",
                token_ids=token_ids,
                loss_mask=loss_mask,
                rollout_logprobs=[0.0] * num_tokens,
                turns=[Turn(0, num_tokens, num_tokens)],
                stop_reason=stop_reason,
                text=segments[0][0],
                segments=segments,
            )
            pairs.append((response, prompt))
        custom_results(self, pairs)


def load_custom(option: str, value: str) -> CustomReward:
    """Import the function of an option's value, FILE.py:FUNCTION. The names of its parameters decide its input.

    Raises UserError if the file cannot be imported, or has no such function.
    """
    function = find(option, value, {})
    place = value.replace(":", ": ")
    if not callable(function):
        raise UserError(f"{option}={value} is no function")
    signature = inspect.signature(function)
    required = tuple(p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in VARIADIC)
    if required == ONE:
        return CustomReward(function, "one", place)
    if required == ALL:
        return CustomReward(function, "all", place)
    if _can_call(signature, **dict.fromkeys(FIELDS)):
        return CustomReward(function, "named", place)
    names = tuple(signature.parameters)
    is_in_order = all(names.index(name) == index for index, name in enumerate(FIELDS) if name in names)
    if is_in_order and _can_call(signature, *FIELDS):
        return CustomReward(function, "text", place)
    forms = " or ".join(f"({', '.join(form)})" for form in (FIELDS, ONE, ALL))
    raise UserError(f"{place} takes ({', '.join(names) or 'nothing'}); it must take {forms}")


def _can_call(signature: inspect.Signature, *arguments: object, **named: object) -> bool:
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True


def custom_results(custom: CustomReward, pairs: Pairs) -> list[RewardResult]:
    """Return the function's result for each trajectory, in order. Raises UserError with file and sample."""
    if not pairs:
        # Ranks that share another rank's engine have no trajectories. Few batch functions accept an empty list.
        return []
    if custom.takes == "all":
        samples = f"{len(pairs)} samples from {_sample(pairs[0][0])}"
        trajectories = [t.for_custom_code() for t, _ in pairs]
        prompts = [prompt for _, prompt in pairs]
        [returned] = _call(custom, [(samples, (trajectories, prompts))])
        with _errors_named(custom, samples):
            results = list(returned)
        if len(results) != len(pairs) or isinstance(returned, str | dict):
            raise UserError(
                f"{custom.place} returned {len(results)} scores for {samples}; return a list, one per sample"
            )
    elif custom.takes == "one":
        results = _call(custom, [(_sample(t), (t.for_custom_code(), prompt)) for t, prompt in pairs])
    else:
        values = [_values_of_fields(t, prompt) for t, prompt in pairs]
        if custom.takes == "named":
            values = [dict(zip(FIELDS, of_response, strict=True)) for of_response in values]
        results = _call(custom, [(_sample(t), v) for (t, _), v in zip(pairs, values, strict=True)])
    return [_parse(result, f"{custom.place}: {_sample(t)}") for (t, _), result in zip(pairs, results, strict=True)]


def _values_of_fields(t: Trajectory, prompt: Prompt) -> tuple:
    """Return the values of FIELDS, in their order."""
    truth = prompt.answers[0] if len(prompt.answers) == 1 else list(prompt.answers)
    return prompt.data_source, t.text, truth, prompt.meta.get("extra_info", prompt.meta)


def _call(custom: CustomReward, calls: list[tuple[str, tuple | dict]]) -> list:
    """Return the results of (sample, arguments) calls. A dict has arguments by name. Calls of an async function run
    concurrently."""

    def call(arguments: tuple | dict) -> Any:
        return custom.function(**arguments) if isinstance(arguments, dict) else custom.function(*arguments)

    async def call_all() -> list:
        slots = asyncio.Semaphore(MAX_CONCURRENT)

        async def call_one(sample: str, arguments: tuple | dict) -> object:
            async with slots:
                with _errors_named(custom, sample):
                    try:
                        return await call(arguments)
                    except asyncio.CancelledError:
                        if asyncio.current_task().cancelling():  # since another response failed
                            raise
                        raise RuntimeError("a CancelledError, which a library raised") from None

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(call_one(sample, arguments)) for sample, arguments in calls]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    function = custom.function
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return custom.runner.run(call_all())
    results = []
    for sample, arguments in calls:
        with _errors_named(custom, sample):
            results.append(call(arguments))
    return results


@contextmanager
def _errors_named(custom: CustomReward, where: str) -> Iterator[None]:
    """Turn any exception of the function into a UserError with its name and sample. Also report if it hangs.

    An Outage (of a judge, say) stays an Outage.
    """
    try:
        with watched(f"{custom.place} on {where}"):
            yield
    except (Exception, SystemExit) as error:
        kind = Outage if isinstance(innermost(error), Outage) else UserError
        raise kind(f"{custom.place} failed on {where} ({brief(error)})") from error


def _parse(returned: object, where: str) -> RewardResult:
    if not isinstance(returned, dict):
        return RewardResult(checked_number(returned, f"{where}: the returned score"), {})
    if "score" not in returned:
        raise UserError(f"{where}: the returned dict has no 'score' (it has {', '.join(map(str, returned))})")
    parts = _parts(returned, where)
    reason = _reason(returned.get("reason"))
    if returned["score"] is None:
        # In a dict None is meant: no reward. A bare None would come from a function without a return.
        return RewardResult(None, parts, reason or "no_reward")
    return RewardResult(checked_number(returned["score"], f"{where}: the returned score"), parts, reason)


def _parts(returned: dict, where: str) -> dict[str, float]:
    """Return the numbers in a dict besides its score. Texts and None are left out."""
    parts = {}
    for name, value in returned.items():
        if name == "score" or value is None or isinstance(value, str):
            continue
        if name in RESERVED_NAMES:
            raise UserError(f"{where}: the part {name!r} would be logged as another number's name; rename it")
        low, high = (0.0, 1.0) if name == "accuracy" else (-math.inf, math.inf)
        parts[str(name)] = checked_number(value, f"{where}: the part {name!r}", low, high)
    return parts


def _reason(reason: object) -> str:
    """Return a reason as one short line, since it becomes the end of a metric's name."""
    text = whole_text(reason) if isinstance(reason, str) else ""
    return " ".join(text.split())[:MAX_REASON_CHARS]


def _sample(t: Trajectory) -> str:
    return f"prompt {t.prompt_id}, trajectory {t.trajectory_id}"
