"""Where to fork: the selectors on the demo's task `long`, by tool calls until the right moves are learnt.

    python -m extras.ablation.forks --dir runs/forks --seeds 0 1 2 3 4 5 6 7
    python -m extras.ablation.forks --dir runs/forks --task long_silent
    python -m extras.ablation.forks --dir runs/forks --report_only

Per seed the task is built and imitated once; then each arm trains from there (right_moves.py). A run that is finished
is skipped and an interrupted one continued, so the same command goes on where it was stopped. Each run adds a line to
DIR/TASK/results.jsonl; DIR/TASK/TABLE.md compares the arms seed by seed, and DIR/TASK/calls.png draws them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from arpo.errors import UserError
from arpo.evals.tables import markdown_table
from arpo.log import read_metrics
from extras.ablation.positions import counted
from extras.ablation.results import draw_forest, estimate
from extras.demo.__main__ import TASKS

ROOT = Path(__file__).resolve().parents[2]


def selector(name: str, num_roots: int, *more: str) -> list[str]:
    return ["--branching.selector", name, "--branching.num_initial_rollouts", str(num_roots), *more]


POSITIONS = f"{ROOT / 'extras/ablation/positions.py'}:positions"
THRESHOLD = ("--branching.weight", "1.0", "--branching.threshold", "0.55")
AEPO_LOSS = ("--loss.entropy_balanced_clipping", "True", "--loss.entropy_balanced_advantage", "True")
ARMS: dict[str, list[str]] = {
    "grpo": ["--branching.selector", "none"],
    "random_2": selector("random", 2),
    "arpo": selector("arpo", 4),
    "top_h_2": selector("top_h", 2),
    "top_h_4": selector("top_h", 4),
    "positions_2": selector(POSITIONS, 2),
    "random_4": selector("random", 4),
    "threshold_4": selector("arpo", 4, *THRESHOLD),
    "at2po_2": selector("at2po", 2),
    "tree_grpo_2": selector("tree_grpo", 2),
    "top_h_2_hard": selector("top_h", 2, "--advantage.tree", "hard"),
    "top_h_2_node": selector("top_h", 2, "--advantage.tree", "node"),
    "aepo": ["--branching.selector", "aepo", "--branching.dynamic_budget", "True", *AEPO_LOSS],
}
"""Arm -> the flags of train_rl.py that distinguish it, in the order in which a seed's runs are made. A number at the
end of a name is that of roots, a word after it the tree credit; the others' is soft, and all but AEPO's loss is one."""
POSITIONS_OF = {"positions_2": "top_h_2"}
"""Arm -> the one whose positions it takes."""
REFERENCES = ("grpo", "random_2", "random_4")
TARGETS = (0.5, 0.8)
COSTS = {"calls": "tools/all/calls", "tokens": "tokens/sampled", "seconds": "time/step", "cpu_s": "cpu_s"}
"""What a run costs -> the metric that is summed over its steps."""


# ---- the runs


def run_script(folder: Path, script: str, *arguments: str, **environment: str) -> None:
    """Run a script of ours on one rank; its output is added to FOLDER/log.txt. Raises UserError where it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)} | environment
    with (folder / "log.txt").open("a") as log:
        done = subprocess.run([*command, script, *arguments], cwd=ROOT, env=os.environ | own, stdout=log, stderr=log)
    if done.returncode:
        raise UserError(f"{script} ended with code {done.returncode}; see {folder / 'log.txt'}, mend it")


