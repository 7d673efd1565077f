"""Preemption: after SIGTERM or SIGUSR1 the running step ends, and the scripts save and exit with code 0.

torchrun passes SIGTERM on to the ranks, kills the ranks 30 s later (TORCH_ELASTIC_SHUTDOWN_TIMEOUT, in seconds), and
exits with another code. torchrun ignores SIGUSR1: scripts/slurm_train_rl.sh sends this signal directly to the ranks.
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
    """Records the signals to stop this rank. Before the construction of this object, a signal ends the process."""

    def __init__(self) -> None:
        self.asked = False
        asked_to_stop.clear()
        for number in SIGNALS:
            signal.signal(number, self._note)

    def agreed(self, ranks: Ranks) -> bool:
        """True on all ranks if any rank was asked to stop. Collective: one number over gloo.

        A signal may reach the ranks in different steps, and all must stop after the same step.
        """
        [num_asked] = ranks.all_reduce_sum(float(self.asked))
        is_asked = num_asked > 0
        if is_asked:
            # The Slurm script repeats the signal. Python removes its handlers before the process ends, and without a
            # handler the signal would kill it.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            logger.info("asked to stop by a signal: this step is saved, and the same command continues after it")
        return is_asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and a_peer_is_gone():
            # torchrun ends the other ranks because one has died. The step cannot be finished.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.asked = True
        asked_to_stop.set()


def a_peer_is_gone() -> bool:
    """True if torchrun has fewer children than ranks on this node. torchrun has reaped dead children by then."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    threads = Path(f"/proc/{os.getppid()}/task").glob("*/children")
    return sum(len(file.read_text().split()) for file in threads) < int(os.environ["LOCAL_WORLD_SIZE"])
