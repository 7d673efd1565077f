"""The sections of benchmarks/gpu_report.py: tests/test_gpu*.py, benchmarks for a GPU, train_rl.py, several GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Section:
    name: str
    command: tuple[str, ...]
    """Command line after the interpreter. A full run drops {quick}."""
    needs: tuple[str, ...] = ()
    """Packages; the section is skipped without them."""
    limit_s: int = 300
    num_gpus: int = 1
    """The section is skipped with fewer GPUs. On the CPU it runs with any number of ranks."""
    file: str = ""
    """Sections of the same test file share a process; "" = the section always runs alone."""

    @property
    def expected_s(self) -> int:
        """Seconds that it should take on an H100, with its imports. Counted, not measured: no GPU has run one yet."""
        return next(seconds for part, seconds in EXPECTED_S.items() if part in self.name)


EXPECTED_S = {
    "fifty_cycles": 90, "vllm_samples_from": 45, "correctness/vllm": 40, "correctness/": 5,
    "run/train_rl_small": 120, "run/": 180, "colocated": 150,
    "decode_steps_0.5b": 75, "decode_steps_v2": 75, "decode_steps": 150,
    "engine_decode": 75, "update_mfu_7b": 75, "update_mfu": 45, "attention_backends": 40, "optimizer_step": 25,
    "tree_training": 60, "head_memory": 40, "weight_sync": 60, "rollout_streaming": 90, "ranks/": 300,
}  # fmt: skip
"""Part of a section's name -> expected_s. The first that matches counts. An engine's start is about 25 s of it."""


def sections(device: str) -> list[Section]:
    """Return the sections, the most valuable first: the GPU may be gone before the last one."""
    all_sections = [*tests_of_gpu(), *speed_sections(device), *run_sections(device), *rank_sections(device)]
    order = (
        *("correctness/vllm_samples_from_the_weights", "speed/engine_decode_usual", "speed/update_mfu_7b"),
        *("run/train_rl_small", "speed/decode_steps", "speed/colocated", "run/", "ranks/", "correctness/", "speed/"),
    )
    return sorted(
        all_sections,
        key=lambda section: next(i for i, part in enumerate(order) if section.name.startswith(part)),
    )


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

    on_gpu = device == "cuda"
    shapes = ("0.5b", "1.5b", "7b") if on_gpu else ("tiny",)
    variants = ("usual", "eager", "synchronous", "noise_loop", "fp8", "v2") if on_gpu else ("usual", "noise_hook")
    return [
        *(benchmark("update_mfu", "--shape", shape, name=f"update_mfu_{shape}") for shape in shapes),
        *(benchmark(name) for name in ("attention_backends", "optimizer_step", "tree_training", "head_memory")),
        *(
            benchmark("engine_decode", "--variant", variant, name=f"engine_decode_{variant}", needs=("vllm",))
            for variant in variants
        ),
        *(benchmark(name, needs=("vllm",)) for name in ("weight_sync", "rollout_streaming")),
        # one row of 16k tokens, to compare with what prime-rl publishes
        *([benchmark("update_mfu", *PUBLISHED, "0.6b", name="update_mfu_0.6b_16k")] if on_gpu else []),
        benchmark("gpu/decode_steps", name=f"decode_steps_{shapes[-1]}", needs=("vllm",)),
        # a small model with many rows, where the host decides
        *([benchmark("gpu/decode_steps", *MANY_ROWS, name="decode_steps_0.5b", needs=("vllm",))] if on_gpu else []),
        *([benchmark("gpu/decode_steps", *SECOND_RUNNER, name="decode_steps_v2", needs=("vllm",))] if on_gpu else []),
        # a 7B's training state needs eight GPUs: here it is the 0.5B's, beside a ballast
        benchmark("gpu/colocated", "--trained", shapes[0], name=f"colocated_{shapes[-1]}", needs=("vllm",)),
    ]


MANY_ROWS = ("--shape", "0.5b", "--rows", "1024", "512", "256")
SECOND_RUNNER = (*MANY_ROWS, "--model-runner", "v2")
PUBLISHED = ("--row-tokens", "16384", "--shape")
OF_TRAIN_RL = ("vllm", "tyro", "tantivy", "math_verify", "pyarrow")


def run_sections(device: str) -> list[Section]:
    """Return runs of train_rl.py, on one GPU and on all."""

    def run(name: str, *flags: str, **options) -> Section:
        command = ("benchmarks/gpu/run_rl.py", "{quick}", *flags)
        return Section(name, command, OF_TRAIN_RL, limit_s=600, **options)

    large = "0.5b" if device == "cuda" else "small"
    return [
        run("run/train_rl_small"),
        *([run("run/train_rl_0.5b", "--shape", "0.5b")] if device == "cuda" else []),
        run("ranks/train_rl", "--ranks", "0", "--shape", large, num_gpus=2),
        run("ranks/train_rl_tensor_parallel", "--ranks", "0", "--engine.tensor_parallel", "2", num_gpus=2),
    ]


def rank_sections(device: str) -> list[Section]:
    """Return the sections that need several GPUs. They take all GPUs."""
    on_gpu = device == "cuda"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "gpu" if on_gpu else "2")

    def ranks(script: str, name: str, *flags: str, **options) -> Section:
        options = {"num_gpus": 2, "limit_s": 600} | options
        return Section(f"ranks/{name}", (*torchrun, f"benchmarks/{script}.py", "{quick}", *flags), **options)

    shape = "7b" if on_gpu else "tiny"
    eight = {"num_gpus": 8 if on_gpu else 2}  # else its training state would not fit
    return [
        ranks("update_mfu", f"update_mfu_{shape}", "--shape", shape, **eight),
        ranks("update_mfu", f"update_mfu_{shape}_hsdp", "--shape", shape, "--hsdp", **eight),
        *([ranks("update_mfu", "update_mfu_4b_16k", *PUBLISHED, "4b", num_gpus=4)] if on_gpu else []),
        ranks("gpu/colocated", f"colocated_{shape}", "--shape", shape, needs=("vllm",), **eight),
        Section("ranks/lost", ("benchmarks/gpu/lost_ranks.py", "{quick}"), limit_s=600, num_gpus=2),
    ]
