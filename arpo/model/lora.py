"""LoRA (Hu et al., arXiv 2106.09685): each target matrix is W + (alpha / rank) B A, and only A and B are trained.

The forward pass multiplies with this sum, rounded to model.compute_dtype, because the engine samples with the same sum.
Two products, x W + (x A) B, would show the trainer changes that the rounding hides from the engine: with a bfloat16
model of 135M their mismatch grew from 0.002 to 0.1 (docs/scale.md). In full training the rounding is the same as here.

B is sharded by the same rows as W. So a rank merges its rows of W alone, and gathers only the small A.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from arpo.config.sections import ModelConfig
from arpo.errors import UserError
from arpo.model.loading import copy_rows

A, B = "lora_A", "lora_B"


class MergedProduct(torch.autograd.Function):
    """x (..., in) times the merged weight, with gradients for x, lora_A and lora_B.

    The merged weight is computed again for the backward pass, so that no layer keeps a second weight in memory.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return F.linear(x, merged(weight, a, b, scale), bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        grad_x = grad @ merged(weight, a, b, ctx.scale) if ctx.needs_input_grad[0] else None
        rows = grad.flatten(0, -2)  # (N, out)
        inputs = x.flatten(0, -2)  # (N, in)
        grad_a = (rows @ b).T @ inputs * ctx.scale  # (r, in)
        grad_b = rows.T @ F.linear(inputs, a) * ctx.scale  # (out, r)
        return grad_x, None, None, grad_a, grad_b, None  # weight and bias are frozen


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + scale * B A, rounded to W's dtype. (out, in), (r, in), (out, r) -> (out, in)"""
    return torch.addmm(weight, b, a, alpha=scale)


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

    def forward(self, x: Tensor) -> Tensor:
        return MergedProduct.apply(x, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)

    def merged_weight(self) -> Tensor:
        """Return the weight of the forward pass, sharded like W. Collective over the mesh: gathers A."""
        weight = self.weight.detach()
        # FSDP2 casts the adapters to the compute dtype, which is that of the frozen weight
        a = self.lora_A.detach().to(weight.dtype)
        b = self.lora_B.detach().to(weight.dtype)
        if not isinstance(weight, DTensor):
            return merged(weight, a, b, self.scale)
        local = merged(weight.to_local(), a.full_tensor(), b.to_local(), self.scale)
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
    linears = [name for name, module in hf.base_model.named_modules() if type(module) is nn.Linear]
    kinds = sorted({name.rpartition(".")[2] for name in linears})
    for target in cfg.lora_targets:
        names = [name for name, module in hf.base_model.named_modules() if name.rpartition(".")[2] == target]
        if not names or not all(isinstance(hf.base_model.get_submodule(name), nn.Linear) for name in names):
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


def base_parameters(hf: nn.Module) -> dict[str, Tensor]:
    """Return the parameters without adapters, by name. The names are those of the model without LoRA."""
    return {name: p for name, p in hf.named_parameters() if not name.endswith((A, B))}


def merged_parameters(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield `base_parameters` with the adapters merged, one at a time. Collective."""
    modules = {f"{name}.weight": module for name, module in adapted(hf)}
    for name, parameter in base_parameters(hf).items():
        if name in modules:
            parameter = modules[name].merged_weight()
        yield name, parameter
