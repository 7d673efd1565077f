"""Six steps of RL while everything around the trainer breaks, which must not change one weight.

The storm is seeded. The search service fails, stalls and talks nonsense before it answers; sandbox hosts are killed
under their calls; a rank is killed and the run started again; the disk of the caches is full from early on. Each
failure can be survived: what a tool answers in the end is what it answers on a calm day. A second calm run has neither
service nor sandbox: it replays what the first one recorded.
"""

import itertools
import json
import os
import random
import signal
import sqlite3
import threading
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from helpers.kill import kill_at
from helpers.models import searching_model
from helpers.ranks import run_script, script_on_ranks, wait_for_all
from helpers.runs import learnt
from helpers.toy_run import build_toy_world
from helpers.web_service import WebService, found, half_an_answer, no_http_at_all, resets, says

SEED = 7
MOODS = [half_an_answer, no_http_at_all, resets, says("busy", 503), says("<html>oops</html>"), says({"result": 3}),
         says("slower", 429, Retry_After="0.05"), says("broken", 500, wait_s=0.3)]  # fmt: skip
PYTHON = f"{Path(__file__).resolve().parent.parent}/extras/tools/python.py:RecordedPython"
CONFIG = """
run: {num_steps: 6, validate_every: 3, save_every: 2, dir: @DIR@/runs}
model: {path: @DIR@/model, compute_dtype: float32, recompute_every_n_layers: 0}
data: {train: @DIR@/train.jsonl, valid: @DIR@/valid.jsonl, num_prompts_per_step: 4, max_prompt_tokens: 64}
engine: {dtype: float32, kv_cache_gib: 0.05, max_num_seqs: 32}
rollout: {group_size: 8, max_response_tokens: 96, max_tool_calls: 3, max_result_tokens: 28, answer_reserve_tokens: 8}
branching: {selector: arpo, num_initial_rollouts: 6, entropy_tokens: 4}
tools:
  names: ["@PYTHON@", search]
  search: {backend: http, requests_per_second: 0, deadline_s: 300}
reward: {file: @DIR@/reward.py}
update: {num_prompts_per_minibatch: 2, max_tokens_per_microbatch: 256}
optim: {lr: 1.0e-4}
"""
KILLED_AT_CALL = 70
"""Of rank 1's tool calls; the run then goes on from the last checkpoint."""


class Weather:
    """A search service that answers a query always alike, after as many failures as its mood wants."""

    def __init__(self, *, stormy: bool):
        self.stormy, self.tries, self.num_failures = stormy, {}, 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        query = json.dumps((await request.json())["queries"])
        number = self.tries[query] = self.tries.get(query, -1) + 1
        mood = random.Random(f"{SEED}|{query}")
        failures = mood.choices(MOODS, k=mood.randrange(1, 4)) if self.stormy else []  # a call has four tries
        if number < len(failures):  # only the first times: two ranks may ask the same at once
            self.num_failures += 1
            return await failures[number](request)
        return await found(f"{sum(query.encode()) % 97} e")(request)


def storm(victim_call: int, rank: int) -> None:
    """Break things inside a rank: sandbox hosts under their calls, the caches' disk, and rank 1 at a tool call."""
    from arpo.jail.host_process import HostProcess
    from arpo.tools.cache.store import CacheFile

    numbers, call, connect = itertools.count(1), HostProcess.call, CacheFile.connection

    def struck(host: HostProcess, *args):
        if next(numbers) % 25 == 0:  # so rarely that no call is hit in all of its attempts
            threading.Timer(0.005, os.kill, (host.pid, signal.SIGKILL)).start()
        return call(host, *args)

    def on_a_full_disk(cache: CacheFile) -> sqlite3.Connection:
        connection = connect(cache)
        connection.execute("PRAGMA max_page_count = 12")
        return connection

    HostProcess.call, CacheFile.connection = struck, on_a_full_disk
    if victim_call:
        kill_at("arpo.tools.base:ToolRunner.start", victim_call, 1, rank)


def weights_of(run: Path) -> bytes:
    return (run / "hf" / "model.safetensors").read_bytes()


def without_tools(run: Path) -> list[dict[str, float]]:
    """Return what was learnt; the tools' own metrics say how often they were tried and what a cache knew."""
    return [{name: value for name, value in row.items() if not name.startswith("tools/")} for row in learnt(run)]


@pytest.mark.slow
def test_a_storm_changes_no_weight(tmp_path):
    world = build_toy_world(tmp_path, CONFIG.replace("@PYTHON@", PYTHON))
    searching_model(world / "model", ("search", "python"))

    def flags(name: str, url: str, mode: str = "record") -> list[str]:
        flags = [str(world / "config.yaml"), "--run.name", name, "--tools.search.url", url]
        search, python = (f"{world}/{tool}_{name.partition('_')[0]}.sqlite" for tool in ("search", "python"))
        flags += ["--tools.search.cache", search, "--tools.search.mode", mode]
        return [*flags, "--tools.options", json.dumps({PYTHON: {"wall_s": 120, "cache": python, "mode": mode}})]

    with WebService([Weather(stormy=False)]) as service:
        run_script("train_rl.py", *flags("calm", service.url))
    run_script("train_rl.py", *flags("calm_replayed", service.url, mode="replay_strict"))

    output = ""
    with WebService([weather := Weather(stormy=True)]) as service:
        for call, code in ((KILLED_AT_CALL, -signal.SIGKILL), (0, 0)):
            prepare = partial(storm, call)
            with script_on_ranks("train_rl.py", *flags("storm", service.url), prepare=prepare) as (ranks, written):
                ended_with = wait_for_all(ranks, 5)
                output += written.read_text()
                assert ended_with == code, output[-6000:]
    assert weather.num_failures > 10
    first, _, resumed = output.rpartition("from step ")
    assert not resumed.startswith("0") and first
    for broken in ("the sandbox host was lost and has been replaced", "cannot write the cache"):
        assert broken in output, broken

    calm = world / "runs" / "calm"
    for name in ("storm", "calm_replayed"):
        assert without_tools(world / "runs" / name) == without_tools(calm), name
        assert weights_of(world / "runs" / name) == weights_of(calm), name
