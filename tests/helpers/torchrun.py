"""The real launcher."""

import subprocess
import sys

from helpers.ranks import ROOT


def torchrun(script: str, *args: str) -> subprocess.Popen:
    """A script on two ranks, in a process group of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script, *args]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, **output)
