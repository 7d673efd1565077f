"""Metrics of speed and memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from arpo.metrics import Metrics

GIB = 2**30


def speeds(values: Mapping[str, float], num_ranks: int) -> dict[str, float]:
    """Return tokens per second and rank from a step's tokens and seconds. (A rank is a GPU, if there are GPUs.)"""
    phases = {"sampled": "rollout", "trained": "update"}
    return {
        f"tokens/{tokens}_per_second": values[f"tokens/{tokens}"] / values[f"time/{phase}"] / num_ranks
        for tokens, phase in phases.items()
        if f"tokens/{tokens}" in values and values.get(f"time/{phase}")
    }


def memory_metrics(device: torch.device, engine_bytes: int = 0) -> Metrics:
    """Return this rank's memory. The maximum over ranks is reported. Peaks count from the last call.

    engine_bytes: GPU memory in vLLM's pool. It is left out of the peak, since torch counts it even while vLLM sleeps.
    """
    m = Metrics()
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    m.max("memory/host_gib", num_pages * os.sysconf("SC_PAGE_SIZE") / GIB)
    if device.type == "cuda":
        m.max("memory/gpu_peak_gib", (torch.cuda.max_memory_allocated(device) - engine_bytes) / GIB)
        torch.cuda.reset_peak_memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        m.max("memory/gpu_used_gib", (total - free) / GIB)
    return m
