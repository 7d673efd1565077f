"""What a run leaves: numbers, charts, trajectories."""

from arpo.log.metrics_file import read_metrics
from arpo.log.run_log import LINES_PER_RUN, Console, RunLog

__all__ = ["LINES_PER_RUN", "Console", "RunLog", "read_metrics"]
