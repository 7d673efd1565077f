"""The carried groups in a checkpoint. A run continues from them, with the same or another number of ranks.

    carried_00003.json.gz    rank 3's groups: trees, tokens, logprobs and decisions so far, open requests and calls

Plain JSON, without code. Prompts are saved as ids. A replay of the answered calls restores a session; open calls run
again.
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
from arpo.sampling.carry_over import Carried, CarryOver
from arpo.tools.sessions import Owner, RecordedCall
from arpo.trajectory import Prompt

COMPRESSION = 1
SCALARS = (int, float, str, bool)


def state_of(carry: CarryOver) -> bytes:
    """Return the file of this rank. The CarryOver must be between two steps."""
    loop = carry.loop
    sessions = carry.sampler.tools.sessions
    calling: dict[str, list[int]] = {}
    for live, index in loop.calling.values():
        calling.setdefault(live.key, []).append(index)
    # decoding trajectories first, in the order of submission; by key, because a trajectory may have several calls
    lives = list((loop.decoding | {live.key: live for live, _ in loop.calling.values()}).values())
    records = answered(sessions.records(), lives, calling, sessions.name_of)
    groups = []
    for carried in carry.carried:
        prompt_id = carried.state.prompt.prompt_id
        state = {name: to_plain(value) for name, value in vars(carried.state).items() if name != "prompt"}
        plain_lives = [
            _plain_live(live, place, calling.get(live.key))
            for place, live in enumerate(lives)
            if live.group is carried.state
        ]
        plain_sessions = [
            [*owner, name, to_plain(calls)]
            for owner, name, calls in records
            if owner[0] == prompt_id and not carried.is_finished
        ]
        groups.append(
            {
                "number": carried.number,
                "begun": carried.first_step,
                "prompt": prompt_id,
                "state": state,
                "lives": plain_lives,
                "sessions": plain_sessions,
            }
        )
    waiting = [[number, prompt.prompt_id] for number, prompt in carry.waiting.items()]
    tree = {"num_drawn": carry.num_drawn, "waiting": waiting, "groups": groups}
    return gzip.compress(json.dumps(tree).encode(), COMPRESSION)


def _plain_live(live: Live, place: int, calls: list[int] | None) -> dict:
    """Return the saved values of a growing trajectory.

    place: position in the order of submission. calls: indices of the unfinished calls; None for a decoding trajectory.
    """
    names = ("path", "evidence", "entropies", "top_logprobs", "has_failed")
    return {name: to_plain(getattr(live, name)) for name in names} | {"place": place, "calls": calls}


def answered(
    records: Iterable[tuple[Owner, str, list[RecordedCall]]],
    lives: Iterable[Live],
    calling: dict[str, list[int]],
    name_of: Callable[[str], str],
) -> list[tuple[Owner, str, list[RecordedCall]]]:
    """Return the records without the calls whose results the rollout has not read yet. These calls run again."""
    lives_calling = {live.owner: live for live in lives if live.key in calling}
    kept = []
    for owner, name, calls in records:
        live = lives_calling.get(owner)
        if live:
            turn = live.trajectory.turns[-1]
            indices = [i for i, call in enumerate(turn.tool_calls) if name_of(call.tag) == name and call.executed]
            # a session answers in the order of the calls, so the calls already read are the first calls
            num_read = sum(i not in calling[live.key] for i in indices)
            of_earlier_turns = [call for call in calls if call.turn < live.turn_index]
            of_this_turn = [call for call in calls if call.turn == live.turn_index]
            calls = of_earlier_turns + of_this_turn[:num_read]
        kept.append((owner, name, calls))
    return kept


def restore(carry: CarryOver, files: Sequence[Path], prompts: Iterable[Prompt]) -> None:
    """Fill a new CarryOver from the files written by `state_of` on all ranks. Collective.

    With the same number of ranks, each rank gets its groups again; with another number the groups are dealt out anew.
    Raises UserError for a broken file, a file with other prompts, or a trajectory that is too long now.
    """
    if not files:
        return
    ranks = carry.team.ranks
    file = files[ranks.rank] if len(files) == ranks.world_size else files[0]
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    if len(files) == ranks.world_size:
        tree = _read(files[ranks.rank])
        mine = tree["groups"]
    else:
        trees = [_read(file) for file in files]
        tree = trees[0]
        all_groups = [group for tree_of_rank in trees for group in tree_of_rank["groups"]]
        mine = sorted(all_groups, key=lambda group: group["number"])[ranks.rank :: ranks.world_size]
    try:
        carry.num_drawn = tree["num_drawn"]
        carry.waiting = {number: by_id[prompt_id] for number, prompt_id in tree["waiting"]}
        lives = [pair for group in mine for pair in _add_group(carry, group, by_id)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"does not fit data.train or this version ({type(error).__name__}: {error})"
        raise UserError(f"{file}: {reason}; give the run the prompts that it had") from None
    for plain, live in sorted(lives, key=lambda pair: pair[0]["place"]):
        if plain["calls"] is None:
            if live.room(carry.cfg) <= 0:  # the engine refuses a request for no token
                raise UserError(
                    f"{file}: an unfinished trajectory has no room left, since rollout.max_response_tokens (or "
                    "rollout.max_trajectory_tokens) is smaller now; give it the value that the run had"
                )
            carry.loop.decoding[live.key] = live
        for index in plain["calls"] or ():
            carry.loop.start_call(live, index)
    carry.sampler.tools.park()
    carry.started_groups = carry.all_started_groups()


def check_nothing_is_left(files: Sequence[Path]) -> None:
    """Raise UserError if these files hold unfinished groups: the run continues without carry-over."""
    if any(tree["groups"] or tree["waiting"] for tree in map(_read, files)):
        raise UserError(f"{files[0]}: unfinished groups, which rollout.carry_over=0 would drop; set it to 1")


def _read(file: Path) -> dict:
    try:
        tree = parse_json(inflate(read_file(file)))
        if not isinstance(tree, dict) or not {"groups", "waiting", "num_drawn"} <= tree.keys():
            raise ValueError("not a file of carried groups")
        return tree
    except (OSError, ValueError) as error:  # not written by `state_of`, as the checksum is right
        raise UserError(f"{file}: cannot be read ({error}); take an older checkpoint") from None


def _add_group(carry: CarryOver, plain: dict, by_id: dict[str, Prompt]) -> list[tuple[dict, Live]]:
    """Add a saved group. Return its decoding or calling trajectories, each with the saved values."""
    prompt = by_id[plain["prompt"]]
    stub = {"prompt_id": prompt.prompt_id, "messages": [], "answers": []}
    state = from_plain(GroupState, {"prompt": stub} | plain["state"])
    state.prompt = prompt
    carry.carried.append(Carried(plain["number"], plain["begun"], state))
    carry.loop.num_unfinished += state.size - len(state.wall_s)
    for prompt_id, trajectory_id, name, calls in plain["sessions"]:
        carry.sampler.tools.sessions.restore((prompt_id, trajectory_id), name, from_plain(list[RecordedCall], calls))
    lives = []
    for saved in plain["lives"]:
        path = tuple(saved["path"])
        live = Live(
            state.trajectories[path],
            state,
            path,
            evidence=from_plain(Evidence | None, saved["evidence"]),
            entropies=saved["entropies"],
            top_logprobs=saved["top_logprobs"],
            has_failed=saved["has_failed"],
        )
        lives.append((saved, live))
    return lives


# ---- dataclasses as plain JSON values, and back by their type hints

_hints = cache(get_type_hints)


def to_plain(value: Any) -> Any:
    """Return a value as JSON values. A dict with other keys than strings becomes pairs: {(0,): 1} -> [[[0], 1]]."""
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: to_plain(item) for key, item in value.items()}
        return [[to_plain(key), to_plain(item)] for key, item in value.items()]
    if isinstance(value, set):
        return [to_plain(item) for item in sorted(value)]
    if isinstance(value, list | tuple):
        # all items of a list have the same type, so check only the first: long lists of tokens are copied at once
        is_flat = len(value) > 0 and type(value[0]) in SCALARS
        return list(value) if is_flat and isinstance(value, list) else [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, plain: Any) -> Any:
    """Invert `to_plain` for a value of this type. Raises TypeError, ValueError or KeyError for any other value."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin in (Union, UnionType):
        return None if plain is None else from_plain(next(arg for arg in args if arg is not NoneType), plain)
    if is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: from_plain(hints[name], item) for name, item in plain.items()})
    if origin is dict:
        pairs = plain.items() if isinstance(plain, dict) else plain
        return {from_plain(args[0], key): from_plain(args[1], item) for key, item in pairs}
    if origin in (list, set):
        return origin(plain) if args[0] in SCALARS else origin(from_plain(args[0], item) for item in plain)
    if origin is tuple:
        kinds = [args[0]] * len(plain) if args[-1] is Ellipsis else args
        return tuple(from_plain(item_kind, item) for item_kind, item in zip(kinds, plain, strict=True))
    return kind(plain) if isinstance(kind, type) and issubclass(kind, Enum) else plain
