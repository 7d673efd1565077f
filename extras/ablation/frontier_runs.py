"""The runs of the frontier (frontier.py): how a run is trained, and what it has cost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from extras.ablation.frontier_settings import ROOT, WORLDS, Setting

TARGET = 0.8
IN_A_ROW = 3
KEPT = 0.98
"""Smallest share of their first probability that all other right moves must keep."""
CENSORED = 2.0
"""A run of stage 1 ends at this many times the calls of the rule's best run of the seed."""
NEVER = 100.0


def step_learnt(curve: Mapping[str, Sequence[float]]) -> int | None:
    """Return the number of the third step in a row at the target; None = never three in a row.

    Decisive moves right in 70, 80, 90, 80 %, the other moves as before -> 4
    """
    certain = curve["certain"]
    there = [
        right >= TARGET and now >= KEPT * certain[0] for right, now in zip(curve["decisive"], certain, strict=True)
    ]
    for step in range(IN_A_ROW, len(there) + 1):
        if all(there[step - IN_A_ROW : step]):
            return step
    return None


# ---- one run, in a process of its own


COLUMNS = {
    "calls": "tools/all/calls",
    "tokens": "tokens/sampled",
    "decisive": "right/decisive",
    "certain": "right/certain",
    "trail": "right/trail",
    "mixed": "group/mixed_share",
    "solved": "reward/solved_share",
    "grad_norm": "optim/grad_norm",
}
"""Name of a step's number in results.jsonl -> metric of the step."""


def in_fork(folder: str, work: Callable[..., None], *arguments: object) -> None:
    """Do the work in this process, a fork, as the only rank of a run. Its output goes to FOLDER/log.txt."""
    with (Path(folder) / "log.txt").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    code = 0
    try:
        work(Path(folder), *arguments)
    except BaseException:  # the exit code tells the parent
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # an interrupted engine does not end by itself


def imitate(folder: Path, data: str, seed: int, num_steps: int) -> None:
    """Train the task's model on the demonstrations: FOLDER/hf."""
    import train_sft
    from arpo.start.load import load_config

    flags = [
        str(ROOT / "configs/demo_sft.yaml"), str(ROOT / "configs/demo_long.yaml"), "--model.path", f"{data}/model",
        "--data.train", f"{data}/sft_train.jsonl", "--data.valid", f"{data}/sft_valid.jsonl",
        "--run.dir", str(folder.parent), "--run.name", folder.name, "--run.seed", str(seed),
        "--run.num_steps", str(num_steps), "--run.validate_every", "0", "--run.save_every", "0",
    ]  # fmt: skip
    train_sft.main(load_config(train_sft.SFTConfig, flags))


def build_data(folder: Path, task: str, seed: int) -> None:
    """Build the task of a seed: FOLDER/data."""
    from extras.demo.build import build

    build(folder / "data", seed, task)


def train(folder: Path, flags: list[str], positions: str, to_the_end: bool, max_calls: float) -> None:
    """Train, and write the numbers of each step to FOLDER/curve.jsonl."""
    import train_rl
    from arpo.start.load import load_config
    from extras.ablation import right_moves

    os.environ["FORK_POSITIONS"] = positions
    rows: list[dict] = []
    # Opened once: a run that outlives a killed parent then writes to its own file, not to that of the repeated run.
    file = (folder / "curve.jsonl").open("a", buffering=1)

    def is_enough(values: Mapping[str, float]) -> bool:
        rows.append({name: round(values[metric], 5) for name, metric in COLUMNS.items() if metric in values})
        file.write(json.dumps(rows[-1]) + "\n")
        first = step_learnt({key: [row[key] for row in rows] for key in ("decisive", "certain")})
        if to_the_end:
            return first is not None and len(rows) >= max(2 * first, first + 8)
        return first is not None or sum(row["calls"] for row in rows) > max_calls

    with contextlib.suppress(right_moves.Enough):
        right_moves.main(load_config(train_rl.RLConfig, flags), is_enough)


