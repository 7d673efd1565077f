"""The Python sources of vLLM's GPU wheels, downloaded once per version, and how to run them on a pretended H100.

    sources("0.32.0")          the folder, below ~/.cache/arpo-tests (or $XDG_CACHE_HOME/arpo-tests)
    pretend_h100()             first thing in a process whose path begins with that folder

Compiled modules are replaced by empty ones, so nothing that needs a kernel of vLLM's runs.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arpo-tests"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux1_x86_64")
ABSENT_PACKAGES = ("gguf", "humming")  # which vLLM 0.22 imports for its list of quantisations
SUFFIXES = (".py", ".json", "METADATA")


def sources(version: str) -> Path:
    """Return the folder of this version's sources; download it (300 MB) if it is not there. Skips where that fails."""
    folder = CACHE / f"vllm-{version}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [sys.executable, "-m", "pip", "download", f"vllm=={version}", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version=3.12", "--abi=abi3", "--dest", scratch, "--quiet"]
        done = subprocess.run(
            [*command, *(f"--platform={name}" for name in PLATFORMS)], capture_output=True, text=True, timeout=1800
        )
        if done.returncode:
            pytest.skip(f"vLLM {version} cannot be downloaded: {(done.stderr.splitlines() or ['no reason'])[-1]}")
        [wheel] = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith(SUFFIXES)])
        with contextlib.suppress(OSError):  # another process was faster
            unpacked.rename(folder)
    return folder


# ---------------------------------------------------------------------- in the process that runs these sources


class Anything(type):
    """Class of the classes in such a module; an enum's members, for one, are their names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class CompiledModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's compiled modules, and packages for them that are not here, as modules whose names do nothing."""

    def find_spec(self, name, path=None, target=None):
        folder, _, leaf = name.rpartition(".")
        compiled = leaf.endswith("_C") or "_C_" in leaf or leaf in ("cumem_allocator", "spinloop")
        if (folder.startswith("vllm") and compiled) or name.split(".")[0] in ABSENT_PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)

        def anything(name: str):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything(name, (), {"__init__": lambda self, *args, **kwargs: None})

        module.__getattr__ = anything
        return module

    def exec_module(self, module) -> None: ...


class AnyOp:
    """An operation of a compiled module: there, but of no effect."""

    default = None

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args, **kwargs):
        return False

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyOp(name)


def lenient(function: Callable, error: type[Exception], instead: Callable) -> Callable:
    """Return the function, but with the result of `instead` where it raises `error` for what is not compiled."""

    def tolerant(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except error:
            return instead(*args, **kwargs)

    return tolerant


def pretend_h100() -> None:
    """Import vllm such that its platform is CUDA on an H100. Once per process, before anything else imports it."""
    os.environ |= {"VLLM_TARGET_DEVICE": "cuda", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29612"}
    import torch
    import torch.library

    sys.meta_path.insert(0, CompiledModules())

    def missing_op(namespace, name: str):
        if name.startswith("__") or not namespace.name.startswith(("_C", "_moe_C", "_qutlass", "_flash", "_vllm_fa")):
            raise AttributeError(name)
        return AnyOp(name)

    def missing_fake(op, *args, **kwargs):
        return None if args else lambda function: function

    ops = torch._ops._OpNamespace
    ops.__getattr__ = lenient(ops.__getattr__, AttributeError, missing_op)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    torch._C._dispatch_has_kernel_for_dispatch_key = lenient(has_kernel, RuntimeError, lambda *args: True)
    torch.library.Library.impl = lenient(torch.library.Library.impl, RuntimeError, lambda *args, **kwargs: None)
    register_fake = torch.library.register_fake
    torch.library.register_fake = lambda op, *args, **kwargs: (
        missing_fake(op, *args)
        if isinstance(op, str) and op.startswith(("_C", "_moe_C", "_qutlass"))
        else register_fake(op, *args, **kwargs)
    )

    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
        device_count = classmethod(lambda cls: 8)
        is_fully_connected = classmethod(lambda cls, device_ids: True)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)

    H100.is_cumem_allocator_available = lambda self: True
    vllm.platforms._current_platform = H100()
    from vllm.distributed.device_communicators import cuda_wrapper
    from vllm.model_executor.models import registry
    from vllm.triton_utils import triton
    from vllm.utils import system_utils

    class Config:  # of a kernel to tune; vLLM's own placeholder for an absent Triton has no fields
        num_stages = num_warps = 1

        def __init__(self, kwargs=None, **options):
            self.kwargs = kwargs or {}
            vars(self).update(options)

    triton.Config = Config
    registry._run_in_subprocess = lambda inspect_model: inspect_model()  # where nothing is pretended

    class CudaRT:  # a class: vLLM's annotations name it
        def __init__(self, *args): ...

    cuda_wrapper.CudaRTLibrary = CudaRT
    system_utils.find_loaded_library = lambda name: "none"
