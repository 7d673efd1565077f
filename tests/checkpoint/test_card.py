"""The card's parts, where a run did not end as it should have, and where its settings name places."""

import json

import pytest

from arpo.checkpoint.card import _data_sets, _on_hub, _plain, _results


def test_half_a_line_that_a_killed_run_left_is_no_result(tmp_path):
    rows = [{"step": step, "reward/mean": step / 4} for step in (1, 2)]
    whole = "".join(json.dumps(row) + "\n" for row in rows)
    for end in range(len(whole) - 1, len(whole) - 12, -1):
        (tmp_path / "metrics.jsonl").write_text(whole[:end])
        assert _results(tmp_path, 9)[-1] == "| `reward/mean` | 0.25 | 1 |"
    (tmp_path / "metrics.jsonl").write_text(whole)
    assert _results(tmp_path, 9)[-1] == "| `reward/mean` | 0.5 | 2 |"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/home/me/secret/mine.py", "mine.py"),
        ("secret/mine.py", "mine.py"),
        ("~/secret/model", "model"),
        ("models/mine", "mine"),
        (["answer=1", "secret/mine.py:style=0.2"], "answer=1, mine.py:style=0.2"),
        ("Owner/Model-7B.v2", "Owner/Model-7B.v2"),
        (0.5, "0.5"),
        ("a|b", "a\\|b"),
    ],
)
def test_a_setting_names_no_folder_of_ours(value, shown):
    assert _plain(value) == shown


def test_a_path_that_is_gone_is_no_name_of_the_hub():
    gone = ("models/x", "data/x", "../x", "runs/x", "secret/mine.py")
    assert not any(map(_on_hub, gone)) and _on_hub("Qwen/Qwen2.5-3B")
    found = _data_sets({"data.train": "secret/x.parquet", "data.valid": "openai/gsm8k@0123:main/test.parquet"})
    assert found == {"data.train": "", "data.valid": "openai/gsm8k"}
