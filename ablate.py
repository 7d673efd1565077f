"""Algorithms x seeds at equal budget: train each, evaluate it on held-out questions, put all into one table.

    python ablate.py configs/demo_ablation.yaml

Every run samples the same prompts per step, the same group size and the same number of steps; only the overrides of
ALGORITHMS differ. A run is `torchrun train_rl.py`, then `torchrun evaluate.py`, in DIR/NAME/<algorithm>_seed<k>.
Finished runs are skipped and interrupted ones continued, so the same command goes on where it was stopped.
Writes DIR/NAME/{TABLE.md, table.json, curves.png}; `--report_only True` writes them of what is there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arpo.config.load import SCRIPTS, load_or_exit, run_or_exit
from arpo.errors import UserError, require

# Name -> the flags of train_rl.py that distinguish the algorithm.
ALGORITHMS: dict[str, list[str]] = {
    "grpo": ["--branching.selector", "none"],
    "arpo": ["--branching.selector", "arpo"],
    "aepo": [
        *("--branching.selector", "aepo", "--branching.dynamic_budget", "True"),
        *("--loss.entropy_balanced_clipping", "True", "--loss.entropy_balanced_advantage", "True"),
    ],
    "random": ["--branching.selector", "random"],
    "arpo_threshold": ["--branching.selector", "arpo", "--branching.rule", "threshold"],
    "standardized": ["--branching.selector", "standardized"],
    "standardized_delta": ["--branching.selector", "standardized", "--branching.signal", "delta"],
    "node_parent": ["--branching.selector", "arpo", "--advantage.tree", "node_parent"],
}


@dataclass(frozen=True)
class AblationRunSection:
    """The folder that the ablation writes to."""

    name: str = "ablation"
    """Name of the ablation's folder, DIR/NAME."""
    dir: str = "runs"
    """Folder of all runs."""


@dataclass(frozen=True)
class AblationSection:
    """The runs of an ablation."""

    train: tuple[str, ...] = ()
    """Config files of train_rl.py that all runs share; later ones win."""
    eval: tuple[str, ...] = ()
    """Config files of evaluate.py; use temperature 1, because RL trains the policy as it is sampled."""
    algorithms: tuple[str, ...] = ("grpo", "arpo", "aepo", "random")
    """Names in ablate.py's ALGORITHMS; "name=--flags of train_rl.py" adds one of your own."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds of training: data order, sampling, branch decisions. Evaluations all use ablation.eval_seed."""
    eval_seed: int = 0
    """Seed of the evaluation's sampling."""
    num_steps: int = 30
    """Number of training steps of each run."""
    nproc_per_node: int = 1
    """Number of ranks of each run."""
    validate_every: int = 0
    """Steps between greedy validations (data.valid), of which the table at equal tokens is made; 0 = no such table."""
    num_parallel: int = 1
    """Number of runs at the same time. With more than one, the seconds in the table are those of a shared machine."""
    target_reward: float = 0.8
    """Training reward for which the table says how many steps a run needs to reach it."""

    @property
    def overrides(self) -> dict[str, list[str]]:
        """Algorithm -> flags of train_rl.py. "x=--a 1" -> {"x": ["--a", "1"]}; ValueError for an unknown name."""
        flags: dict[str, list[str]] = {}
        for entry in self.algorithms:
            name, has_flags, words = entry.partition("=")
            if not has_flags and name not in ALGORITHMS:
                known = ", ".join(ALGORITHMS)
                raise ValueError(f"ablation.algorithms: {name!r} is none of {known}; write 'name=--flags' to add it")
            if name in flags or not name.isidentifier():
                raise ValueError(f"ablation.algorithms: {name!r} occurs twice or is no plain name; rename it")
            flags[name] = shlex.split(words) if has_flags else ALGORITHMS[name]
        return flags


