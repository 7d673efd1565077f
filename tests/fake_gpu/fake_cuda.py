"""A pretended CUDA device: tensors that compute on the CPU, and say that they are on cuda:0.

To C++ (autograd, kernels) they are CPU tensors, so the numbers and the gradients are real. To Python, `.device` is
cuda:0 and `.is_cuda` is True, so the branches that our code has for CUDA run. Every operation checks devices as CUDA
does: a CPU tensor of one or more dimensions beside a CUDA tensor is an error. And everything for which the host would
have to wait for the GPU is counted, by line of our code:

    with fake_cuda() as stalls:
        model = to_fake_cuda(model)
        x = torch.ones(3, device=CUDA)      # cuda:0; "cuda" without a number would ask the driver
        ...
    stalls.waits      the host reads from the GPU: .item(), .tolist(), .cpu(), nonzero, x[bool mask], ...
    stalls.uploads    the host copies pageable memory to the GPU: torch.tensor(list, device=CUDA), x.to(CUDA), ...

An upload from pinned memory with non_blocking=True is no stall; each other one is: PyTorch waits for the stream after
a blocking copy, and the driver may wait before it reads pageable memory.

What this cannot show: kernels and their limits, streams, memory, NCCL, FSDP2 on CUDA, autocast("cuda").
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten

READS = {
    aten._local_scalar_dense.default,  # .item(), float(x), if x:
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.masked_scatter_backward.default,  # which is a masked_select
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}
"""Operations whose result's size or value the host must know. (repeat_interleave and boolean indices: see `reads`.)"""
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Stalls:
    """Places at which the host waited, each with the number of times: "arpo/update.py:120 update_policy [item]"."""

    def __init__(self, code: Path) -> None:
        """Count below the folder `code` only."""
        self.code = str(code)
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()

    def add(self, counter: Counter[str], what: str) -> None:
        frame = sys._getframe()
        while frame is not None:  # innermost line of our code
            file = frame.f_code.co_filename
            if file.startswith(self.code) and file != __file__:
                counter[f"{Path(file).relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name} [{what}]"] += 1
                return
            frame = frame.f_back

    def wait(self, what: str) -> None:
        self.add(self.waits, what)

    def upload(self, what: str) -> None:
        self.add(self.uploads, what)

    def clear(self) -> None:
        self.waits.clear()
        self.uploads.clear()


_stalls = Stalls(ROOT)  # of the `fake_cuda` that is open


class FakeCuda(Tensor):
    """A tensor on the pretended device; `cpu_tensor` is the CPU tensor that has the numbers."""

    cpu_tensor: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> FakeCuda:
        assert not isinstance(real, FakeCuda)
        self = Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            layout=real.layout,
            device="cpu",
        )
        self.cpu_tensor = real
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"FakeCuda({self.cpu_tensor})"

    def tolist(self) -> Any:
        _stalls.wait("tolist")
        return real_of(self.detach()).tolist()

    def numpy(self, *, force: bool = False):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    def __array__(self, *args, **kwargs):
        return self.numpy()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA} | options)

    def cuda(self, *args, **kwargs) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self.to("cpu")

    def to(self, *args, **kwargs) -> Tensor:
        # Tensor.to, which believes that this is a CPU tensor already, does not come by __torch_dispatch__.
        device, dtype, non_blocking = kwargs.get("device"), kwargs.get("dtype"), kwargs.get("non_blocking", False)
        for arg in args:
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, str | torch.device):
                device = arg
            elif isinstance(arg, Tensor):
                device, dtype = arg.device, arg.dtype
            elif isinstance(arg, bool):
                non_blocking = arg
        if device is None or is_cuda(device):
            return self if dtype in (None, self.dtype) else Tensor.to(self, dtype=dtype)
        assert not (self.requires_grad and torch.is_grad_enabled()), "to the CPU with a gradient: not emulated"
        if not non_blocking:
            _stalls.wait("to cpu")
        return Tensor.to(self.cpu_tensor.detach(), dtype=dtype or self.dtype, copy=True)


class FakeCudaMode(TorchDispatchMode):
    """Sees the operations that have no fake tensor among their inputs: torch.zeros(3, device=CUDA)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_cuda(kwargs.get("device")) or any(isinstance(x, FakeCuda) for x in tree_leaves((args, kwargs))):
            return run(func, args, kwargs)
        return func(*args, **kwargs)


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def real_of(x: Any) -> Any:
    return x.cpu_tensor if isinstance(x, FakeCuda) else x


def tensors_in(*values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def run(func, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run one operation of which at least one input, or the result, is on the pretended device."""
    if func is aten._to_copy.default:
        return copied(args[0], kwargs)
    if func is aten.copy_.default:
        return copied_into(*args)
    inputs = tensors_in(args, kwargs)
    check_devices(func, args, inputs)
    if what := reads(func, args, kwargs):
        _stalls.wait(what)
    # Not `device`: autograd's own x.new_zeros(..., device=that of x) asks for "cpu" here, C++ knowing no better.
    on_cuda = is_cuda(kwargs.get("device")) or any(isinstance(x, FakeCuda) for x in inputs)
    real_args, real_kwargs = tree_map(real_of, args), tree_map(real_of, kwargs)
    if "device" in kwargs:
        real_kwargs["device"] = torch.device("cpu")
    real_kwargs.pop("pin_memory", None)
    if func is aten.mm.dtype:  # torch.mm(a, b, out_dtype=...), which only CUDA has
        a, b, dtype = real_args
        assert a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16) and dtype in (a.dtype, torch.float32)
        return FakeCuda(torch.mm(a.float(), b.float()).to(dtype))
    out = func(*real_args, **real_kwargs)

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor) or not on_cuda:
            return x
        in_place = [t for t in inputs if isinstance(t, FakeCuda) and t.cpu_tensor is x]
        return in_place[0] if in_place else FakeCuda(x)

    return tree_map(wrapped, out)


