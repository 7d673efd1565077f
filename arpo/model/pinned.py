"""Pinned host memory of the exact size. A GPU copies from and to pinned memory while the host does something else.

torch's own (`pin_memory=True`) rounds each tensor up to a power of two. For the shards of a 7B model on 8 GPUs this is
1.9 times their size, and the kernel kills runs for it (sgl-project/sglang PR 39021, vllm-project/vllm 56410).
"""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def pinned_like(tensor: Tensor) -> Tensor:
    """Return zeros with the tensor's shape, dtype and sharding, in pinned host memory. Needs a GPU."""
    if isinstance(tensor, DTensor):
        # from_local would move the shard to the mesh's device
        return DTensor(pinned_like(tensor.to_local()), tensor._spec, requires_grad=False)
    if not tensor.numel():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    num_bytes = tensor.numel() * tensor.element_size()
    # Pages of its own: malloc could put two tensors on one page, and CUDA pins a page only once. They are shared with
    # forks: after a copy on write the host would no longer see what the GPU writes.
    pages = mmap.mmap(-1, num_bytes)
    host = torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), num_bytes, 0))
    weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr())
    return host
