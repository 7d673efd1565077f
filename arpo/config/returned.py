"""Checks the values that a user's functions (FILE.py:NAME) return: type, length, range, finite numbers.

`call_custom` and `call_named` call a user's function. The other functions check a returned value. All raise a UserError
of one line. The line begins with `subject`: the option, the function, and the value's meaning. This module does not
import torch, and recognises a tensor by its methods.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from arpo.config.named import brief, find, is_own
from arpo.errors import UserError

MAX_SHOWN_CHARS = 80
"""Number of characters of a wrong value that a message shows."""
T = TypeVar("T")


def call_custom(subject: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a user's function. Raises UserError if the function raises."""
    try:
        return function(*arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{subject} failed ({brief(error)})") from error


def call_named(
    option: str, value: str, ours: Mapping[str, Callable[..., T]], *arguments: Any, pair: int | None = None
) -> T:
    """Call the function named by an option. Raises UserError if the function is the user's, and raises.

    `pair`: the option names a pair of functions; call the first (0) or the second (1).
    """
    function = find(option, value, ours)
    subject = f"{option}={value}"
    if pair is not None:
        function = checked_instance(function, subject, tuple, length=2)[pair]
    return call_custom(subject, function, *arguments) if is_own(value) else function(*arguments)


def checked_number(value: object, subject: str, low: float = -math.inf, high: float = math.inf) -> float:
    """Return a number of Python, NumPy or torch as a float. It must be finite, and within [low, high].

    >>> checked_number(True, "branching.selector=my.py:f: P(branch)", 0, 1)
    1.0
    """
    try:
        plain = value.item() if hasattr(value, "item") else value
        if isinstance(plain, str | bytes):
            raise TypeError("a text is no number")
        found = float(plain)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UserError(f"{subject} is {shown(value)}; it must be a number") from None
    if not math.isfinite(found):
        raise UserError(f"{subject} is {found}; it must be finite")
    if not low <= found <= high:
        raise UserError(f"{subject} is {found:g}; it must be from {low:g} to {high:g}")
    return found


def checked_numbers(values: object, subject: str, length: int) -> Any:
    """Return finite numbers as a NumPy array, (length,) float64.

    >>> checked_numbers((1, 2), "advantage.kind=my.py:f: the advantages", 2)
    array([1., 2.])
    """
    import numpy as np  # here, because a command's --help imports the config too

    try:
        plain = values.detach().double().cpu() if hasattr(values, "detach") else values
        found = np.asarray(plain, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UserError(f"{subject} are {shown(values)}; they must be {length} numbers") from None
    if found.shape != (length,):
        has = {0: shown(values), 1: f"{found.size} numbers"}.get(found.ndim, f"of the shape {found.shape}")
        raise UserError(f"{subject} are {has}; they must be {length} numbers")
    is_finite = np.isfinite(found)
    if not is_finite.all():
        index = int(is_finite.argmin())
        raise UserError(f"{subject} hold {found[index]} (at {index} of {length}); all must be finite")
    return found


def checked_tensor(value: Any, subject: str, *shapes: tuple[int, ...]) -> Any:
    """Return the value if it is a tensor of one of these shapes."""
    # its numbers are not checked: that would make the host wait for the GPU
    if not hasattr(value, "detach"):
        raise UserError(f"{subject} is {shown(value)}; it must be a tensor")
    if tuple(value.shape) not in shapes:
        expected = " or ".join(map(str, dict.fromkeys(shapes)))
        raise UserError(f"{subject} has the shape {tuple(value.shape)}; it must have {expected}")
    return value


def checked_integer(value: Any, subject: str, low: int, high: int) -> int:
    """Return an integer of Python, NumPy or torch within [low, high]."""
    try:
        found = operator.index(value)
    except TypeError:
        raise UserError(f"{subject} is {shown(value)}; it must be an integer") from None
    if not low <= found <= high:
        raise UserError(f"{subject} is {found}; it must be from {low} to {high}")
    return found


def checked_integers(values: Any, subject: str, high: int) -> list[int]:
    """Return a sequence of integers within [0, high], such as token ids, as a list."""
    try:
        found = list(values)
    except TypeError:
        raise UserError(f"{subject} are {shown(values)}; they must be a list of integers") from None
    return [checked_integer(value, f"{subject}: entry {index}", 0, high) for index, value in enumerate(found)]


def checked_instance(value: object, subject: str, kind: type[T], length: int | None = None) -> T:
    """Return the value if the value has the type. With a `length`, the value must also have `length` entries."""
    if not isinstance(value, kind):
        raise UserError(f"{subject} is {shown(value)}; it must be a {kind.__name__}")
    if length is not None and len(value) != length:
        raise UserError(f"{subject} has {len(value)} entries; it must have {length}")
    return value


def checked_values(value: object, subject: str, keys: Iterable[str]) -> Sequence[Any]:
    """Return a dict's values of these keys. The dict may have other keys."""
    found = checked_instance(value, subject, dict)
    keys = list(keys)
    missing = [key for key in keys if key not in found]
    if missing:
        raise UserError(f"{subject} has nothing for {missing[0]!r}; it must have {', '.join(map(repr, keys))}")
    return [found[key] for key in keys]


def checked_names(values: Iterable[str], subject: str, reserved: Iterable[str]) -> None:
    """Raise UserError if a name in `values` is the name of another logged number."""
    for name in values:
        if name in reserved:
            raise UserError(f"{subject} has {name!r}, which is another number's name; rename it")


def whole_text(text: str) -> str:
    r"""Return the text as UTF-8 can encode it. Half of a character (a lone surrogate) becomes U+FFFD. Two halves that
    belong together become the character.

    >>> whole_text("a\ud83d \ud83d\ude00")
    'a� 😀'
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def shown(value: object) -> str:
    """Return a value as text of one line. A value other than a text or a number is followed by its type."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # raised by a user's __repr__
        text = f"({type(error).__name__} in its repr)"
    text = text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
    return text if value is None or isinstance(value, str | int | float) else f"{text} ({type(value).__name__})"