def prepare(folder: Path, task: str, seed: int) -> None:
    """Build the task of a seed in FOLDER/data, and imitate its demonstrator: FOLDER/sft."""
    data, done = folder / "data", folder / "sft" / "done"
    if done.exists():
        return
    build = [sys.executable, "-m", "extras.demo", "build", "--task", task, "--out", str(data), "--seed", str(seed)]
    subprocess.run(build, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    flags = ["--model.path", str(data / "model"), "--data.train", str(data / "sft_train.jsonl"),
             "--data.valid", str(data / "sft_valid.jsonl"), "--run.dir", str(folder), "--run.name", "sft",
             "--run.seed", str(seed)]  # fmt: skip
    run_script(folder / "sft", "train_sft.py", "configs/demo_sft.yaml", "configs/demo_long.yaml", *flags)
    done.touch()


def train(folder: Path, arm: str, seed: int, num_steps: int) -> None:
    """Train one arm of a seed in FOLDER/ARM."""
    run, data = folder / arm, folder / "data"
    flags = ["--model.path", str(folder / "sft" / "hf"), "--data.train", str(data / "rl_train.jsonl"),
             "--data.valid", str(data / "rl_valid.jsonl"), "--tools.search.corpus", str(data / "corpus.jsonl"),
             "--run.dir", str(folder), "--run.name", arm, "--run.seed", str(seed), "--run.num_steps", str(num_steps),
             "--run.validate_every", "0", "--run.save_every", "8", "--run.save_hf_every", "0", "--run.dump_every", "2",
             "--data.num_prompts_per_step", "8", "--update.num_prompts_per_minibatch", "8", "--optim.lr", "7e-4",
             "--optim.schedule", "constant"]  # fmt: skip
    environment = {}
    if other := POSITIONS_OF.get(arm):
        environment["FORK_POSITIONS"] = str(folder / other / "positions.json")
    configs = ["configs/demo_arpo.yaml", "configs/demo_long.yaml"]
    run_script(run, "extras/ablation/right_moves.py", *configs, *flags, *ARMS[arm], **environment)
    (run / "positions.json").write_text(json.dumps(counted(run / "trajectories")) + "\n")
    for part in ("checkpoints", "trajectories", "tb"):
        shutil.rmtree(run / part, ignore_errors=True)


def reach(costs: np.ndarray, right: np.ndarray, target: float) -> float | None:
    """Return the cost at which `right` first reaches the target, interpolated between steps; None = never."""
    above = np.flatnonzero(right >= target)
    if not len(above):
        return None
    k = above[0]
    if k == 0:
        return float(costs[0])
    return float(np.interp(target, right[k - 1 : k + 1], costs[k - 1 : k + 1]))


def result_of(run: Path, arm: str, seed: int) -> dict:
    """Return a finished run's line: costs in all and until each target, and the exact accuracy on held-out trails."""
    rows = [row for row in read_metrics(run) if "right/decisive" in row]
    right = np.array([row["right/decisive"] for row in rows])
    line = {"arm": arm, "seed": seed, "steps": len(rows), "decisive": right[-1], "accuracy": rows[-1]["right/trail"]}
    line["steps_80"] = reach(np.arange(1.0, len(rows) + 1), right, 0.8)
    for name, metric in COSTS.items():
        costs = np.cumsum([row[metric] for row in rows])
        line[name] = float(costs[-1])
        line |= {f"{name}_{target:.0%}".rstrip("%"): reach(costs, right, target) for target in TARGETS}
    line["curve"] = [
        [row["tools/all/calls"], round(row["right/decisive"], 4), round(row["right/trail"], 4)] for row in rows
    ]
    return line


# ---- the report


def read_results(path: Path) -> list[dict]:
    """Return the lines, each with the tool calls until the held-out accuracy was 80 %, from its curve."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for line in lines:
        calls, _, accuracy = np.array(line["curve"]).T
        line["calls_to_accuracy"] = reach(np.cumsum(calls), accuracy, 0.8)
    return lines


def draw(folder: Path, lines: list[dict]) -> None:
    """Draw what each arm needed relative to GRPO: FOLDER/calls.png."""
    arms = [arm for arm in ARMS if any(line["arm"] == arm for line in lines)]
    titles = {
        "calls_80": "tool calls to 80 % right moves",
        "calls_to_accuracy": "tool calls to 80 % accuracy",
        "tokens_80": "sampled tokens to 80 % right moves",
    }
    panels = [
        (f"{title}\nrelative to grpo", 1.0, {arm: ratios(lines, arm, "grpo", cost) for arm in arms})
        for cost, title in titles.items()
    ]
    draw_forest(panels, folder / "calls.png")


def ratios(lines: list[dict], arm: str, reference: str, cost: str) -> dict[str, float]:
    """Return the geometric mean of the arm's cost relative to the reference's, paired by seed, and its 95 % interval.

    {} where there is no pair; keys mean, and low and high from two seeds on.
    """
    of = {(line["arm"], line["seed"]): line[cost] for line in lines}
    pairs = [(value, of.get((reference, seed))) for (name, seed), value in of.items() if name == arm]
    logs = [math.log(own / other) for own, other in pairs if own and other]
    if not logs or arm == reference:
        return {}
    return {name: math.exp(value) for name, value in estimate(logs).items() if name != "seeds"}


def ratio(lines: list[dict], arm: str, reference: str, cost: str) -> str:
    """Return what `ratios` found as text."""
    found = ratios(lines, arm, reference, cost)
    if not found:
        return ""
    interval = f" [{found['low']:.2f}, {found['high']:.2f}]" if "low" in found else ""
    return f"{found['mean']:.2f}{interval}"


def report(lines: list[dict]) -> str:
    """Return the tables: what each arm needed in all, then relative to each reference, by cost and target."""
    arms = [arm for arm in ARMS if any(line["arm"] == arm for line in lines)]
    own = {arm: [line for line in lines if line["arm"] == arm] for arm in arms}

    def mean(arm: str, key: str, digits: int) -> str:
        known = [line[key] for line in own[arm] if line[key] is not None]
        missing = f" ({len(own[arm]) - len(known)} never)" if len(known) < len(own[arm]) else ""
        return (f"{sum(known) / len(known):,.{digits}f}" if known else "") + missing

    columns = {
        "calls": 0, "calls_50": 0, "calls_80": 0, "calls_to_accuracy": 0, "tokens_80": 0, "seconds_80": 0,
        "cpu_s_80": 0, "steps_80": 1, "decisive": 3, "accuracy": 3,
    }  # fmt: skip
    head = ["arm", "seeds", *columns]
    tables = [markdown_table(head, [[a, str(len(own[a])), *(mean(a, c, d) for c, d in columns.items())] for a in arms])]
    for reference in [name for name in REFERENCES if name in arms]:
        keys = ["calls_50", "calls_80", "calls_to_accuracy", "tokens_80", "seconds_80", "cpu_s_80"]
        rows = [[arm, *(ratio(lines, arm, reference, key) for key in keys)] for arm in arms]
        tables.append(markdown_table([f"relative to {reference} [95 % t]", *keys], rows))
    return "\n\n".join("\n".join(table) for table in tables) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.ablation.forks", description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("runs/forks"), help="folder of all runs")
    parser.add_argument("--task", choices=[t for t in TASKS if t.startswith("long")], default="long")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--num_steps", type=int, default=24, help="training steps of each run")
    parser.add_argument("--report_only", action="store_true", help="run nothing; write the table of what is there")
    args = parser.parse_args()
    folder = args.dir.resolve() / args.task
    path = folder / "results.jsonl"
    todo = [] if args.report_only else [(seed, arm) for seed in args.seeds for arm in args.arms]
    failed: list[str] = []
    for seed, arm in todo:
        if any((line["seed"], line["arm"]) == (seed, arm) for line in read_results(path)):
            continue
        try:
            prepare(folder / f"seed{seed}", args.task, seed)
            train(folder / f"seed{seed}", arm, seed, args.num_steps)
        except UserError as error:
            failed.append(f"seed {seed} {arm}: {error}")
            print(failed[-1], flush=True)
            continue
        line = result_of(folder / f"seed{seed}" / arm, arm, seed)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        (folder / "TABLE.md").write_text(report(read_results(path)))
        print(f"seed {seed} {arm}: {line['calls_80']} calls to 80 %, accuracy {line['accuracy']:.3f}", flush=True)
    lines = read_results(path)
    print(report(lines))
    if lines:
        (folder / "TABLE.md").write_text(report(lines))
        draw(folder, lines)
    if failed:
        sys.exit("\n".join(["these runs failed; start the same command again:", *failed]))


if __name__ == "__main__":
    main()
