"""The groups of a dump as the viewer shows them, read and checked line by line.

Dumps of older versions are read too. The page leaves out fields missing there (token texts, token entropies).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from arpo.config.named import brief
from arpo.config.typed import check_types
from arpo.errors import UserError
from arpo.evals.records import read_grades
from arpo.log.dumps import read_dump
from arpo.metrics import tokens_by_step
from arpo.trajectory import StopReason, Trajectory

SHOWN = (
    "trajectory_id", "parent_id", "fork_at", "stop_reason",
    "reward", "reward_parts", "reward_reason", "kl_penalty", "advantage",
)  # fmt: skip
"""Fields of a trajectory shown unchanged on the page."""
DIGITS = 3
"""Decimals of a token's logprob and entropy (nats) on the page; the dump has all."""


@dataclass
class Head:
    """The prompt of a dump's line."""

    question: str
    answers: list[str]
    data_source: str
    sampled_by: int | str | None
    messages: list[dict] = field(default_factory=list)


def read_groups(dumps: Sequence[Path], grades: Path | None, max_groups: int) -> tuple[list[dict], int]:
    """Return the first `max_groups` groups in the form of the page, and the number of groups in the dumps.

    A dump has one trajectory per line, group after group. `grades`: the file of an evaluation's grades, if any; grades
    replace the rewards. Raises UserError with the line number if a line is not a complete, consistent trajectory.
    """
    graded = {(grade.question_id, grade.sample): grade for grade in read_grades(grades)} if grades else {}
    groups: list[dict] = []
    num_groups, prompt_id, seen = 0, None, set()  # `seen`: trajectory ids of the current group
    for place, trajectory, row in chain.from_iterable(map(read_dump, dumps)):
        try:
            head = head_of(row)
            grade = graded.get((trajectory.prompt_id, row.get("sample")))
            if trajectory.stop_reason == StopReason.ERROR:
                grade = None  # may be the grade of the trajectory that replaced it when the question was asked again
            if grade:
                trajectory.reward, trajectory.reward_parts = grade.correct, grade.scores
                trajectory.reward_reason = grade.reason
            view = trajectory_view(trajectory) | {"grade": asdict(grade) if grade else None}
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{place}: not a trajectory ({brief(error)}); drop the line or dump again") from None
        # One prompt may come twice in a step: a repeated path starts the next group.
        if trajectory.prompt_id != prompt_id or trajectory.trajectory_id in seen:
            prompt_id, seen, num_groups = trajectory.prompt_id, set(), num_groups + 1
            if num_groups <= max_groups:
                groups.append({"prompt_id": prompt_id, **head, "trajectories": []})
        seen.add(trajectory.trajectory_id)
        if num_groups <= max_groups:
            groups[-1]["trajectories"].append(view)
    if not groups:
        raise UserError(f"{dumps[0]}: the dump is empty; choose another with --step or --file")
    for group in groups:
        group |= group_summary([t["reward"] for t in group["trajectories"]])
    return groups, num_groups


def head_of(row: dict) -> dict:
    """Return the data of a group for the page, without trajectories. Raises KeyError and TypeError.

    Older dumps have neither messages nor a source.
    """
    head = Head(row["question"], row["answers"], *(row.get(name, "") for name in ("data_source", "sampled_by")))
    head.messages = row.get("messages", [])
    check_types(head)
    return asdict(head)


def put_beside(groups: list[dict], others: list[dict], name: str) -> None:
    """Add another run's trajectories of the same prompts to the groups. The name of the other run is appended to the
    ids. The summary of a group does not change. Raises UserError if the runs have no prompt in common."""
    found: dict[str, list[dict]] = {group["prompt_id"]: group["trajectories"] for group in others}
    if not any(group["prompt_id"] in found for group in groups):
        raise UserError(f"{name}: has none of these prompts; compare runs over the same file")
    for group in groups:
        for t in found.get(group["prompt_id"], ()):
            parent = t["parent_id"] and f"{t['parent_id']} {name}"
            group["trajectories"].append(t | {"trajectory_id": f"{t['trajectory_id']} {name}", "parent_id": parent})


def trajectory_view(t: Trajectory) -> dict:
    """Return the data of a trajectory for the page: for each turn the text, the tokens' numbers, the result's text.

    Raises ValueError if the texts do not match the turns.
    """
    places = [place for turn in t.turns for place in (turn.start, turn.end, turn.result_end)]
    if places != sorted(places) or not 0 <= t.fork_at <= len(t.token_ids) or min(places, default=0) < 0:
        raise ValueError("turns that overlap, or a fork outside of the response")
    num_sampled = t.num_sampled_tokens
    num_spans = sum((turn.end > turn.start) + (turn.result_end > turn.end) for turn in t.turns)
    if num_spans != len(t.segments):
        raise ValueError(f"{num_spans} spans of turns and results, but {len(t.segments)} segments of text")
    view = {name: getattr(t, name) for name in SHOWN} | {"num_tokens": len(t.token_ids), "num_sampled": num_sampled}
    view["mean_logprob"] = sum(t.rollout_logprobs) / num_sampled if num_sampled else None
    view["sampled_in"] = tokens_by_step(t)
    starts = {context.start for context in t.contexts}
    view["new_contexts"] = [index for index, turn in enumerate(t.turns) if turn.start in starts]
    texts = iter([text for text, _ in t.segments])
    view["turns"] = []
    for turn in t.turns:  # segments are the runs of the loss mask: a turn's sampled tokens, then those of its result
        shown = asdict(turn)
        shown["text"] = next(texts) if turn.end > turn.start else ""
        shown["result_text"] = next(texts) if turn.result_end > turn.end else ""
        for call in shown["tool_calls"] if shown["result_text"] else ():
            del call["result"]  # the same text, as the model read it
        entropies = shown.pop("token_entropies")
        if not turn.inherited:  # the parent has the inherited turns
            shown["logprobs"] = [round(x, DIGITS) for x in t.rollout_logprobs[turn.start : turn.end]]
            shown["entropies"] = [round(x, DIGITS) for x in entropies]
            shown["chars"] = utf16_counts(shown["text"], t.token_chars[turn.start : turn.end])
        view["turns"].append(shown)
    return view


def utf16_counts(text: str, counts: list[int]) -> list[int]:
    """Convert each token's number of characters to UTF-16 units, the units of a browser's strings.

    If the tokens cover only a part of `text`, this part is the end of it. "a\N{GRINNING FACE}", [1, 1] -> [1, 2]
    """
    if max(text, default="") <= "\uffff":
        return counts
    units = []
    position = len(text) - sum(counts)
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