@dataclass(frozen=True)
class AblationConfig:
    """All options of ablate.py."""

    run: AblationRunSection = field(default_factory=AblationRunSection)
    ablation: AblationSection = field(default_factory=AblationSection)
    report_only: bool = False
    """Run nothing; write the table and the curves of the runs that are finished."""

    def __post_init__(self) -> None:
        a = self.ablation
        needed = {"train": all(a.train) and a.train, "eval": all(a.eval) and a.eval, "seeds": a.seeds}
        for name, value in (needed | {"algorithms": a.overrides}).items():
            require(value, f"ablation.{name} is empty; see ablate.py --help")
        require(len(set(a.seeds)) == len(a.seeds), f"ablation.seeds={a.seeds} has a seed twice; drop it")
        for name in ("num_steps", "nproc_per_node", "num_parallel"):
            require(getattr(a, name) >= 1, f"ablation.{name}={getattr(a, name)} must be at least 1")


# The config is read before the rest is imported, so that --help and mistakes answer at once.
CONFIG = load_or_exit(AblationConfig) if __name__ == "__main__" else None

import json
import os
import signal
import subprocess
import sys
import time

from arpo.evals.ablation import RunResult, algorithms_table, compare_algorithms, draw_curves, read_run

ROOT = Path(__file__).resolve().parent
POLL_S = 0.2


@dataclass
class Job:
    """A run: its commands, which are run one after the other, and its progress."""

    algorithm: str
    seed: int
    folder: Path
    commands: list[list[str]]
    """Script and arguments of each command still to be run, for torchrun."""
    num_ranks: int
    process: subprocess.Popen | None = None
    started: float = 0.0

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def log_path(self) -> Path:
        return self.folder / "log.txt"

    def result(self) -> RunResult | None:
        return read_run(self.folder, self.algorithm, self.seed)

    def start_next(self) -> None:
        """Start the next command; its output is added to the run's log."""
        script, *arguments = self.commands.pop(0)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc_per_node={self.num_ranks}", str(ROOT / script), *arguments]
        env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | os.environ
        with self.log_path.open("a") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def main(cfg: AblationConfig) -> None:
    folder = Path(cfg.run.dir) / cfg.run.name
    jobs = make_jobs(cfg.ablation, folder)
    failed: list[Job] = []
    if not cfg.report_only:
        inputs = shared_inputs(cfg.ablation)
        for job in jobs:
            claim_folder(job, inputs | {"ranks": job.num_ranks, "commands": job.commands})
        todo = [job for job in jobs if not job.result()]
        print(f"{folder}: {len(jobs)} runs, {len(jobs) - len(todo)} of them finished already", flush=True)
        failed = run_all(todo, cfg.ablation.num_parallel)
    write_results(jobs, folder, cfg.ablation.target_reward)
    if failed:
        named = ", ".join(f"{job.name} ({job.log_path})" for job in failed)
        raise UserError(f"{len(failed)} of {len(jobs)} runs failed: {named}; mend it and start the same command again")


# ---- what is to be run


def make_jobs(cfg: AblationSection, folder: Path) -> list[Job]:
    """Make all runs, seed by seed, so that an unfinished ablation compares the algorithms on the same seeds."""
    jobs = []
    for seed in cfg.seeds:
        for algorithm, overrides in cfg.overrides.items():
            run = folder / f"{algorithm}_seed{seed}"
            train = ["train_rl.py", *cfg.train, *overrides, "--run.dir", str(folder), "--run.name", run.name,
                     "--run.seed", str(seed), "--run.num_steps", str(cfg.num_steps),
                     "--run.validate_every", str(cfg.validate_every)]  # fmt: skip
            evaluate = ["evaluate.py", *cfg.eval, "--model.path", str(run / "hf"), "--run.dir", str(run),
                        "--run.name", "eval", "--run.seed", str(cfg.eval_seed)]  # fmt: skip
            jobs.append(Job(algorithm, seed, run, [train, evaluate], cfg.nproc_per_node))
    return jobs


def shared_inputs(cfg: AblationSection) -> dict[str, dict]:
    """Return what all results depend on besides the commands: the config files' contents, and model and data files."""
    train, evaluation = read_settings(cfg.train, "train_rl"), read_settings(cfg.eval, "evaluate")
    try:
        paths = [train["model"]["path"], train["data"]["train"], *evaluation["eval"]["files"]]
    except KeyError as error:
        needs = f"{' '.join(cfg.train)} needs model.path and data.train, {' '.join(cfg.eval)} needs eval.files"
        raise UserError(f"{needs}; {error} is missing") from None
    return {"train": train, "eval": evaluation, "files": stamps(paths)}


