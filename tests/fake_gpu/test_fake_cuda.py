"""The pretended CUDA device itself: it computes, and is as strict as the real one."""

from pathlib import Path

import pytest
import torch
from fake_gpu.fake_cuda import CUDA, fake_cuda

HERE = Path(__file__).parent


@pytest.fixture
def stalls():
    with fake_cuda(HERE) as stalls:
        yield stalls


def test_tensors_of_two_devices_do_not_meet(stalls):
    ours, cpu = torch.ones(2, device=CUDA), torch.ones(2)
    with pytest.raises(RuntimeError, match=r"at least two devices, cuda:0 and cpu.*\(2,\)"):
        ours + cpu
    with pytest.raises(RuntimeError, match="at least two devices"):
        cpu.index_select(0, torch.zeros(1, dtype=torch.long, device=CUDA))
    with pytest.raises(RuntimeError, match="at least two devices"):
        cpu[ours > 0]
    with pytest.raises(TypeError, match="numpy"):
        ours.numpy()
    assert (ours + torch.tensor(1.0)).tolist() == [2, 2]  # as CUDA allows it


READS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "to cpu": lambda x: x.cpu(),
    "copy_ to cpu": lambda x: torch.zeros(2).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "bool index": lambda x: x[x > 0],
    "repeat_interleave": lambda x: torch.repeat_interleave(x, torch.ones(2, dtype=torch.long, device=CUDA)),
}


def test_a_read_is_a_wait_and_what_needs_no_answer_is_none(stalls):
    x = torch.ones(2, device=CUDA)
    for what, read in READS.items():
        stalls.clear()
        read(x)
        [(place, count)] = stalls.waits.items()
        assert place.startswith("tests/fake_gpu/test_fake_cuda.py:") and place.endswith(f"[{what}]") and count == 1
    stalls.clear()
    y = torch.where(x > 0, x, 1.0)
    y[y > 1] = 0.0
    torch.repeat_interleave(y, 2).mean()
    assert not stalls.waits and not stalls.uploads


def test_an_upload_is_a_stall_of_its_own_kind_unless_it_is_pinned_and_asynchronous(stalls):
    x, pinned = torch.arange(2.0), torch.arange(2.0).pin_memory()
    assert pinned.is_pinned() and not x.is_pinned()
    uploads = [
        lambda: torch.tensor([1, 2], device=CUDA),
        lambda: x.to(CUDA),
        lambda: x.to(CUDA, non_blocking=True),  # pageable
        lambda: pinned.to(CUDA),
        lambda: torch.zeros(2, device=CUDA).copy_(x),
        lambda: torch.zeros(2, device=CUDA)[torch.tensor([0])],
    ]
    for number, upload in enumerate(uploads, 1):
        assert upload().is_cuda and stalls.uploads.total() == number
    assert pinned.to(CUDA, non_blocking=True).is_cuda
    assert torch.zeros(2, device=CUDA).copy_(pinned, non_blocking=True).tolist() == [0, 1]
    assert stalls.uploads.total() == len(uploads) and stalls.waits.total() == 1  # .tolist()
