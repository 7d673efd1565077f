"""vLLM as it comes on a CPU, to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def vllms_norms() -> Iterator[None]:
    """Within the block vLLM computes RMSNorm by its own operations, not by those of arpo/engine/cpu_norms.py."""
    from vllm.ir import ops

    with ops.rms_norm.set_priority(["native"]), ops.fused_add_rms_norm.set_priority(["native"]):
        yield