def read_settings(paths: Sequence[str], script: str) -> dict[str, dict]:
    """Read the settings of config files for a script, unchecked: the runs check them. UserError if unreadable."""
    import yaml

    settings: dict[str, dict] = {}
    for path in paths:
        try:
            tree = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"{path}: cannot read the config file ({' '.join(str(error).split())})") from None
        own = {name: tree.pop(name) for name in SCRIPTS if name in tree}.get(script) or {}
        settings = merged(merged(settings, tree), own)
    return settings


def merged(below: dict, above: dict) -> dict:
    """{"a": {"b": 1, "c": 2}} under {"a": {"b": 3}} -> {"a": {"b": 3, "c": 2}}"""
    out = dict(below)
    for key, value in above.items():
        out[key] = merged(out.get(key, {}), value) if isinstance(value, dict) else value
    return out


def stamps(paths: list[str]) -> dict[str, list[int]]:
    """File -> [bytes, time of last change]; a folder stands for its weights. Raises UserError for a missing file."""
    out = {}
    for path in map(Path, paths):
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.exists() for file in files):
            raise UserError(f"{path}: no such file, or a folder without weights; make it before the ablation")
        out |= {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return out


def claim_folder(job: Job, inputs: dict[str, object]) -> None:
    """Make the run's folder, or check that what is in it comes from the same inputs. Raises UserError if not."""
    path = job.folder / "inputs.json"
    if job.folder.exists():
        found = json.loads(path.read_text()) if path.exists() else {}
        differing = [name for name, value in inputs.items() if found.get(name) != value]
        if differing:
            reason = f"{job.folder} comes from other inputs ({', '.join(differing)}; see {path})"
            raise UserError(f"{reason}; remove the folder or choose another run.name")
    job.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(inputs, indent=1) + "\n")


# ---- running


def run_all(jobs: list[Job], num_parallel: int) -> list[Job]:
    """Run the jobs, at most `num_parallel` at a time; returns those that failed. Ends its children when it ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that `finally` below is reached
    waiting, running, failed, num_ended, started = list(jobs), [], [], 0, time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < num_parallel:
                job = waiting.pop(0)
                job.started = time.monotonic()
                job.start_next()
                running.append(job)
            time.sleep(POLL_S)
            for job in [job for job in running if job.process.poll() is not None]:
                if job.process.returncode == 0 and job.commands:
                    job.start_next()
                    continue
                running.remove(job)
                num_ended += 1
                if not job.result() or job.process.returncode != 0:
                    failed.append(job)
                left_s = (time.monotonic() - started) / num_ended * (len(jobs) - num_ended)
                print(f"[{num_ended}/{len(jobs)}] {outcome(job)}, {left_s / 60:.0f} min left", flush=True)
    finally:
        for job in running:
            job.process.terminate()
        for job in running:
            job.process.wait()
    return failed


def outcome(job: Job) -> str:
    """Return a line that says how a run has ended."""
    seconds = time.monotonic() - job.started
    if job.process.returncode != 0:
        return f"{job.name} FAILED with code {job.process.returncode} after {seconds:.0f} s, see {job.log_path}"
    return f"{job.name}: accuracy {job.result().accuracy:.3f}, {seconds:.0f} s"


# ---- the result


def write_results(jobs: list[Job], folder: Path, target_reward: float) -> None:
    """Write table and curves of the finished runs. Raises UserError where there is none."""
    runs = {job.name: job.result() for job in jobs}
    results, missing = [run for run in runs.values() if run], [name for name, run in runs.items() if not run]
    if not results:
        raise UserError(f"{folder}: no finished run to report; see each log.txt")
    table = compare_algorithms(results, target_reward)
    text = algorithms_table(table, target_reward)
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    (folder / "TABLE.md").write_text(text)
    draw_curves(results, folder / "curves.png")
    print(text + (f"\nnot finished: {', '.join(missing)}\n" if missing else ""))
    print(f"{folder / 'TABLE.md'}\n{folder / 'curves.png'}", flush=True)


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
