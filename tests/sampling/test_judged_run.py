"""A run whose reward is a sum of a rule, a judge, a function of the user's and the overlong penalty; and its
continuation."""

import json
import re
from fnmatch import fnmatch

import pytest
from aiohttp import web
from helpers.eval_records import reply
from helpers.files import read_jsonl
from helpers.judge_server import RIGHT, WRONG
from helpers.models import searching_model
from helpers.ranks import ROOT, run_script, try_script
from helpers.toy_run import build_toy_world
from helpers.web_service import WebService, says

from arpo.log import read_metrics

MINE = '''
import asyncio

async def letters(trajectories, prompts):
    """Share of letters e, of whole trajectories at once."""
    await asyncio.sleep(0)
    assert all(t.stop_reason and t.turns and p.meta is not None for t, p in zip(trajectories, prompts, strict=True))
    return [{"score": t.text.count("e") / max(len(t.text), 1), "turns": len(t.turns)} for t in trajectories]
'''
BUFFER, LONGEST = 20, 48


async def likes_short_answers(request: web.Request) -> web.Response:
    """Every eighth judgement or so is no verdict, and of the model `unsure` every second."""
    asked = json.loads(await request.read())
    prompt, every = asked["messages"][0]["content"], 2 if asked["model"] == "unsure" else 8
    prediction = re.search(r"<prediction>\n(.*?)\n</prediction>", prompt, re.DOTALL)[1]
    said = "Hard to say." if len(prediction) % every == every - 1 else RIGHT if len(prediction) < 8 else WRONG
    return web.json_response(reply(said))


def reward_of(record: dict) -> float:
    """The reward, from what the dump says of a trajectory."""
    parts = record["reward_parts"]
    assert parts["overlong"] == -min(max(len(record["token_ids"]) - (LONGEST - BUFFER), 0) / BUFFER, 1)
    return parts["answer"] + 0.5 * parts["judge"] + 0.25 * parts["overlong"] + 2 * parts["letters"]


@pytest.mark.slow
def test_a_run_with_a_judge_trains_on_the_sum_and_goes_on_without_what_has_no_verdict(tmp_path):
    world = build_toy_world(tmp_path)
    searching_model(world / "model", ("answer",))
    config = world / "config.yaml"
    config.write_text(config.read_text().replace("reward: {file: " + str(world) + "/reward.py}\n", ""))
    (world / "mine.py").write_text(MINE)
    terms = ["--reward.terms", "answer=1", "judge=0.5", "overlong=0.25", f"{world}/mine.py:letters=2"]
    terms += ["--reward.overlong_buffer_tokens", str(BUFFER), "--judge.model", "tester", "--judge.deadline_s", "300"]
    run, flags = world / "runs" / "rl", [str(config), *terms, "--run.dump_every", "1", "--run.save_every", "1"]
    flags += ["--optim.lr", "1e-5"]  # it must not learn to do without answers
    with WebService([likes_short_answers]) as service:
        run_script("train_rl.py", *flags, "--judge.url", service.url, "--run.num_steps", "2")
        rows = read_metrics(run)
        assert [row["step"] for row in rows] == [0, 1, 2]
        asked = sum(row["judge/calls"] for row in rows)
        assert asked == len(service.requests) - 1 > 4  # the probe is none

        drop = ["--judge.fallback", "drop", "--judge.model", "unsure", "--run.resume_changed", "True"]
        output = run_script("train_rl.py", *flags, *drop, "--judge.url", service.url, "--run.num_steps", "3")
        assert "from step 2" in output
    for row in rows[1:]:
        records = read_jsonl(run / "trajectories" / f"step_{row['step']:06d}.jsonl.gz")
        assert all(record["reward"] == pytest.approx(reward_of(record)) for record in records)
        assert row["reward/mean"] == pytest.approx(sum(map(reward_of, records)) / len(records))
        unclear = [record for record in records if record["reward_parts"]["judge_failed"]]
        assert all(record["reward_parts"]["judge"] == record["reward_parts"]["accuracy"] for record in unclear)
        assert row["reward/judge_failed"] == pytest.approx(len(unclear) / len(records)) and row["judge/failed"] == 0
    last = read_metrics(run)[-1]
    assert last["step"] == 3 and last["judge/unparsable"] > 0
    records = read_jsonl(run / "trajectories" / "step_000003.jsonl.gz")
    out = [record for record in records if record["reward"] is None]
    assert out and {record["reward_reason"] for record in out} == {"judge_unparsable"}
    assert all(record["advantage"] is None for record in out)
    assert last["group/effective_size"] == pytest.approx(8 * (1 - len(out) / len(records)))

    table = (ROOT / "docs" / "metrics.md").read_text()
    defined = [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.partition(" | ")[0])]
    own = {"step", "reward/letters", "reward/letters/turns"}
    logged = {name for row in read_metrics(run) for name in row} - own
    assert [name for name in sorted(logged) if not any(fnmatch(name, pattern) for pattern in defined)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, words",
    [
        (["judge=1"], "reward.terms has judge, but judge.url or judge.model is empty; set both, or drop the term"),
        (
            ["judge=1", "--judge.url", "http://127.0.0.1:9", "--judge.model", "m", "--judge.deadline_s", "1"],
            "judge.url: ",
        ),
        (["mine.py:f=1"], "reward.terms=mine.py:f: there is no such file; check the path"),
    ],
)
def test_a_reward_that_cannot_be_had_is_one_line_before_a_model_is_loaded(tmp_path, flags, words):
    world = build_toy_world(tmp_path)
    config = world / "config.yaml"
    config.write_text(config.read_text().replace("reward: {file: " + str(world) + "/reward.py}\n", ""))
    done = try_script("train_rl.py", str(config), "--reward.terms", *flags)
    [line] = [line for line in done.output.splitlines() if line.startswith("error")]
    assert done.code == 2 and line.startswith(f"error: {words}") and "Traceback" not in done.output


@pytest.mark.slow
def test_a_key_that_the_judge_refuses_is_one_line(tmp_path, monkeypatch):
    world = build_toy_world(tmp_path)
    config = world / "config.yaml"
    config.write_text(config.read_text().replace("reward: {file: " + str(world) + "/reward.py}\n", ""))
    with WebService([says("who are you?", 401)]) as service:
        flags = ["--reward.terms", "judge=1", "--judge.url", service.url, "--judge.model", "m"]
        done = try_script("train_rl.py", str(config), *flags, ranks=1)
    assert done.code == 2 and "judge.url: the service refuses access; set JUDGE_API_KEY (HTTP 401)" in done.output
