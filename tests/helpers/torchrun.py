"""The real launcher."""

import subprocess
import sys
from collections.abc import Sequence

from helpers.ranks import ROOT


def torchrun(script: str, *args: str, within: Sequence[str] = ()) -> subprocess.Popen:
    """A script on two ranks, in a process group of its own. `within`: what the command begins with."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*within, *launcher, script, *args], cwd=ROOT, start_new_session=True, **output)
