"""What benchmarks/gpu_report.py runs: the tests of tests/test_gpu*.py and the benchmarks that want a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Section:
    name: str
    command: tuple[str, ...]
    """After the interpreter; {quick} is dropped in a full run."""
    needs: tuple[str, ...] = ()
    """Packages without which it is skipped."""
    limit_s: int = 300
    num_gpus: int = 1
    """GPUs without which it is skipped; on the CPU any number of ranks will do."""
    file: str = ""
    """A test file whose sections share a process, those that fail there apart; "" for a section of its own."""


def sections(device: str) -> list[Section]:
    """Return the parts of the report, those that are worth most first: a loan may end before the last of them."""
    tests, speeds = tests_of_gpu(), speed_sections(device)
    order = (
        *("correctness/vllm_samples_from_the_weights", "speed/engine_decode_usual", "speed/update_mfu_7b"),
        *("correctness/", "speed/"),
    )
    rank = lambda section: next(i for i, part in enumerate(order) if section.name.startswith(part))  # noqa: E731
    return sorted([*tests, *speeds], key=rank)


def tests_of_gpu() -> list[Section]:
    with_engine = ("vllm", "fifty_cycles")
    found = []
    for path in sorted((ROOT / "tests").glob("test_gpu*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE):
            alone = any(word in name for word in with_engine)
            found.append(
                Section(
                    f"correctness/{name.removeprefix('test_')}",
                    ("-m", "pytest", "-v", "-s", "-p", "no:cacheprovider", "-m", "gpu", f"tests/{path.name}::{name}"),
                    needs=("pytest", "vllm") if alone else ("pytest",),
                    file="" if alone else path.name,
                )
            )
    return found


def speed_sections(device: str) -> list[Section]:
    def benchmark(script: str, *arguments: str, name: str = "", **options) -> Section:
        command = (f"benchmarks/{script}.py", *arguments, "{quick}")
        return Section(f"speed/{name or script}", command, **options)

    shapes = ("0.5b", "1.5b", "7b") if device == "cuda" else ("tiny",)
    variants = ("usual", "eager", "synchronous", "noise_loop", "fp8") if device == "cuda" else ("usual", "noise_hook")
    return [
        *(benchmark("update_mfu", "--shape", shape, name=f"update_mfu_{shape}") for shape in shapes),
        *(benchmark(name) for name in ("attention_backends", "optimizer_step", "tree_training", "head_memory")),
        *(
            benchmark("engine_decode", "--variant", variant, name=f"engine_decode_{variant}", needs=("vllm",))
            for variant in variants
        ),
        *(benchmark(name, needs=("vllm",)) for name in ("weight_sync", "rollout_streaming")),
    ]
