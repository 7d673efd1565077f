"""Branch trees of a run as one web page: `python -m arpo.viewer RUN [--step N | --file PATH] [--out FILE.html]`.

Reads one trajectory dump (written by arpo/log.py) and embeds it in viewer.html. The page is self-contained: it
opens with file://, loads nothing, and shows what the model wrote as text only.
"""

from __future__ import annotations

import argparse
import json
import re
import zlib
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from arpo.config import run_or_exit
from arpo.dumps import open_dump
from arpo.errors import UserError
from arpo.log import script_json
from arpo.trajectory import BranchDecision, ToolCall, Trajectory, Turn

SHOWN = (
    "trajectory_id", "parent_id", "fork_at", "stop_reason",
    "reward", "reward_parts", "reward_reason", "kl_penalty", "advantage",
)  # fmt: skip
"""Fields of a trajectory that the page shows as they are."""


def find_dump(run: Path, *, step: int | None = None) -> Path:
    """Return the dump of training step `step`, by default the newest, or else the newest validation or test dump.

    Raises UserError where there is no such run, or no such dump in it.
    """
    if not run.is_dir():
        raise UserError(f"{run}: no such run folder; pass runs/NAME")
    files = (run / "trajectories").glob("*")
    matches = [(re.fullmatch(r"(.+)_(\d+)\.jsonl(\.gz)?", path.name), path) for path in files]
    dumps = [(match[1] == "step", int(match[2]), path) for match, path in matches if match]
    steps = {number: path for of_training, number, path in dumps if of_training}
    if step is not None and step not in steps:
        known = ", ".join(map(str, sorted(steps))) or "of no training step"
        raise UserError(f"{run}: --step {step} was not dumped; there are dumps {known}; or name one with --file")
    if not dumps:
        raise UserError(f"{run}: no trajectory dumps in {run / 'trajectories'}; train with run.dump_every above 0")
    return max(dumps)[2] if step is None else steps[step]


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
                    head |= {name: row.pop(name, "") for name in ("messages", "data_source")}  # older dumps have none
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
    trajectory.turns = [Turn(**turn) for turn in trajectory.turns]
    for turn in trajectory.turns:
        turn.tool_call = ToolCall(**turn.tool_call) if turn.tool_call else None
        turn.decision = BranchDecision(**turn.decision) if turn.decision else None
    if not isinstance(trajectory.reward, int | float | None):
        raise TypeError(f"reward {trajectory.reward!r} is not a number")
    num_spans = sum((t.end > t.start) + (t.result_end > t.end) for t in trajectory.turns)
    if num_spans != len(trajectory.segments):
        raise ValueError(f"{num_spans} spans of turns and results, but {len(trajectory.segments)} segments of text")
    trajectory.check()
    return trajectory


def trajectory_view(t: Trajectory) -> dict:
    """Return what the page shows of a trajectory: each turn with its text and its result's text, but no tokens."""
    num_sampled = t.num_sampled_tokens
    view = {name: getattr(t, name) for name in SHOWN} | {"num_tokens": len(t.token_ids), "num_sampled": num_sampled}
    view["mean_logprob"] = sum(t.rollout_logprobs) / num_sampled if num_sampled else None
    texts = iter([text for text, _ in t.segments])
    view["turns"] = []
    for turn in t.turns:  # segments are the runs of the loss mask: a turn's sampled tokens, then those of its result
        shown = asdict(turn)
        shown["text"] = next(texts) if turn.end > turn.start else ""
        shown["result_text"] = next(texts) if turn.result_end > turn.end else ""
        if shown["result_text"]:  # the same text, as the model read it
            del shown["tool_call"]["result"]
        view["turns"].append(shown)
    return view


def group_summary(rewards: list[float | None]) -> dict:
    """Return mean reward and `kind`: "mixed" = rewards differ, "dead" = all alike, "single" = one trajectory."""
    known = [reward for reward in rewards if reward is not None]
    kind = "single" if len(rewards) == 1 else "mixed" if len(set(known)) > 1 else "dead"
    return {"mean_reward": sum(known) / len(known) if known else None, "kind": kind}


def render(title: str, dump: Path, groups: list[dict], num_groups: int) -> str:
    """Return the page's HTML with the data in it."""
    data = {"title": title, "dump": str(dump), "num_groups": num_groups, "groups": groups}
    template = resources.files("arpo.viewer").joinpath("viewer.html").read_text(encoding="utf-8")
    return template.replace("@@DATA@@", script_json(data))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m arpo.viewer", description="Branch trees of a run as one web page.")
    parser.add_argument("run", type=Path, help="runs/NAME")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="training step of the dump; default: the newest")
    which.add_argument(
        "--file", type=Path, help="a dump by its path, e.g. runs/NAME/trajectories/valid_000100.jsonl.gz"
    )
    parser.add_argument("--out", type=Path, help="page to write; default: RUN/viewer.html")
    parser.add_argument("--max_groups", type=int, default=200, help="show only the first N prompts (default 200)")
    run_or_exit(make_page, parser.parse_args(argv))


def make_page(args: argparse.Namespace) -> None:
    """Write the page that the command line asks for, and print its path."""
    if args.max_groups < 1:
        raise UserError(f"--max_groups {args.max_groups}: must be at least 1")
    dump = args.file or find_dump(args.run, step=args.step)
    groups, num_groups = read_groups(dump, args.max_groups)
    out = args.out or args.run / "viewer.html"
    try:
        out.write_text(
            render(f"{args.run.resolve().name} · {dump.name.partition('.')[0]}", dump, groups, num_groups), "utf-8"
        )
    except OSError as error:
        raise UserError(f"{out}: cannot write the page ({error.strerror}); choose another --out") from None
    print(out)
