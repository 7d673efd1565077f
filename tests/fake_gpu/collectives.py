"""A pretended NCCL: what it asks of the ranks is checked over gloo, which forgives more.

NCCL pairs the ranks' collectives by their order alone. A rank that comes with another one, or with another shape, makes
all of them hang, or leaves wrong numbers; gloo often raises, or does not mind. So each rank records what it issues,
FSDP2's and DTensor's own collectives included, and `mismatch` compares the records of every two ranks.

    with Record() as record: ...                on every rank, around its step
    mismatch({0: record.calls, 1: ...})         "" or one line that names the ranks and what they issued

Two ranks must issue all collectives that both take part in in one order, whatever the process group: kernels of
different communicators wait for each other on a GPU's stream as well.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
ONE_SIDED = {"gather_": 1, "scatter_": 0}
"""Operations of which the root alone has all arguments -> the argument that every rank has."""


@dataclass(frozen=True)
class Call:
    """One collective as a rank issued it."""

    operation: str
    ranks: tuple[int, ...]
    """Global ranks of the process group."""
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    """(shape, dtype) of each tensor."""
    options: tuple[str, ...]
    """Reduction, root and the like."""
    line: str = field(compare=False)
    """Innermost line of our code."""

    def __str__(self) -> str:
        shapes = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in self.tensors)
        return f"{self.operation}({shapes}) among ranks {list(self.ranks)} at {self.line}"


class Record(TorchDispatchMode):
    """Records this rank's collectives, in their order, while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first; the collectives that it makes of the operation come here again
        if func.namespace in ("c10d", "_c10d_functional"):
            groups = [group for group in map(as_group, [*args, *(kwargs or {}).values()]) if group is not None]
            if groups:  # else it waits for a collective
                self.calls.append(call_of(func, groups[0], args, kwargs or {}))
        return func(*args, **kwargs or {})


def call_of(func, group: dist.ProcessGroup, args: tuple, kwargs: dict[str, Any]) -> Call:
    operation = func._opname
    everybodys = args[ONE_SIDED[operation]] if operation in ONE_SIDED else (args, kwargs)
    tensors = [x for x in tree_leaves(everybodys) if isinstance(x, torch.Tensor)]
    options = [str(x) for x in args if isinstance(x, int | str) and as_group(x) is None]
    return Call(
        operation,
        tuple(sorted(dist.get_process_group_ranks(group))),
        tuple((tuple(x.shape), str(x.dtype)) for x in tensors),
        tuple(options),
        our_line(),
    )


def as_group(x: Any) -> dist.ProcessGroup | None:
    """Return the process group that an argument stands for: c10d has it boxed, functional collectives its name."""
    if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
        return dist.ProcessGroup.unbox(x)
    names = {group.group_name: group for group in dist.distributed_c10d._world.pg_map}
    return names.get(x) if isinstance(x, str) else None


def our_line() -> str:
    frame = sys._getframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT) and file != Path(__file__) and ".venv" not in file.parts:
            return f"{file.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def mismatch(calls: dict[int, list[Call]]) -> str:
    """Compare the records by global rank. Return "", or what the first two ranks that differ have issued."""
    for a, b in combinations(sorted(calls), 2):
        shared = [[call for call in calls[rank] if {a, b} <= set(call.ranks)] for rank in (a, b)]
        for number, (one, other) in enumerate(zip_longest(*shared)):
            if one != other:
                return f"collective {number} of ranks {a} and {b}: rank {a} issues {one}, rank {b} issues {other}"
    return ""
