"""AdamW with weight decay on matrices only, learning-rate schedules, and gradient clipping with a check for NaN."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from arpo.config.sections import OptimConfig
from arpo.model.pinned import pinned_like

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, beside `step`. For another optimizer name its state here: checkpoints load only what
there is from the start."""


def build_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """Return AdamW over the trained (sharded) parameters. Norms and biases have no weight decay.

    `fused` is set, because for shards torch would by default update one parameter after the other.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, fused=True)
    # AdamW would create its state at the first step, in memory that activations have left. These blocks of GPU memory
    # could then not be returned for vLLM. So the state is created now.
    for p in parameters:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        like = torch.zeros_like
        if cfg.offload:
            like = pinned_like if p.is_cuda else partial(torch.zeros_like, device="cpu")
        optimizer.state[p] = {"step": step} | {name: like(p) for name in MOMENTS}
    if cfg.offload:
        keep_on_host(optimizer)
    return optimizer


def keep_on_host(optimizer: torch.optim.AdamW) -> None:
    """Keep AdamW's moments in host memory. Copy them to the parameters' device for each optimizer step, and back.

    Checkpoints save and load the moments in host memory. The copies from a GPU are asynchronous: the host must call
    `torch.cuda.synchronize` before it reads them.
    """
    home = {p: {name: state[name] for name in MOMENTS} for p, state in optimizer.state.items()}
    stream = torch.cuda.Stream() if any(p.is_cuda for p in home) else None

    def bring(*_: Any) -> None:
        if stream:
            torch.cuda.current_stream().wait_stream(stream)
        for p, buffers in home.items():
            for name, buffer in buffers.items():
                moment = torch.empty_like(p)
                local(moment).copy_(local(buffer), non_blocking=True)
                optimizer.state[p][name] = moment

    def put_back(*_: Any) -> None:
        if stream:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for p, buffers in home.items():
                for name, buffer in buffers.items():
                    moment = local(optimizer.state[p][name])
                    local(buffer).copy_(moment, non_blocking=True)
                    if stream:
                        moment.record_stream(stream)  # so that its memory is not reused before the copy has ended
                    optimizer.state[p][name] = buffer

    optimizer.register_step_pre_hook(bring)
    optimizer.register_step_post_hook(put_back)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lr_factor(update: int, num_updates: int, cfg: OptimConfig) -> float:
    """Return the learning rate of optimizer step `update` (from 0), divided by `cfg.lr`.

    The warm-up is linear over the first `warmup_ratio` of all steps. Then schedule=linear falls over the last
    `decay_ratio` of all steps, and schedule=cosine over all steps after the warm-up. Both end at `min_lr_ratio`.
    """
    warmup = round(cfg.warmup_ratio * num_updates)
    if update < warmup:
        return (update + 1) / warmup
    if cfg.schedule == "constant":
        return 1.0
    decay = num_updates - warmup
    if cfg.schedule == "linear":
        decay = min(decay, max(1, round(cfg.decay_ratio * num_updates)))
    progress = min(max(1.0 - (num_updates - update) / max(decay, 1), 0.0), 1.0)
    shape = 1.0 - progress if cfg.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * shape


def set_learning_rate(optimizer: torch.optim.Optimizer, update: int, num_updates: int, cfg: OptimConfig) -> float:
    """Set the learning rate of optimizer step `update`. Return the rate of parameters without a rate of their own."""
    factor = lr_factor(update, num_updates, cfg)
    for group in optimizer.param_groups:
        # a group may have been built with another rate than cfg.lr; the schedule multiplies this rate
        peak_lr = group.setdefault("initial_lr", group["lr"])
        group["lr"] = peak_lr * factor
    return cfg.lr * factor


def num_not_finite(model: nn.Module) -> int:
    """Return the number of trained weights in this rank's shards that are NaN or infinite."""
    return sum(int((~local(p.detach()).isfinite()).sum()) for p in model.parameters() if p.requires_grad)


def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Clip the gradient to a global norm of `max_norm`, 0 = no clipping. Return the norm before, the same on all ranks.

    Raises FloatingPointError, on all ranks alike, if the norm is not finite.
    """
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    value = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not math.isfinite(value):
        raise FloatingPointError(f"gradient norm is {value}")
    return value
