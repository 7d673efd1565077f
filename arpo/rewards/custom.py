"""A reward of one's own: a function in a Python file, called per response or once per batch.

def compute_score(data_source, solution_str, ground_truth, extra_info): ...   # -> float, or dict with "score"
def compute_score(samples): ...            # list of {output, answer, data_source} -> list of float
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from arpo.errors import UserError
from arpo.trajectory import Prompt, Trajectory

FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class CustomReward:
    """A loaded reward function."""

    function: Callable
    batched: bool
    """True if it takes all samples at once."""
    place: str
    """File and function, like "my_reward.py: compute_score", for messages."""

    def try_on(self, prompt: Prompt) -> None:
        """Score an invented response to a real prompt, so that what is wrong is known before any is sampled.

        Raises UserError, as the scoring of a rollout does.
        """
        text = f"<answer>{prompt.answers[0]}</answer>"
        invented = Trajectory(prompt.prompt_id, "invented, before the run", text=text, segments=[(text, True)])
        score_with_custom(self, [invented], {prompt.prompt_id: prompt})

    def require_single(self, who: str) -> None:
        """Raise UserError if it takes all samples at once; `who` needs rewards before there are all."""
        if self.batched:
            raise UserError(
                f"{who} needs rewards while the groups still grow, but {self.place} takes the whole batch at once; "
                "let it take one response, or choose another selector"
            )


def load_custom(file: str, function: str) -> CustomReward:
    """Import `function` from a Python file. One required parameter means that it takes all samples at once.

    Raises UserError where the file cannot be imported or holds no such function.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"reward.file={file}: there is no such file; check the path")
    name = f"arpo_custom_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise UserError(f"reward.file={file}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"reward.file={file}: cannot be imported ({_brief(error)})") from error
    found = getattr(module, function, None)
    if not callable(found):
        defined = ", ".join(n for n, v in vars(module).items() if inspect.isfunction(v)) or "no function"
        raise UserError(f"reward.function={function}: {file} does not define it (it has {defined})")
    return CustomReward(found, batched=takes_a_batch(found, f"{file}: {function}"), place=f"{file}: {function}")


def takes_a_batch(function: Callable, place: str) -> bool:
    """Return whether the function takes all samples at once. Raises UserError for parameters that fit neither form."""
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{place} is async; a reward is called and must return its number: make it a plain def")
    signature = inspect.signature(function)
    required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in VARIADIC]
    takes_keywords = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    if len(required) == 1 and not takes_keywords:
        return True
    try:
        signature.bind(*FIELDS)
    except TypeError:
        takes = ", ".join(signature.parameters) or "nothing"
        raise UserError(
            f"{place} takes ({takes}); it must take ({', '.join(FIELDS)}), or one list of samples"
        ) from None
    return False


def score_with_custom(custom: CustomReward, trajectories: list[Trajectory], prompts_by_id: dict[str, Prompt]) -> None:
    """Fill reward, parts (the numbers a dict result holds besides `score`) and reason (its `reason`, if text)."""
    pairs = [(t, prompts_by_id[t.prompt_id]) for t in trajectories]
    results = _batch(custom, pairs) if custom.batched else (_single(custom, t, prompt) for t, prompt in pairs)
    for t, result in zip(trajectories, results, strict=True):
        t.reward, t.reward_parts, t.reward_reason = _parse(result, f"{custom.place}: {_sample(t)}")


def _single(custom: CustomReward, t: Trajectory, prompt: Prompt) -> object:
    extra_info = prompt.meta.get("extra_info", prompt.meta)
    return _call(custom, _sample(t), prompt.data_source, t.text, _truth(prompt), extra_info)


def _batch(custom: CustomReward, pairs: list[tuple[Trajectory, Prompt]]) -> list:
    samples = [{"output": t.text, "answer": _truth(p), "data_source": p.data_source} for t, p in pairs]
    where = f"{len(samples)} samples from {_sample(pairs[0][0])}" if pairs else "0 samples"
    results = _call(custom, where, samples)
    if len(results) != len(samples):
        raise UserError(f"{custom.place} returned {len(results)} scores for {where}; return one per sample")
    return results


def _call(custom: CustomReward, where: str, *args: object):
    try:
        result = custom.function(*args)
        return list(result) if custom.batched else result
    except Exception as error:
        raise UserError(f"{custom.place} failed on {where} ({_brief(error)})") from error


def _truth(prompt: Prompt) -> str | list[str]:
    return prompt.answers[0] if len(prompt.answers) == 1 else list(prompt.answers)


def _parse(result: object, where: str) -> tuple[float, dict[str, float], str]:
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


def _brief(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