def copied(source: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Run `source.to(...)`, where the device, the dtype or both change."""
    device = kwargs.get("device")
    was_cuda = isinstance(source, FakeCuda)
    # A fake tensor's own device is "cpu" to C++, which may pass that on; those really asked for come by FakeCuda.to.
    becomes_cuda = was_cuda or is_cuda(device)
    if becomes_cuda and not was_cuda:
        count_upload(source, kwargs.get("non_blocking", False))
    options = {name: x for name, x in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    out = aten._to_copy.default(real_of(source), **options)
    return FakeCuda(out) if becomes_cuda else out


def copied_into(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Run `target.copy_(source)`."""
    to_cuda, from_cuda = isinstance(target, FakeCuda), isinstance(source, FakeCuda)
    if to_cuda and not from_cuda:
        count_upload(source, non_blocking)
    elif from_cuda and not to_cuda and not non_blocking:
        _stalls.wait("copy_ to cpu")
    real_of(target).copy_(real_of(source))
    return target


def count_upload(source: Tensor, non_blocking: bool) -> None:
    if not (non_blocking and getattr(source, "is_fake_pinned", False)):
        _stalls.upload("to cuda")


def check_devices(func, args: tuple, inputs: list[Tensor]) -> None:
    """Raise RuntimeError, as CUDA does, where CPU tensors are among the inputs and must not be."""
    on_cpu = [x for x in inputs if not isinstance(x, FakeCuda) and x.dim() > 0]
    if len(on_cpu) == len(inputs):
        return
    if func in INDEXING and isinstance(args[0], FakeCuda):  # CUDA takes indices from the CPU
        indices = [x for x in tensors_in(args[1]) if not isinstance(x, FakeCuda)]
        if indices:
            _stalls.upload("index")
        on_cpu = [x for x in on_cpu if not any(x is index for index in indices)]
    if on_cpu:
        shapes = [tuple(x.shape) for x in on_cpu]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"{func} has CPU tensors of shapes {shapes}"
        )


def reads(func, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Return the name of an operation for which the host must wait for the GPU, or None."""
    if not any(isinstance(x, FakeCuda) for x in tensors_in(args, kwargs)):
        return None
    if func in READS:
        return {aten._local_scalar_dense.default: "item"}.get(func, func.overloadpacket.__name__)
    if func is aten.repeat_interleave.Tensor:
        return None if kwargs.get("output_size") is not None else "repeat_interleave"
    masks = [x for x in tensors_in(args[1]) if x.dtype == torch.bool] if func in INDEXING else []
    if not any(isinstance(x, FakeCuda) for x in masks):
        return None
    # x[mask] = one value becomes masked_fill, whose result has x's size
    is_masked_fill = func is not aten.index.Tensor and args[2].numel() == 1 and len(tensors_in(args[1])) == 1
    return None if is_masked_fill else "bool index"


def to_fake_cuda(module: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.nn.Module:
    """Move a module's parameters (in `dtype`, if given) and buffers, in place; tied weights stay tied. Returns it."""
    moved: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in moved:
                copy = FakeCuda(parameter.detach().to(dtype or parameter.dtype, copy=True))
                moved[id(parameter)] = torch.nn.Parameter(copy, requires_grad=parameter.requires_grad)
            part._parameters[name] = moved[id(parameter)]
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            part._buffers[name] = FakeCuda(buffer.detach().clone())
    return module


def pin_memory(x: Tensor, device: Any = None) -> Tensor:
    pinned = x.clone()
    pinned.is_fake_pinned = True
    return pinned


@contextlib.contextmanager
def fake_cuda(code: Path = ROOT / "arpo") -> Iterator[Stalls]:
    """Have the pretended device within; yields the stalls at lines of files below `code`."""
    global _stalls
    before, _stalls = _stalls, Stalls(code)
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device=CUDA) asks FakeCudaMode
    try:
        with (
            mock.patch("torch.cuda._lazy_init", lambda: None),
            mock.patch("torch.Tensor.pin_memory", pin_memory),
            mock.patch("torch.Tensor.is_pinned", lambda x, device=None: getattr(x, "is_fake_pinned", False)),
            FakeCudaMode(),
        ):
            yield _stalls
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        _stalls = before
