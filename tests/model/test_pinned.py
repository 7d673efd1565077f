"""Pinned host memory on a pretended CUDA runtime; tests/test_gpu.py has the moments on a real one."""

import gc
import mmap

import pytest
import torch
from fake_gpu.fake_cuda import CUDA, fake_cuda
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from arpo.checkpoint.snapshot import Snapshot
from arpo.config.sections import OptimConfig
from arpo.model import optim
from arpo.model.pinned import pinned_like


class Runtime:
    """cudaHostRegister and cudaHostUnregister: what is pinned, by address."""

    def __init__(self):
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        first, last = address // mmap.PAGESIZE, (address + num_bytes - 1) // mmap.PAGESIZE
        for other, other_bytes in self.pinned.items():
            if first <= (other + other_bytes - 1) // mmap.PAGESIZE and other // mmap.PAGESIZE <= last:
                return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    def check_error(code: int) -> None:
        assert code == 0, code

    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    return runtime


def test_pinned_memory_is_as_large_as_the_tensor_and_is_given_back_with_it(runtime):
    """torch's own is up to twice as large: sgl-project/sglang PR 39021, vllm-project/vllm 56410."""
    shapes = [(300, 437), (7,), (), (0, 5)]
    hosts = [pinned_like(torch.ones(shape, dtype=torch.float32)) for shape in shapes]
    assert sorted(runtime.pinned.values()) == [4, 28, 300 * 437 * 4]
    for host, shape in zip(hosts, shapes, strict=True):
        assert host.shape == shape and host.dtype == torch.float32 and not host.any()
        host.fill_(3.0)
    assert hosts[0].sum() == 3 * 300 * 437
    del hosts, host
    gc.collect()
    assert runtime.pinned == {}


def test_a_shard_stays_a_shard(runtime, mesh):
    shard = DTensor.from_local(torch.ones(5, 3, dtype=torch.bfloat16), mesh, [Shard(0)])
    host = pinned_like(nn.Parameter(shard))
    assert isinstance(host, DTensor) and host.placements == shard.placements and host.shape == shard.shape
    assert host.dtype == torch.bfloat16 and not host.requires_grad and host.device.type == "cpu"
    assert list(runtime.pinned) == [host.to_local().data_ptr()]
    with torch.no_grad():
        assert torch.equal(host.copy_(shard).full_tensor(), torch.ones(5, 3, dtype=torch.bfloat16))


def test_moments_and_copies_for_checkpoints_are_pinned_so(runtime, monkeypatch):
    monkeypatch.setattr(optim, "keep_on_host", lambda optimizer: None)  # makes a CUDA stream
    with fake_cuda():
        weight = nn.Parameter(torch.ones(300, 437, device=CUDA))
        model = nn.Module()
        model.weight = weight
        optimizer = optim.build_optimizer(model, OptimConfig(offload=True))
    moments = [optimizer.state[weight][name] for name in optim.MOMENTS]
    assert all(m.data_ptr() in runtime.pinned and m.device.type == "cpu" for m in moments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    copy = Snapshot({"model": {"a": torch.arange(5.0)}}, {}).copy_to_host(None).tensors["model"]["a"]
    assert runtime.pinned[copy.data_ptr()] == 20 and copy.tolist() == [0, 1, 2, 3, 4]
