"""The runs of an ablation: make the jobs, claim their folders, run a few at a time, and report."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from arpo.errors import UserError
from arpo.start.load import SCRIPTS
from extras.ablation.config import AblationConfig, AblationSection
from extras.ablation.results import RunResult, algorithms_table, compare_algorithms, draw_table, read_run

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.2


@dataclass
class Job:
    """A run: the commands, one after the other, and the progress."""

    algorithm: str
    seed: int
    folder: Path
    commands: list[list[str]]
    """Script and arguments for torchrun of each remaining command."""
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
        """Start the next command. Its output is appended to the run's log."""
        script, *arguments = self.commands.pop(0)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, f"--nproc_per_node={self.num_ranks}", str(ROOT / script), *arguments]
        env = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | os.environ
        with self.log_path.open("a") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def run_ablation(cfg: AblationConfig) -> None:
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
    write_results(jobs, folder, cfg.ablation)
    if failed:
        named = ", ".join(f"{job.name} ({job.log_path})" for job in failed)
        raise UserError(f"{len(failed)} of {len(jobs)} runs failed: {named}; mend it and start the same command again")


# ---- the jobs


def make_jobs(cfg: AblationSection, folder: Path) -> list[Job]:
    """Return all runs, seed by seed: an unfinished ablation then compares the algorithms on the same seeds."""
    jobs = []
    for seed in cfg.seeds:
        for algorithm, overrides in cfg.overrides.items():
            run = folder / f"{algorithm}_seed{seed}"
            train = ["train_rl.py", *cfg.train, *overrides]
            train += ["--run.dir", str(folder), "--run.name", run.name, "--run.seed", str(seed)]
            train += ["--run.num_steps", str(cfg.num_steps), "--run.validate_every", str(cfg.validate_every)]
            evaluate = ["evaluate.py", *cfg.eval, "--model.path", str(run / "hf"), "--run.dir", str(run)]
            evaluate += ["--run.name", "eval", "--run.seed", str(cfg.eval_seed)]
            jobs.append(
                Job(
                    algorithm=algorithm,
                    seed=seed,
                    folder=run,
                    commands=[train, evaluate],
                    num_ranks=cfg.nproc_per_node,
                )
            )
    return jobs


def shared_inputs(cfg: AblationSection) -> dict[str, dict]:
    """Return the inputs of all results besides the commands: the config files' contents, and model and data files."""
    train = read_configs(cfg.train, "train_rl")
    evaluation = read_configs(cfg.eval, "evaluate")
    try:
        paths = [train["model"]["path"], train["data"]["train"], *evaluation["eval"]["files"]]
    except KeyError as error:
        needs = f"{' '.join(cfg.train)} needs model.path and data.train, {' '.join(cfg.eval)} needs eval.files"
        raise UserError(f"{needs}; {error} is missing") from None
    return {"train": train, "eval": evaluation, "files": stamps(paths)}


def read_configs(paths: Sequence[str], script: str) -> dict[str, dict]:
    """Read the settings of config files for a script, unchecked: the runs check them. UserError if unreadable."""
    settings: dict[str, dict] = {}
    for path in paths:
        try:
            tree = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"{path}: cannot read the config file ({' '.join(str(error).split())})") from None
        sections_of_scripts = {name: tree.pop(name) for name in SCRIPTS if name in tree}
        settings = merged(merged(settings, tree), sections_of_scripts.get(script) or {})
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
    """Make the run's folder. Raises UserError if it exists and comes from other inputs."""
    path = job.folder / "inputs.json"
    if job.folder.exists():
        old_inputs = json.loads(path.read_text()) if path.exists() else {}
        differing = [name for name, value in inputs.items() if old_inputs.get(name) != value]
        if differing:
            reason = f"{job.folder} comes from other inputs ({', '.join(differing)}; see {path})"
            raise UserError(f"{reason}; remove the folder or choose another run.name")
    job.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(inputs, indent=1) + "\n")


# ---- running


def run_all(jobs: list[Job], num_parallel: int) -> list[Job]:
    """Run the jobs, at most `num_parallel` at a time. Return the failed jobs. All child processes end at the end."""
    # SIGTERM becomes an exception, so that `finally` below is reached
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    waiting = list(jobs)
    running: list[Job] = []
    failed: list[Job] = []
    num_ended = 0
    started = time.monotonic()
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
    """Return a line about the end of a run."""
    seconds = time.monotonic() - job.started
    if job.process.returncode != 0:
        return f"{job.name} FAILED with code {job.process.returncode} after {seconds:.0f} s, see {job.log_path}"
    return f"{job.name}: accuracy {job.result().accuracy:.3f}, {seconds:.0f} s"


# ---- the result


def write_results(jobs: list[Job], folder: Path, cfg: AblationSection) -> None:
    """Write table and forest plot of the finished runs. Raises UserError if no run has finished."""
    runs = {job.name: job.result() for job in jobs}
    results = [run for run in runs.values() if run]
    missing = [name for name, run in runs.items() if not run]
    if not results:
        raise UserError(f"{folder}: no finished run to report; see each log.txt")
    table = compare_algorithms(results, cfg.target_reward, cfg.references)
    text = algorithms_table(table, cfg.target_reward)
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    (folder / "TABLE.md").write_text(text)
    draw_table(table, folder / "forest.png")
    print(text + (f"\nnot finished: {', '.join(missing)}\n" if missing else ""))
    print(f"{folder / 'TABLE.md'}\n{folder / 'forest.png'}", flush=True)
