"""Facts about an option (a knob), written on the option's field: the range, the settings it needs, and what it decides.

    clip_low: Annotated[float, AtLeast(0), Needs("loss.kind", not_in=("reinforce",), use=("ppo", "gspo"))] = 0.2

| fact                                                 | the value is refused                           |
|------------------------------------------------------|------------------------------------------------|
| Between(0, 1), AtLeast(0)                            | if it lies outside                             |
| Needs("loss.kind", "gspo", "mine")                   | unless loss.kind is gspo or mine               |
| Needs("loss.kind", not_in=("ppo",), use="gspo")      | if loss.kind is ppo. Under any other loss,     |
|                                                      | also a user's, the knob has an effect          |
| Needs("tools.names", has=("python",))                | unless the list has the name python            |
|                                                      | ("overlong=1" counts as "overlong")            |
| Needs("branching.selector", met=is_rule, use="arpo") | unless the function returns True for the value |
| Needs("loss.kl_coefficient", use=0.001)              | if the setting is 0, False or empty            |
| MAY_CHANGE                                           | never: the value may change within a run       |
| without MAY_CHANGE                                   | if a resumed run began with another value      |

A knob may need several settings. A need is checked only for a value that differs from the default, and only in a script
that has the setting. Two errors:

    --loss.clip_low -0.1            loss.clip_low=-0.1 must be at least 0
    --loss.kind reinforce --loss.clip_low 0.1
                                    loss.clip_low=0.1 is ignored unless loss.kind=ppo or gspo (it is reinforce)

A section lists in `FACTS` what holds for all its knobs. A fact on a field replaces the facts of the same class in
`FACTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import inf, isinf, isnan
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from arpo.config.named import is_own

# ---- the facts


@dataclass(frozen=True)
class Between:
    """The smallest and the largest value of a number."""

    low: float
    high: float


class AtLeast(Between):
    """The smallest value of a number."""

    def __init__(self, low: float):
        super().__init__(low, inf)


class Needs:
    """A setting that gives the knob an effect. Without the setting, the knob has no effect. The table above lists the
    forms."""

    def __init__(
        self,
        owner: str,
        *values: object,
        not_in: tuple[str, ...] = (),
        has: tuple[str, ...] = (),
        met: Callable[[Any], bool] | None = None,
        use: object = (),
        say: str = "",
        unless_custom: bool = False,
    ):
        """`owner`: key of the setting. `use`: one or more values that give the knob an effect; the default is `values`
        or `has`. `say`: the words of the error message, if `use` as text does not say enough. `unless_custom`: a custom
        value of the knob (FILE.py:NAME) does not need the setting. A tree credit of ours gives nothing new without
        branches, but a custom one can judge the turns of a trajectory."""
        self.owner = owner
        self.values = values
        self.not_in = not_in
        self.has = has
        self.met = met
        self.use = (use if isinstance(use, tuple) else (use,)) or values or has
        self.say = say
        self.unless_custom = unless_custom

    @property
    def examples(self) -> tuple[object, ...]:
        """Values of the owner that give the knob an effect, the usual value first."""
        return (*self.values, *((entry,) for entry in self.use)) if self.has else self.use

    def wanted(self) -> str:
        """Return the required value of the owner, in words: "loss.kind=ppo or gspo", "loss.kl_coefficient is above
        0"."""
        if self.say:
            return f"{self.owner}={self.say}"
        if type(self.use[0]) in (int, float) and not self.values:
            return f"{self.owner} is above 0"
        *others, last = [str(value) or '""' for value in self.use]
        return f"{self.owner}={', '.join(others)} or {last}" if others else f"{self.owner}={last}"

    def is_met(self, value: Any) -> bool:
        """Return True if this value of the owner gives the knob an effect."""
        if self.met:
            return self.met(value)
        if self.not_in:
            return value not in self.not_in
        if self.has:
            names = [entry.rpartition("=")[0] or entry for entry in value]
            return value in self.values or any(name in self.has for name in names)
        return value in self.values if self.values else bool(value)


ALWAYS_MATTERS = Needs("")
"""The knob does not inherit the needs of its section."""


