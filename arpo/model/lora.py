"""LoRA (Hu et al., arXiv 2106.09685): each target matrix is W + (alpha / rank) B A, and only A and B are trained.

B is sharded by the same rows as W. So a rank merges its rows of W alone, and gathers only the small A.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from arpo.config.sections import ModelConfig
from arpo.errors import UserError
from arpo.model.loading import copy_rows

A, B = "lora_A", "lora_B"


class LoraLinear(nn.Linear):
    """A linear layer with adapters lora_A (r, in) and lora_B (out, r). Its weight (out, in) keeps name and value."""

    def __init__(self, base: nn.Linear, rank: int, scale: float):
        nn.Module.__init__(self)  # not Linear's, which would make a new weight
        self.in_features = base.in_features
        self.out_features = base.out_features
        self.scale = scale
        self.weight = base.weight
        self.bias = base.bias
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, rank, device=base.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale

    def merged_weight(self) -> torch.Tensor:
        """Return W + scale * B A in float32, sharded like W. Collective over the mesh: gathers A."""
        weight = self.weight.detach()
        a = self.lora_A.detach()
        b = self.lora_B.detach()
        if not isinstance(weight, DTensor):
            return torch.addmm(weight.float(), b, a, alpha=self.scale)
        local = torch.addmm(weight.to_local().float(), b.to_local(), a.full_tensor(), alpha=self.scale)
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )


def add_lora(hf: nn.Module, cfg: ModelConfig) -> None:
    """Freeze the model, in the compute dtype, and add adapters to `cfg.lora_targets`. Call it before sharding, on meta.

    Raises UserError if a target is not a linear layer of the model.
    """
    dtype = getattr(torch, cfg.compute_dtype)
    for parameter in hf.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)  # a frozen weight needs no float32 master copy
    for target in cfg.lora_targets:
        names = [name for name, module in hf.base_model.named_modules() if name.rpartition(".")[2] == target]
        if not names or not all(isinstance(hf.base_model.get_submodule(name), nn.Linear) for name in names):
            kinds = sorted({n.rpartition(".")[2] for n, m in hf.base_model.named_modules() if type(m) is nn.Linear})
            raise UserError(f"model.lora_targets: {target} is no linear layer of this model; it has {', '.join(kinds)}")
        for name in names:
            linear = hf.base_model.get_submodule(name)
            hf.base_model.set_submodule(name, LoraLinear(linear, cfg.lora_rank, cfg.lora_alpha / cfg.lora_rank))


@torch.no_grad()
def initialize(hf: nn.Module, seed: int) -> None:
    """Fill A uniformly (like peft), the same for any number of ranks; B with 0, so the policy starts as its base."""
    for name, module in adapted(hf):
        generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        all_rows = nn.init.kaiming_uniform_(torch.empty(module.lora_A.shape), a=5**0.5, generator=generator)
        copy_rows(module.lora_A, all_rows)
        copy_rows(module.lora_B, torch.zeros(module.lora_B.shape))


def adapted(hf: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Yield (name, layer) for each layer with adapters."""
    return ((name, module) for name, module in hf.named_modules() if isinstance(module, LoraLinear))


def base_parameters(hf: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters without adapters, by their names in the text model."""
    return {name: p for name, p in hf.named_parameters() if not name.endswith((A, B))}


def merged_parameters(hf: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `base_parameters` with the adapters merged, one at a time. Collective."""
    modules = {f"{name}.weight": module for name, module in adapted(hf)}
    for name, parameter in base_parameters(hf).items():
        if name in modules:
            parameter = modules[name].merged_weight()
        yield name, parameter
