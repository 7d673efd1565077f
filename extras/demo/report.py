"""The table at the end of `make demo`: the agent before and after RL."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from arpo.errors import UserError


@dataclass(frozen=True)
class Demo:
    """The runs of a demo, and the rows of its table."""

    name: str
    """Prefix of the names of its runs."""
    command: str
    evaluations: dict[str, tuple[str, str]]
    """Row of the table -> the evaluation's folder, and the set in it."""


DEMO = Demo(
    "demo",
    "make demo",
    {
        "after SFT": ("demo_eval_sft", "test"),
        "after RL": ("demo_eval_arpo", "test"),
        "after RL, tools muted": ("demo_eval_arpo", "test_muted"),
    },
)


def report(folders: list[Path], demo: Demo = DEMO) -> str:
    """Return for each folder of runs: accuracy and tool calls before and after RL, and where to look next.

    Raises UserError for a missing run.
    """
    return "\n\n".join(f"{table(folder, demo)}\n\n{where_to_look(folder, demo)}" for folder in folders)


def table(folder: Path, demo: Demo = DEMO) -> str:
    """Return a Markdown table: accuracy on held-out questions (temperature 1) with its 95 % interval, and calls."""
    lines = ["| held-out questions, temperature 1 | accuracy [95 %] | tool calls per question |", "|---|---|---|"]
    for row, (run, questions) in demo.evaluations.items():
        s = scores(folder / run, questions, demo)
        accuracy = f"{s['accuracy']:.3f} [{s['accuracy_low']:.3f}, {s['accuracy_high']:.3f}]"
        lines.append(f"| {row} | {accuracy} | {s['tool_calls']:.2f} |")
    return "\n".join(lines)


def where_to_look(folder: Path, demo: Demo = DEMO) -> str:
    """Return the path of the evaluation's report, and the commands that show more."""
    evaluation = folder / demo.evaluations["after RL"][0]
    return "\n".join(
        [
            f"all numbers of the evaluation: {evaluation / 'report.md'}",
            "",
            "source .venv/bin/activate",
            f"python -m extras.viewer {folder / f'{demo.name}_arpo'}  # curves over the steps, and branch trees",
            f"python -m extras.viewer {evaluation}  # every question and answer",
            f"tensorboard --logdir {folder}",
        ]
    )


def scores(run: Path, questions: str, demo: Demo) -> dict[str, float]:
    path = run / "scores.json"
    if not path.exists():
        raise UserError(f"{path}: no such file; run `{demo.command}`, which ends with this report")
    return json.loads(path.read_text())[questions]
