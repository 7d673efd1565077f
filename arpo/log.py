"""What a run leaves behind: console line, progress bars, metrics.jsonl, TensorBoard, trajectory dumps, the curve.

    runs/NAME/config.yaml  metrics.jsonl  tb/  trajectories/step_000100.jsonl  curve.png

Only rank 0 writes; on other ranks every method is a no-op.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from arpo.config import save_config
from arpo.trajectory import Group


class RunLog:
    """`resume_step` = steps that are already done; what an interrupted run logged beyond them is dropped."""

    def __init__(self, folder: Path, config: object, *, is_main: bool, resume_step: int = 0):
        self.folder, self.is_main = folder, is_main
        if not is_main:
            return
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, folder / "config.yaml")
        self.metrics_path = folder / "metrics.jsonl"
        self._drop_lines_after(resume_step)
        self.board = SummaryWriter(str(folder / "tb"), purge_step=resume_step + 1 if resume_step else None)
        rows = [f"| {key} | {value} |" for key, value in flat(asdict(config)).items()]
        self.board.add_text("config", "\n".join(["| field | value |", "|---|---|", *rows]), 0)

    def _drop_lines_after(self, step: int) -> None:
        lines = self.metrics_path.read_text().splitlines(keepends=True) if self.metrics_path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]  # a killed run may leave half a line
        self.metrics_path.write_text("".join(line for line in whole if json.loads(line)["step"] <= step))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """One line of metrics.jsonl, and one TensorBoard point per value. `step` counts from 1."""
        if not self.is_main:
            return
        with self.metrics_path.open("a") as file:
            file.write(json.dumps({"step": step} | {k: round(v, 8) for k, v in values.items()}) + "\n")
        for name, value in values.items():
            self.board.add_scalar(name, value, step)
        self.board.flush()

    def line(self, text: str) -> None:
        """A console line that does not tear the progress bar."""
        if self.is_main:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def progress(self, total: int, description: str, unit: str, *, initial: int = 0) -> tqdm:
        """A bar with rate and ETA; it goes away when done. Silent where the output is not a terminal."""
        return tqdm(
            total=total,
            initial=initial,
            desc=description,
            unit=unit,
            leave=False,
            dynamic_ncols=True,
            disable=not (self.is_main and sys.stderr.isatty()),
        )

    def trajectories(self, step: int, groups: list[Group], kind: str = "step") -> None:
        """Full trajectories, one per line: text, tokens, turns, tool calls, decisions, rewards."""
        if not self.is_main:
            return
        path = self.folder / "trajectories" / f"{kind}_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as file:
            for group in groups:
                question = group.prompt.messages[-1]["content"]
                for trajectory in group.trajectories:
                    row = {"question": question, "answers": group.prompt.answers} | trajectory.to_dict()
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def transcripts(self, step: int, groups: list[Group], *, tag: str, num: int = 2) -> None:
        """The first trajectories of the first prompts as TensorBoard text."""
        if not self.is_main:
            return
        for i, group in enumerate(groups[:num]):
            t = group.trajectories[0]
            head = f"reward {t.reward} {t.reward_parts} stop {t.stop_reason} answers {group.prompt.answers}"
            text = f"{group.prompt.messages[-1]['content']}\n\n{t.text}"
            self.board.add_text(f"{tag}/{i}", f"{head}\n\n```\n{text}\n```", step)

    def curve(self, names: list[str], path: str = "curve.png") -> Path | None:
        """Draw metrics of metrics.jsonl over the steps; None on other ranks than 0."""
        if not self.is_main:
            return None
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        rows = [json.loads(line) for line in self.metrics_path.read_text().splitlines()]
        figure, axis = plt.subplots(figsize=(7, 4))
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                axis.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else None)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
        figure.tight_layout()
        figure.savefig(self.folder / path, dpi=120)
        plt.close(figure)
        return self.folder / path

    def close(self) -> None:
        if self.is_main:
            self.board.close()


def flat(tree: dict, prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    out: dict[str, object] = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """All lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
