"""The groups of a dump as the viewer shows them, read and checked line by line.

Reads dumps of older versions too: what those do not have (token texts, token entropies) the page leaves out.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from pathlib import Path

from arpo.errors import UserError
from arpo.log.dumps import open_dump
from arpo.metrics import tokens_by_step
from arpo.trajectory import BranchDecision, ToolCall, Trajectory, Turn

SHOWN = (
    "trajectory_id", "parent_id", "fork_at", "stop_reason",
    "reward", "reward_parts", "reward_reason", "kl_penalty", "advantage",
)  # fmt: skip
"""Fields of a trajectory that the page shows as they are."""
DIGITS = 3
"""Decimals of a token's logprob and entropy (nats) on the page; the dump has all."""


def read_groups(dump: Path, max_groups: int) -> tuple[list[dict], int]:
    """Return the first `max_groups` groups as the page shows them, and the number of groups in the dump.

    The dump has one trajectory a line, group after group. Raises UserError with the line's number where a line is not
    a whole, consistent trajectory.
    """
    groups: list[dict] = []
    num_groups, prompt_id, seen = 0, None, set()  # `seen`: trajectory ids of the current group
    try:
        with open_dump(dump) as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    head = {"question": row.pop("question"), "answers": row.pop("answers")}
                    head |= {name: row.pop(name, "") for name in ("messages", "data_source", "sampled_by")}  # new ones
                    trajectory = parse_trajectory(row)
                except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
                    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                    place = f"{dump}:{number}"
                    raise UserError(f"{place}: not a trajectory ({reason}); drop the line or dump again") from None
                # One prompt may come twice in a step: a path that comes again starts the next group.
                if trajectory.prompt_id != prompt_id or trajectory.trajectory_id in seen:
                    prompt_id, seen, num_groups = trajectory.prompt_id, set(), num_groups + 1
                    if num_groups <= max_groups:
                        groups.append({"prompt_id": prompt_id, **head, "trajectories": []})
                seen.add(trajectory.trajectory_id)
                if num_groups <= max_groups:
                    groups[-1]["trajectories"].append(trajectory_view(trajectory))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{dump}: cannot read the dump ({reason}); check the path") from None
    if not groups:
        raise UserError(f"{dump}: the dump is empty; choose another with --step or --file")
    for group in groups:
        group |= group_summary([t["reward"] for t in group["trajectories"]])
    return groups, num_groups


def parse_trajectory(row: dict) -> Trajectory:
    """Invert Trajectory.to_dict. Raises ValueError, TypeError or AssertionError for a row that is not well-formed."""
    trajectory = Trajectory(**row)
    trajectory.turns = [Turn(**_of_now(turn)) for turn in trajectory.turns]
    for turn in trajectory.turns:
        turn.tool_calls = [ToolCall(**call) for call in turn.tool_calls]
        turn.decision = BranchDecision(**turn.decision) if turn.decision else None
    if not isinstance(trajectory.reward, int | float | None):
        raise TypeError(f"reward {trajectory.reward!r} is not a number")
    num_spans = sum((t.end > t.start) + (t.result_end > t.end) for t in trajectory.turns)
    if num_spans != len(trajectory.segments):
        raise ValueError(f"{num_spans} spans of turns and results, but {len(trajectory.segments)} segments of text")
    trajectory.check()
    return trajectory


def _of_now(turn: dict) -> dict:
    """Return a dumped turn with today's fields: once a turn had one call, or None."""
    if "tool_call" not in turn:
        return turn
    call = turn["tool_call"]
    return {name: value for name, value in turn.items() if name != "tool_call"} | {"tool_calls": [call] if call else []}


def trajectory_view(t: Trajectory) -> dict:
    """Return what the page shows of a trajectory: of each turn its text, its tokens' numbers, its result's text."""
    num_sampled = t.num_sampled_tokens
    view = {name: getattr(t, name) for name in SHOWN} | {"num_tokens": len(t.token_ids), "num_sampled": num_sampled}
    view["mean_logprob"] = sum(t.rollout_logprobs) / num_sampled if num_sampled else None
    view["sampled_in"] = tokens_by_step(t)
    texts = iter([text for text, _ in t.segments])
    view["turns"] = []
    for turn in t.turns:  # segments are the runs of the loss mask: a turn's sampled tokens, then those of its result
        shown = asdict(turn)
        shown["text"] = next(texts) if turn.end > turn.start else ""
        shown["result_text"] = next(texts) if turn.result_end > turn.end else ""
        for call in shown["tool_calls"] if shown["result_text"] else ():
            del call["result"]  # the same text, as the model read it
        entropies = shown.pop("token_entropies")
        if not turn.inherited:  # else the parent has them
            shown["logprobs"] = [round(x, DIGITS) for x in t.rollout_logprobs[turn.start : turn.end]]
            shown["entropies"] = [round(x, DIGITS) for x in entropies]
            shown["chars"] = utf16_counts(shown["text"], t.token_chars[turn.start : turn.end])
        view["turns"].append(shown)
    return view


def utf16_counts(text: str, counts: list[int]) -> list[int]:
    """Return the number of UTF-16 units, of which a browser's strings consist, for each token's number of characters.

    A part of `text` that no token adds stands at its start. "a\N{GRINNING FACE}", [1, 1] -> [1, 2]
    """
    if max(text, default="") <= "\uffff":
        return counts
    units, position = [], len(text) - sum(counts)
    for count in counts:
        piece = text[position : position + count]
        units.append(count + sum(character > "\uffff" for character in piece))
        position += count
    return units


def group_summary(rewards: list[float | None]) -> dict:
    """Return mean reward and `kind`: "mixed" = rewards differ, "dead" = all alike, "single" = one trajectory."""
    known = [reward for reward in rewards if reward is not None]
    kind = "single" if len(rewards) == 1 else "mixed" if len(set(known)) > 1 else "dead"
    return {"mean_reward": sum(known) / len(known) if known else None, "kind": kind}
