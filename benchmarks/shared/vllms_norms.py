"""Unchanged vLLM on a CPU, for comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def vllms_norms() -> Iterator[None]:
    """Within the block vLLM computes RMSNorm with vLLM's operations, not with arpo/engine/cpu_norms.py."""
    from vllm.ir import ops

    with ops.rms_norm.set_priority(["native"]), ops.fused_add_rms_norm.set_priority(["native"]):
        yield
