"""What a run leaves: numbers, charts, trajectories."""

from arpo.log.run_log import LINES_PER_RUN, Console, RunLog, read_metrics, script_json

__all__ = ["LINES_PER_RUN", "Console", "RunLog", "read_metrics", "script_json"]
