"""What a checkpoint keeps of carried groups, and how they go on from it, on the same ranks or on others.

    carried_00003.json.gz    rank 3's groups: trees, tokens, logprobs and decisions so far, requests and calls under way

Plain JSON, without code. Prompts are found again by their ids. Sessions come back by a replay of the calls that they
have answered; calls that were under way run again.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from arpo.branching import Evidence
from arpo.config.bounded import inflate, parse_json, read_file
from arpo.errors import UserError
from arpo.growing import GroupState, Live
from arpo.sampling.carry_over import Begun, Carried, CarryOver
from arpo.tools.sessions import Owner, RecordedCall
from arpo.trajectory import Prompt

COMPRESSION = 1
SCALARS = (int, float, str, bool)


def state_of(carry: CarryOver) -> bytes:
    """Return the file of this rank, of a CarryOver between two steps."""
    loop, sessions = carry.loop, carry.sampler.tools.sessions
    calling: dict[str, list[int]] = {}
    for live, number in loop.calling.values():
        calling.setdefault(live.key, []).append(number)
    # by key, for one that calls twice is one: those that decode first, in the order in which they were submitted
    lives = [*(loop.decoding | {live.key: live for live, _ in loop.calling.values()}).values()]
    records = answered(sessions.records(), lives, calling, sessions.name_of)
    groups = []
    for carried in carry.carried:
        entry = {"number": carried.number, "begun": carried.begun, "prompt": carried.state.prompt.prompt_id}
        entry["state"] = {name: to_plain(value) for name, value in vars(carried.state).items() if name != "prompt"}
        own = [(place, live) for place, live in enumerate(lives) if live.group is carried.state]
        entry["lives"] = [_plain_live(live, place, calling.get(live.key)) for place, live in own]
        mine = () if carried.is_whole else [record for record in records if record[0][0] == entry["prompt"]]
        entry["sessions"] = [[*owner, name, to_plain(calls)] for owner, name, calls in mine]
        groups.append(entry)
    waiting = [[number, prompt.prompt_id] for number, prompt in carry.waiting.items()]
    tree = {"num_drawn": carry.num_drawn, "waiting": waiting, "groups": groups}
    return gzip.compress(json.dumps(tree).encode(), COMPRESSION)


def _plain_live(live: Live, place: int, calls: list[int] | None) -> dict:
    """Return what is saved of a trajectory that grows. `calls`: numbers of those under way; None where it decodes."""
    names = ("path", "evidence", "entropies", "top_logprobs", "has_failed")
    return {name: to_plain(getattr(live, name)) for name in names} | {"place": place, "calls": calls}


def answered(
    records: Iterable[tuple[Owner, str, list[RecordedCall]]],
    lives: Iterable[Live],
    calling: dict[str, list[int]],
    name_of: Callable[[str], str],
) -> list[tuple[Owner, str, list[RecordedCall]]]:
    """Return the records without the calls whose results the trajectory has not read yet: those run again."""
    under_way = {live.owner: live for live in lives if live.key in calling}
    kept = []
    for owner, name, calls in records:
        if live := under_way.get(owner):
            turn = live.trajectory.turns[-1]
            numbers = [n for n, call in enumerate(turn.tool_calls) if name_of(call.tag) == name and call.executed]
            # a session answers in the order of the calls, so those that have been read are the first ones
            num_read = sum(n not in calling[live.key] for n in numbers)
            before = [call for call in calls if call.turn < live.turn_index]
            calls = before + [call for call in calls if call.turn == live.turn_index][:num_read]
        kept.append((owner, name, calls))
    return kept


def restore(carry: CarryOver, files: Sequence[Path], prompts: Iterable[Prompt]) -> None:
    """Fill a new CarryOver from the files that `state_of` wrote on all ranks. Collective.

    On the same number of ranks each gets its own groups again; on another number the groups are dealt out anew. Raises
    UserError for a broken file, or one with other prompts.
    """
    if not files:
        return
    ranks, by_id = carry.team.ranks, {prompt.prompt_id: prompt for prompt in prompts}
    if len(files) == ranks.world_size:
        tree = _read(files[ranks.rank])
        mine = tree["groups"]
    else:
        trees = [_read(file) for file in files]
        tree, everything = trees[0], [plain for tree in trees for plain in tree["groups"]]
        mine = sorted(everything, key=lambda plain: plain["number"])[ranks.rank :: ranks.world_size]
    try:
        carry.num_drawn = tree["num_drawn"]
        carry.waiting = {number: by_id[prompt_id] for number, prompt_id in tree["waiting"]}
        lives = [pair for plain in mine for pair in _add_group(carry, plain, by_id)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"does not fit data.train or this version ({type(error).__name__}: {error})"
        raise UserError(f"{files[0]}: {reason}; give the run the prompts that it had") from None
    for entry, live in sorted(lives, key=lambda pair: pair[0]["place"]):
        if entry["calls"] is None:
            carry.loop.decoding[live.key] = live
        for number in entry["calls"] or ():
            carry.loop.start_call(live, number)
    carry.sampler.tools.park()
    own = [Begun(c.number, c.begun, c.is_whole) for c in carry.carried]
    carry.begun = sorted(entry for part in ranks.all_gather_objects(own) for entry in part)


def check_nothing_is_left(files: Sequence[Path]) -> None:
    """Raise UserError where these files hold unfinished groups, for a run that goes on without carry-over."""
    if any(tree["groups"] or tree["waiting"] for tree in map(_read, files)):
        raise UserError(f"{files[0]}: unfinished groups, which rollout.carry_over=0 would drop; set it to 1")


def _read(file: Path) -> dict:
    try:
        return parse_json(inflate(read_file(file)))
    except (OSError, ValueError) as error:  # its checksum fits: it was not written by `state_of`
        raise UserError(f"{file}: cannot be read ({error}); take an older checkpoint") from None


def _add_group(carry: CarryOver, plain: dict, by_id: dict[str, Prompt]) -> list[tuple[dict, Live]]:
    """Add a group. Return its trajectories that decode or call, with what was saved of each."""
    prompt = by_id[plain["prompt"]]
    stub = {"prompt_id": prompt.prompt_id, "messages": [], "answers": []}
    state = from_plain(GroupState, {"prompt": stub} | plain["state"])
    state.prompt = prompt
    carry.carried.append(Carried(plain["number"], plain["begun"], state))
    carry.loop.num_unfinished += state.size - len(state.wall_s)
    for prompt_id, trajectory_id, name, calls in plain["sessions"]:
        carry.sampler.tools.sessions.restore((prompt_id, trajectory_id), name, from_plain(list[RecordedCall], calls))
    lives = []
    for entry in plain["lives"]:
        path = tuple(entry["path"])
        known = from_plain(Evidence | None, entry["evidence"])
        live = Live(state.trajectories[path], state, path, known, entry["entropies"], entry["top_logprobs"])
        live.has_failed = entry["has_failed"]
        lives.append((entry, live))
    return lives


# ---- dataclasses as plain JSON values, and back by their type hints

_hints = cache(get_type_hints)


def to_plain(value: Any) -> Any:
    """Return a value as JSON can hold it: a dict whose keys are no strings as pairs, {(0,): 1} -> [[[0], 1]]."""
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(one) for key, one in value.items()}
        return [[to_plain(key), to_plain(one)] for key, one in value.items()]
    if isinstance(value, set):
        return [to_plain(one) for one in sorted(value)]
    if isinstance(value, list | tuple):
        is_flat = len(value) > 0 and type(value[0]) in SCALARS  # hints give a list one type: tokens, logprobs
        return list(value) if is_flat and isinstance(value, list) else [to_plain(one) for one in value]
    return value


def from_plain(kind: Any, plain: Any) -> Any:
    """Invert `to_plain` for a value of this type. Raises TypeError, ValueError or KeyError for what is none."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if plain is None else from_plain(next(arg for arg in args if arg is not NoneType), plain)
    if is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: from_plain(hints[name], one) for name, one in plain.items()})
    if origin is dict:
        pairs = plain.items() if isinstance(plain, dict) else plain
        return {from_plain(args[0], key): from_plain(args[1], one) for key, one in pairs}
    if origin in (list, set):
        return origin(plain) if args[0] in SCALARS else origin(from_plain(args[0], one) for one in plain)
    if origin is tuple:
        kinds = [args[0]] * len(plain) if args[-1] is Ellipsis else args
        return tuple(from_plain(one, value) for one, value in zip(kinds, plain, strict=True))
    return kind(plain) if isinstance(kind, type) and issubclass(kind, Enum) else plain
