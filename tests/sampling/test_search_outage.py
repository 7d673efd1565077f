"""An hour without search, and the loop in docs/scale.md that survives it.

Public reports of the same kind: a connection error at step 90 ended a run for good (verifiers #599); a service stopped
answering in the middle of a training (ZeroSearch #24); 503 came again after the resume (ThetaEvolve #5); a run trained
on with empty results, and its reward fell (NeMo Gym #1351); one failure ended the run (tinker-cookbook #497).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.models import searching_model
from helpers.ranks import ROOT, try_script
from helpers.toy_run import CONFIG, build_toy_world
from helpers.web_service import WebService, found, says

from arpo.log import read_metrics

pytestmark = pytest.mark.slow
NUM_ANSWERED = 20
"""Requests before the service goes down: the one at the start, and those of about a step."""


def searching_world(folder: Path, url: str) -> Path:
    search = f"search: {{backend: http, url: '{url}', mode: live, deadline_s: 10}}"
    config = CONFIG.replace("search: {backend: local, corpus: @DIR@/corpus.jsonl, mode: live}", search)
    config = config.replace("num_steps: 12, validate_every: 6, save_every: 2", "num_steps: 5, validate_every: 0")
    world = build_toy_world(folder, config)
    searching_model(world / "model")
    return world


COMMANDS = r"""
arpo-rl() { "$PYTHON" -c "from extras.launch import train_rl; train_rl()" $RANKS "$CONFIG"; }
sleep() { echo "slept $1"; touch "$SLEPT"; }
"""


@pytest.mark.parametrize("ranks", ["", "--nproc_per_node 2"])
def test_the_loop_of_the_docs_waits_for_a_service_and_ends_after_a_mistake(tmp_path, ranks):
    """The first start finds the service down, and the second one a key that is refused."""
    [loop] = re.findall(r"^while arpo-rl .*done$", (ROOT / "docs/scale.md").read_text(), re.MULTILINE)
    has_slept = tmp_path / "slept"
    down_at_first, refuses_later = says("down", 503), says("who are you?", 401)

    async def answer(request):
        return await (refuses_later if has_slept.exists() else down_at_first)(request)

    with WebService([answer]) as service:
        world = searching_world(tmp_path, service.url)
        env = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1"}
        env |= {"RANKS": ranks, "CONFIG": str(world / "config.yaml"), "SLEPT": str(has_slept)}
        done = subprocess.run(
            ["bash", "-c", COMMANDS + loop], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900
        )
    down, refused = dict.fromkeys(line for line in done.stderr.splitlines() if line.startswith("error"))
    assert "HTTP 503 down" in down and "the service refuses access (HTTP 401)" in refused
    assert done.stdout.count("slept 600") == 1, done.stderr[-3000:]


def test_a_run_survives_an_outage(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with WebService([found("eeee")]) as service:
        service.plan = [found("eeee")] * NUM_ANSWERED + [says("down", 503)]
        world = searching_world(tmp_path, service.url)

        def start() -> tuple[int, list[str]]:
            done = try_script("train_rl.py", str(world / "config.yaml"), ranks=1)
            return done.code, done.output.splitlines()

        # the service goes down in the run: three steps are thrown away, and each says why
        code, lines = start()
        [error] = [line for line in lines if line.startswith("error")]
        assert code == 75 and "in 3 batches in a row" in error and "start the same command again" in error
        warnings = [line for line in lines if "warning: this batch is not trained on: tools failed in" in line]
        assert len(warnings) == 3
        assert sum("no policy update: this batch is not trained on" in line for line in lines) == 3
        rows = read_metrics(world / "runs/rl")
        untrained = [row["step"] for row in rows if "optim/lr" not in row]
        assert untrained == [row["step"] for row in rows][-3:]

        # it is still down: the next start asks one query, and ends before it loads a model
        code, lines = start()
        [error] = [line for line in lines if line.startswith("error")]
        assert code == 75 and "tools.search.backend http: " in error and not any("from step" in line for line in lines)

        # it is back: the run goes on behind its checkpoint, and trains
        service.then(found("eeee"))
        code, lines = start()
        assert code == 0 and any(f"from step {rows[-1]['step']}" in line for line in lines), lines[-20:]
        assert all("optim/lr" in row for row in read_metrics(world / "runs/rl")[len(rows) :])
        assert read_metrics(world / "runs/rl")[-1]["step"] == 5
