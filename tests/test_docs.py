"""What README and docs say is true of the code."""

import re
from pathlib import Path

from helpers.sample_groups import group

from arpo.metrics import rollout_metrics

ROOT = Path(__file__).resolve().parent.parent


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_every_phase_of_a_step_is_in_the_table():
    table = page("metrics")
    script = (ROOT / "train_rl.py").read_text()
    phases = [*re.findall(r'timers\("(\w+)"\)', script), "step", "idle", "rank_wait"]
    assert len(phases) > 10
    for phase in phases:
        assert f"`time/{phase}`" in table, phase


def test_every_metric_of_the_tools_is_in_the_table():
    table, shortened = page("metrics"), {"seconds_p95": "_p95", "seconds_max": "_max"}
    names = [name for name in rollout_metrics([group()]).values() if name.startswith("tools/")]
    assert len(names) > 10
    for name in names:
        last = name.rsplit("/", 1)[1]
        assert shortened.get(last, last) in table, name
