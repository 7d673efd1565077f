"""The commands installed by `pip install -e .`: a script on every GPU of this machine, without typing torchrun.

    arpo-rl configs/qwen2.5_7b.yaml configs/arpo.yaml       # torchrun --nproc_per_node GPUS train_rl.py configs/...
    arpo-rl --nproc_per_node 2 configs/demo_arpo.yaml       # two ranks, on any machine

On one GPU or none, and for --help, python runs the script. Several machines need torchrun itself (docs/scale.md).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from arpo.config.exits import exit_with
from arpo.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = ("--nproc_per_node", "--nproc-per-node")
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that torchrun hears, and sends on to the ranks."""


def train_sft() -> None:
    run("train_sft.py")


def train_rl() -> None:
    run("train_rl.py")


def evaluate() -> None:
    run("evaluate.py")


def run(script: str) -> NoReturn:
    """Run a script of the checkout with this command's arguments, on the given number of ranks or on all GPUs."""
    try:
        path = ROOT / script
        if not path.is_file():
            raise UserError(f"{path} is not there; the commands need a checkout: clone it, and pip install -e . in it")
        num_ranks, argv = split_ranks(sys.argv[1:])
        if num_ranks == 0:
            num_ranks = 1 if {"-h", "--help"} & {*argv} else num_gpus(os.environ)
    except UserError as error:
        exit_with(error)
    place = []
    if num_ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets this too, with a long warning
        place = ["-m", "extras.launch", "--standalone", "--nproc_per_node", str(num_ranks)]
    sys.stdout.flush()
    # This process becomes python or torchrun: signals and the exit code then belong to the new program.
    os.execv(sys.executable, [sys.executable, *place, str(path), *argv])


def torchrun() -> None:
    """Be torchrun, but end with the exit code of the rank that failed first. (torchrun ends with 1 after any failure.)

    If a signal ends the run, torchrun's warnings are left out: the ranks report the signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    # torchrun would hear signals that this process should ignore, like SIGHUP under nohup (pytorch 76894).
    heard = [name for name in SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(heard))
    logging.disable(logging.WARNING)  # torchrun logs each signal sent to a process
    try:
        main()
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode)


def split_ranks(argv: list[str]) -> tuple[int, list[str]]:
    """Take the number of ranks from the arguments; 0 = not given. ["a.yaml", "--nproc_per_node", "2"]
    -> (2, ["a.yaml"])"""
    found = [at for at, argument in enumerate(argv) if argument.partition("=")[0] in NUM_RANKS]
    if not found:
        return 0, argv
    at = found[0]
    name, _, value = argv[at].partition("=")
    rest = argv[:at] + argv[at + (1 if value else 2) :]
    value = value or "".join(argv[at + 1 : at + 2])
    if not value.isdigit() or int(value) < 1:
        raise UserError(f"{name}={value!r} must be a number of ranks, at least 1")
    return int(value), rest


def num_gpus(environment: Mapping[str, str]) -> int:
    """Return the number of GPUs for a run (at least 1), without importing torch."""
    if version("torch").endswith("+cpu"):
        return 1
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return max(len([name for name in visible.split(",") if name.strip()]), 1)
    if not shutil.which("nvidia-smi"):
        return 1
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return max(sum(line.startswith("GPU ") for line in listed.splitlines()), 1)


if __name__ == "__main__":
    torchrun()
