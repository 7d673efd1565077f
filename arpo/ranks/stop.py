"""Preemption: SIGTERM or SIGUSR1 lets the running step end; the scripts then save and leave with code 0.

torchrun hands SIGTERM on to its ranks, kills them 30 s later (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, in seconds), and leaves
with a code of its own. Of SIGUSR1 it knows nothing: scripts/slurm_train_rl.sh sends that one straight to the ranks.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import FrameType

from arpo.config.exits import asked_to_stop
from arpo.ranks.ranks import Ranks

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Notes, from its construction on, a signal that asks this rank to stop. Before, such a signal ends the process."""

    def __init__(self) -> None:
        self.asked = False
        asked_to_stop.clear()
        for number in SIGNALS:
            signal.signal(number, self._note)

    def agreed(self, ranks: Ranks) -> bool:
        """Return whether any rank was asked to stop, the same on all ranks, which signals reach in different steps.
        Collective: one number over gloo."""
        is_asked = ranks.all_reduce_sum(float(self.asked))[0] > 0
        if is_asked:
            # The Slurm script repeats it, and Python drops its handlers before the process ends.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            logger.info("asked to stop by a signal: this step is saved, and the same command continues after it")
        return is_asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and a_peer_is_gone():  # torchrun ends the others; no step can be finished
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = True
        asked_to_stop.set()


def a_peer_is_gone() -> bool:
    """Return whether torchrun has fewer children than it started on this node. It has reaped the dead ones by then."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    threads = Path(f"/proc/{os.getppid()}/task").glob("*/children")
    return sum(len(file.read_text().split()) for file in threads) < int(os.environ["LOCAL_WORLD_SIZE"])
