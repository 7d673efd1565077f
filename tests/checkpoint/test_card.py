"""The card of a run that did not end as it should have."""

import json

from arpo.checkpoint.card import _results


def test_half_a_line_that_a_killed_run_left_is_no_result(tmp_path):
    rows = [{"step": step, "reward/mean": step / 4} for step in (1, 2)]
    whole = "".join(json.dumps(row) + "\n" for row in rows)
    for end in range(len(whole) - 1, len(whole) - 12, -1):
        (tmp_path / "metrics.jsonl").write_text(whole[:end])
        assert _results(tmp_path, 9)[-1] == "| `reward/mean` | 0.25 | 1 |"
    (tmp_path / "metrics.jsonl").write_text(whole)
    assert _results(tmp_path, 9)[-1] == "| `reward/mean` | 0.5 | 2 |"