class Runs:
    """All runs, a few at a time. Each run is a fork of one process with torch and vLLM already imported."""

    def __init__(self, folder: Path, parallel: int):
        self.folder, self.path = folder, folder / "results.jsonl"
        self.lines = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        self.lock = threading.Lock()
        self.preparing: dict[Path, threading.Lock] = {}
        self.slots = ThreadPoolExecutor(parallel)
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload(["extras.ablation.warm"])

    def find(self, world: str, setting: Setting, seed: int, stage: int) -> dict | None:
        """Return the line of a run in results.jsonl. A run to the end counts for both stages."""
        of = {"world": world, "seed": seed, **dataclasses.asdict(setting)}
        for line in self.lines:
            if line["stage"] >= stage and is_of(line, of):
                return line
        return None

    def run(self, world: str, setting: Setting, seed: int, stage: int) -> dict:
        """Return the line of a run. Make the run if the line is missing."""
        if line := self.find(world, setting, seed, stage):
            return line
        model = self.prepare(world, seed)
        data = model.parent / "data"
        with self.lock:
            known = [
                cost(line) for line in self.lines if is_of(line, {"world": world, "seed": seed, "rule": setting.rule})
            ]
        best = min(filter(None, known), default=math.inf)
        name = f"{setting.folder_name}_seed{seed}_{stage}"
        folder = self.folder / world / name
        shutil.rmtree(folder, ignore_errors=True)
        positions = self.folder / world / f"positions_seed{seed}.json"
        is_read = setting.rule == "top_h" and stage == 2
        num_prompts = str(WORLDS[world].num_prompts)
        configs = [str(ROOT / "configs/demo_arpo.yaml"), str(ROOT / "configs/demo_long.yaml")]
        flags = [
            *configs, "--model.path", str(model / "hf"), "--data.train", str(data / "rl_train.jsonl"),
            "--data.valid", str(data / "rl_valid.jsonl"), "--tools.search.corpus", str(data / "corpus.jsonl"),
            "--run.dir", str(folder.parent), "--run.name", name, "--run.seed", str(seed),
            "--run.num_steps", str(WORLDS[world].max_steps), "--run.validate_every", "0", "--run.save_every", "0",
            "--run.save_hf_every", "0", "--run.dump_every", "2" if is_read else "0", "--run.trackers",
            "--data.num_prompts_per_step", num_prompts, "--update.num_prompts_per_minibatch", num_prompts,
            "--optim.schedule", "constant", *setting.flags,
        ]  # fmt: skip
        self.fork(folder, train, flags, str(positions), stage == 2, CENSORED * best)
        rows = [json.loads(row) for row in (folder / "curve.jsonl").read_text().splitlines()]
        curve = {key: [row.get(key) for row in rows] for key in COLUMNS}
        line = {"world": world, "stage": stage, "seed": seed, **dataclasses.asdict(setting), "curve": curve}
        if is_read:
            from extras.ablation.positions import counted

            positions.write_text(json.dumps(counted(folder / "trajectories")) + "\n")
        shutil.rmtree(folder)
        with self.lock:
            self.lines.append(line)
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        print(f"{world} {name}: {cost(line) or math.nan:.0f} calls, {len(rows)} steps", flush=True)
        return line

    def prepare(self, world: str, seed: int) -> Path:
        """Return the imitated model of a seed, beside the data of the seed. Make both if they are missing."""
        variant = WORLDS[world]
        folder = self.folder / variant.task / f"seed{seed}"
        model = folder / f"sft_{variant.num_sft_steps}"
        with self.lock:
            own = self.preparing.setdefault(folder, threading.Lock())
        with own:
            if not (folder / "data/stamp.json").exists():
                self.fork(folder, build_data, variant.task, seed)
            if not (model / "done").exists():
                self.fork(model, imitate, str(folder / "data"), seed, variant.num_sft_steps)
                (model / "done").touch()
        return model

    def fork(self, folder: Path, work: Callable[..., None], *arguments: object) -> None:
        """Do the work in a new process, and wait. Raises RuntimeError if the work fails."""
        folder.mkdir(parents=True, exist_ok=True)
        process = self.context.Process(target=in_fork, args=(str(folder), work, *arguments))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{folder.name} ended with code {process.exitcode}; see {folder / 'log.txt'}")

    def all_of(self, world: str, settings: Sequence[Setting], seeds: Sequence[int], stage: int) -> list[list[dict]]:
        """Return the lines of each setting's runs, by seed."""
        todo = [[self.slots.submit(self.run, world, s, seed, stage) for seed in seeds] for s in settings]
        return [[future.result() for future in of_setting] for of_setting in todo]


# ---- what a run has cost


def is_of(line: dict, of: Mapping[str, object]) -> bool:
    """Return whether a run's line has all values of `of`."""
    return all(line[key] == value for key, value in of.items())


def cost(line: dict, what: str = "calls") -> float | None:
    """Return the calls (or tokens, or steps) of a run until it had learnt, interpolated.

    A run has learnt at the first of three steps in a row at the target. None if the run never learnt, or is below the
    target again at the last step.
    """
    right = line["curve"]["decisive"]
    certain = line["curve"]["certain"]
    step = step_learnt(line["curve"])
    if step is None or right[-1] < TARGET or certain[-1] < KEPT * certain[0]:
        return None
    k = step - IN_A_ROW
    costs = [1] * len(right) if what == "steps" else line["curve"][what]
    before = sum(costs[:k])
    is_crossing = k > 0 and right[k - 1] < TARGET
    share = (TARGET - right[k - 1]) / (right[k] - right[k - 1]) if is_crossing else 1.0
    return before + share * costs[k]


def tuning_cost(lines: Sequence[dict]) -> float:
    """Return the geometric mean of the calls of a setting's runs.

    A run stopped for its cost counts CENSORED times the calls made. A run with all steps that never learnt counts NEVER
    times the calls made. So a setting is better if it fails on fewer seeds.
    """
    logs = []
    for line in lines:
        spent = sum(line["curve"]["calls"])
        has_had_all = len(line["curve"]["calls"]) >= WORLDS[line["world"]].max_steps
        logs.append(math.log(cost(line) or spent * (NEVER if has_had_all else CENSORED)))
    return math.exp(sum(logs) / len(logs))
