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
from helpers.web_service import WebService

from arpo.log import read_metrics

MINE = '''
import asyncio

from extras.judge_reward import JudgeReward

judge = JudgeReward({url!r}, {model!r}, deadline_s=300, fallback={fallback!r}, cache={cache!r})

async def letters(trajectories, prompts):
    """Share of letters e, of whole trajectories at once."""
    await asyncio.sleep(0)
    assert all(t.stop_reason and t.turns and p.meta is not None for t, p in zip(trajectories, prompts, strict=True))
    return [dict(score=t.text.count("e") / max(len(t.text), 1), turns=len(t.turns)) for t in trajectories]
'''
BUFFER, LONGEST = 20, 48


async def likes_short_answers(request: web.Request) -> web.Response:
    """Some judgements are no verdict, and of the model `unsure` some more."""
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


def test_a_run_with_a_judge_trains_on_the_sum_and_goes_on_without_what_has_no_verdict(tmp_path):
    world = build_toy_world(tmp_path)
    searching_model(world / "model", ("answer",))
    config = world / "config.yaml"
    config.write_text(config.read_text().replace("reward: {file: " + str(world) + "/reward.py}\n", ""))
    own = world / "mine.py"
    terms = ["--reward.terms", "answer=1", f"{own}:judge=0.5", "overlong=0.25", f"{own}:letters=2"]
    terms += ["--reward.overlong_buffer_tokens", str(BUFFER)]
    run, flags = world / "runs" / "rl", [str(config), *terms, "--run.dump_every", "1", "--run.save_every", "1"]
    flags += ["--optim.lr", "1e-5"]  # it must not learn to do without answers
    with WebService([likes_short_answers]) as service:
        about = {"url": service.url, "cache": str(world / "judge.sqlite")}
        own.write_text(MINE.format(model="tester", fallback="rule", **about))
        run_script("train_rl.py", *flags, "--run.num_steps", "2")
        rows = read_metrics(run)
        assert [row["step"] for row in rows] == [0, 1, 2]
        prompts = [json.loads(request.body)["messages"][0]["content"] for request in service.requests]
        assert len(prompts) > 6 and len(prompts) - len(set(prompts)) <= 2  # of two ranks each probes and tries it

        own.write_text(MINE.format(model="unsure", fallback="drop", **about))
        done = try_script("train_rl.py", *flags, "--run.num_steps", "3")
        assert done.code == 2 and "mine.py" in done.output  # a run goes on only with the judge it was begun with
        output = run_script("train_rl.py", *flags, "--run.resume_changed", "True", "--run.num_steps", "3")
        assert "from step 2" in output
    for row in rows[1:]:
        records = read_jsonl(run / "trajectories" / f"step_{row['step']:06d}.jsonl.gz")
        assert all(record["reward"] == pytest.approx(reward_of(record)) for record in records)
        assert row["reward/mean"] == pytest.approx(sum(map(reward_of, records)) / len(records))
        unclear = [record for record in records if record["reward_parts"]["judge/no_verdict"]]
        assert all(record["reward_parts"]["judge"] == record["reward_parts"]["accuracy"] for record in records)
        assert row["reward/judge/no_verdict"] == pytest.approx(len(unclear) / len(records))
    last = read_metrics(run)[-1]
    assert last["step"] == 3 and last["reward_reason/judge_unparsable"] > 0
    records = read_jsonl(run / "trajectories" / "step_000003.jsonl.gz")
    out = [record for record in records if record["reward"] is None]
    assert out and {record["reward_reason"] for record in out} == {"judge_unparsable"}
    assert all(record["advantage"] is None for record in out)
    assert last["group/effective_size"] == pytest.approx(8 * (1 - len(out) / len(records)))

    table = (ROOT / "docs" / "metrics.md").read_text()
    defined = [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.partition(" | ")[0])]
    logged = {name for row in read_metrics(run) for name in row if "letters" not in name and "judge" not in name}
    logged -= {"step"}
    assert [name for name in sorted(logged) if not any(fnmatch(name, pattern) for pattern in defined)] == []