@dataclass(frozen=True)
class Decides:
    """The effects of a knob. A knob without this fact decides everything."""

    learning: bool = True
    """True: the knob decides the result of training, so a run continues only under its first value. False: the knob
    decides only how long, how often or how fast."""
    sampling: bool = True
    """True: the knob decides the samples of an evaluation. Only evaluations with the same value stand in one table."""
    when: tuple[str, object] | None = None
    """Key and value of another setting. The knob decides the result of training only under that value."""


DECIDES = Decides()
MAY_CHANGE = Decides(learning=False, sampling=False)
OF_TRAINING = Decides(sampling=False)

# ---- the loop over them

F = TypeVar("F")


@cache
def facts_of(config: type) -> dict[str, tuple[object, ...]]:
    """Return the facts of all knobs of a config or section, by dotted keys."""
    hints = get_type_hints(config, include_extras=True)
    general = getattr(config, "FACTS", ())
    found: dict[str, tuple[object, ...]] = {}
    for f in fields(config):
        hint = hints[f.name]
        kind, *own = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if is_dataclass(kind):
            found |= {f"{f.name}.{key}": facts for key, facts in facts_of(kind).items()}
        else:
            found[f.name] = tuple(own)
    return {key: (*own, *(fact for fact in general if not of_kind(type(fact), own))) for key, own in found.items()}


def of_kind(kind: type[F], facts: tuple[object, ...]) -> list[F]:
    """Return the facts of this kind."""
    return [fact for fact in facts if isinstance(fact, kind)]


def decides_sampling(key: str, cfg: object) -> bool:
    """Return True if this key of a script's config decides the samples of an evaluation."""
    return all(decides.sampling for decides in of_kind(Decides, facts_of(type(cfg))[key]))


def may_change(key: str, cfg: object) -> bool:
    """Return True if a run may continue under another value of this key."""
    decides = of_kind(Decides, facts_of(type(cfg))[key])
    return any(not d.learning or (d.when is not None and leaves(cfg).get(d.when[0]) != d.when[1]) for d in decides)


def out_of_range(cfg: object) -> str:
    """Return an error message for all numbers of a config that are out of range; "" if there are none.

    A number may be infinite only if its range is Between(..., inf).
    """
    values = leaves(cfg)
    wrong: list[str] = []
    for knob, facts in facts_of(type(cfg)).items():
        spans = of_kind(Between, facts)
        may_be_infinite = any(span.high == inf and not isinstance(span, AtLeast) for span in spans)
        if any(isnan(x) or (isinf(x) and not may_be_infinite) for x in _floats(values[knob])):
            wrong.append(f"{knob}={values[knob]} must be a finite number")
            continue
        for span in spans:
            if values[knob] is not None and not span.low <= values[knob] <= span.high:
                bounds = f"be at least {span.low}" if span.high == inf else f"lie between {span.low} and {span.high}"
                wrong.append(f"{knob}={values[knob]} must {bounds}")
    return "; ".join(wrong)


def _floats(value: object) -> list[float]:
    return [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, float)]


class Ignored(NamedTuple):
    """A knob that was changed from its default without effect."""

    knob: str
    owner: str
    """Key of the setting that makes the knob ineffective"""
    message: str


def ignored(cfg: object) -> list[Ignored]:
    """Return all knobs of a config that differ from their default but lack a needed setting."""
    values = leaves(cfg)
    facts = facts_of(type(cfg))
    defaults = leaves({f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(cfg)})
    found = []
    for knob in [knob for knob, value in values.items() if value != defaults[knob]]:
        for need in of_kind(Needs, facts[knob]):
            if need.unless_custom and is_own(str(values[knob])):
                continue
            if need.owner in values and not need.is_met(values[need.owner]):
                now = "empty" if values[need.owner] in ("", ()) else values[need.owner]
                message = f"{knob}={values[knob]} is ignored unless {need.wanted()} (it is {now})"
                found.append(Ignored(knob, need.owner, message))
    return found


def leaves(tree: object, prefix: str = "") -> dict[str, object]:
    """Return all values of nested configs or dicts by dotted keys. {"run": {"seed": 3}} -> {"run.seed": 3}"""
    found: dict[str, object] = {}
    for name, value in (vars(tree) if is_dataclass(tree) else tree).items():
        is_section = is_dataclass(value) or isinstance(value, dict)
        found |= leaves(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return found
