"""The pretended CUDA device itself: it computes, and is as strict as the real one."""

from pathlib import Path

import pytest
import torch
from fake_gpu.fake_cuda import CUDA, FakeCuda, fake_cuda, to_fake_cuda
from torch import nn

HERE = Path(__file__).parent


@pytest.fixture
def stalls():
    with fake_cuda(HERE) as stalls:
        yield stalls


def test_what_is_made_there_says_so_and_has_the_cpus_numbers_and_gradients(stalls):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(5, 4)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    moved = to_fake_cuda(model)
    out = moved(x.to(CUDA))
    assert out.device == CUDA and out.is_cuda and not out.is_cpu and not x.is_cuda
    out.sum().backward()
    assert all(p.grad.is_cuda for p in moved.parameters())
    for parameter, gradient in zip(moved.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad.cpu(), gradient)
    for made in (torch.zeros(2, device=CUDA), out.new_ones(2), torch.tensor([1.0], device=CUDA), out.new_tensor([1])):
        assert isinstance(made, FakeCuda)


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


@pytest.mark.parametrize(
    "read, what",
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: bool(x.any()), "item"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "to cpu"),
        (lambda x: x.to(device="cpu", dtype=torch.float64), "to cpu"),
        (lambda x: torch.zeros(2).copy_(x), "copy_ to cpu"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: x[x > 0], "bool index"),
        (lambda x: torch.repeat_interleave(x, torch.tensor([1, 2], device=CUDA)), "repeat_interleave"),
    ],
)
def test_a_read_is_a_wait(stalls, read, what):
    x = torch.ones(2, device=CUDA)
    read(x)
    [(place, count)] = stalls.waits.items()
    assert place.startswith("tests/fake_gpu/test_fake_cuda.py:") and place.endswith(f"[{what}]") and count == 1
    assert stalls.uploads.total() == (what == "repeat_interleave")  # of the number of times


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


def test_what_needs_no_answer_is_no_stall(stalls):
    x = torch.ones(4, device=CUDA, requires_grad=True)
    y = (x * 2).clone()
    y[y > 1] = 0.0
    y[1:2] = 3.0
    y = torch.where(y > 0, y, 1.0).masked_fill(y > 5, 0.0)[torch.arange(4, device=CUDA)]
    (y.sum() + torch.repeat_interleave(y, 2).mean()).backward()
    repeats = torch.full((4,), 2, device=CUDA)
    assert torch.repeat_interleave(x.detach(), repeats, output_size=8).shape == (8,)
    assert not stalls.waits and not stalls.uploads


def test_stalls_elsewhere_are_not_ours(stalls):
    with fake_cuda() as of_arpo:
        torch.ones(2, device=CUDA).tolist()
    assert not of_arpo.waits
    torch.ones(2, device=CUDA).tolist()
    assert stalls.waits.total() == 1
