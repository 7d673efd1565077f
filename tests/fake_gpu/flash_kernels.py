"""FlashAttention on the CPU: its contract, checked and computed with all scores written down.

`flash_kernels()` gives the CPU what only CUDA has:

    torch's varlen_attn    the installed function itself, with its own checks and autograd, runs; only the two
                           operations that launch its kernels (aten::_flash_attention_forward and _backward) are ours
    the flash-attn package a module with the signature of its flash_attn_varlen_func (version 2.8)

Both kernels are of one kind (FlashAttention 2): the causal mask and the window end at the last query and the last key.
The inputs are checked as the kernels check them (flash_api.cpp), and the greatest lengths, of which they believe
everything, too. What the kernels compute on a GPU is for tests/test_gpu_attention.py.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
_dtypes: tuple[torch.dtype, ...] = HALF


def check(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
    """Assert what the kernels demand of queries (N, H, d), keys and values (K, H / group, d), and cu_seqlens."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in _dtypes, (q.dtype, k.dtype, v.dtype)
    assert q.ndim == k.ndim == v.ndim == 3 and k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    assert q.shape[2] == k.shape[2] <= 256 and q.shape[2] % 8 == 0
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    for cu, total, longest in ((cu_q, len(q), max_q), (cu_k, len(k), max_k)):
        assert cu.dtype == torch.int32 and cu.is_contiguous() and isinstance(longest, int)
        lengths = cu.diff()
        assert cu[0] == 0 and cu[-1] == total and lengths.min() > 0 and lengths.max() == longest
    assert len(cu_q) == len(cu_k)


def rows(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float | None, left: int, right: int):
    """Yield each row's slice of queries, slice of keys, and softmax (H, queries, keys) in float32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for (q0, q1), (k0, k1) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
        queries, keys = q[q0:q1].float().transpose(0, 1), of_all_heads(k[k0:k1], q)
        place = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)  # of a query among the keys
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if right >= 0:
            seen &= torch.arange(k1 - k0) <= place + right
        if left >= 0:
            seen &= torch.arange(k1 - k0) >= place - left
        scores = queries @ keys.transpose(1, 2) * scale
        yield slice(q0, q1), slice(k0, k1), scores.masked_fill(~seen, -torch.inf).softmax(-1)


def of_all_heads(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values of a row, (keys, H / group, d), as (H, keys, d) in float32."""
    return x.float().transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], dim=0)


def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
            window_size_left=-1, window_size_right=-1, **others):  # fmt: skip
    """Compute aten::_flash_attention_forward."""
    check(q, k, v, cu_q, cu_k, max_q, max_k)
    assert dropout_p == 0 and not return_debug_mask and not any(x is not None for x in others.values()), others
    out = torch.empty_like(q)
    for queries, keys, probs in rows(q, k, cu_q, cu_k, scale, window_size_left, 0 if is_causal else window_size_right):
        out[queries] = (probs @ of_all_heads(v[keys], q)).transpose(0, 1).to(q.dtype)
    nothing = q.new_empty(0)
    return out, q.new_empty(q.shape[1], len(q), dtype=torch.float32), nothing, nothing, nothing


def backward(grad, q, k, v, out, logsumexp, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, *,
             scale=None, window_size_left=-1, window_size_right=-1):  # fmt: skip
    """Compute aten::_flash_attention_backward. With P = softmax(S), dS = P * (dP - sum(dP * P))."""
    check(q, k, v, cu_q, cu_k, max_q, max_k)
    assert grad.dtype == out.dtype == q.dtype and grad.shape == out.shape == q.shape
    assert grad.stride(-1) == out.stride(-1) == 1, "an expanded gradient"
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    for queries, keys, probs in rows(q, k, cu_q, cu_k, scale, window_size_left, 0 if is_causal else window_size_right):
        d_out = grad[queries].float().transpose(0, 1)  # (H, queries, d)
        d_probs = d_out @ of_all_heads(v[keys], q).transpose(1, 2)
        d_scores = probs * (d_probs - (d_probs * probs).sum(-1, keepdim=True)) * factor
        dq[queries] = (d_scores @ of_all_heads(k[keys], q)).transpose(0, 1)
        groups = (k.shape[1], q.shape[1] // k.shape[1])
        dk[keys] = (
            (d_scores.transpose(1, 2) @ q[queries].float().transpose(0, 1)).unflatten(0, groups).sum(1).transpose(0, 1)
        )
        dv[keys] = (probs.transpose(1, 2) @ d_out).unflatten(0, groups).sum(1).transpose(0, 1)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """The flash-attn package's function, by torch's operation, which launches the same kernels."""
    assert dropout_p == softcap == 0 and alibi_slopes is None and not return_attn_probs and block_table is None
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return torch.ops.torch_attn._varlen_attn(q, k, v, *lengths, causal, softmax_scale, list(window_size))[0]


@contextlib.contextmanager
def flash_kernels(*dtypes: torch.dtype) -> Iterator[None]:
    """Have both within. `dtypes`: what the kernels take instead of half precision, for a comparison to the digit."""
    global _dtypes
    import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn

    package = types.ModuleType("flash_attn")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.flash_attn_varlen_func = flash_attn_varlen_func
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    before, _dtypes = _dtypes, dtypes or HALF
    try:
        with mock.patch.dict(sys.modules, flash_attn=package):
            yield
    finally:
        _dtypes = before
        library._destroy()
