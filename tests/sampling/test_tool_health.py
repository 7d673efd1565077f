"""When a batch is too damaged by failing tools to be trained on, and when to give up."""

import json
from pathlib import Path

import pytest
from helpers.files import read_jsonl
from helpers.models import searching_model
from helpers.ranks import run_script, try_script
from helpers.toy_run import build_toy_world

from arpo.errors import Outage
from arpo.log import read_metrics
from arpo.sampling.health import ToolHealth
from arpo.trajectory import Group, Prompt, StopReason, ToolCall, Trajectory, Turn


def batch(num_failed: int, reason: StopReason = StopReason.ERROR) -> list[Group]:
    """A hundred trajectories in groups of ten."""
    reasons = [reason] * num_failed + [StopReason.EOS] * (100 - num_failed)
    prompt = Prompt("p", messages=[], answers=["1"])
    trajectories = [Trajectory("p", str(i), stop_reason=reason) for i, reason in enumerate(reasons)]
    return [Group(prompt, trajectories[i : i + 10]) for i in range(0, 100, 10)]


@pytest.mark.parametrize(
    ("groups", "failed_share", "trains"),
    [
        (batch(0), 0, True),
        (batch(5), 0.05, True),
        (batch(6), 0.06, False),
        (batch(100), 1, False),
        (batch(10, StopReason.TOOL_LIMIT), 0, True),  # through their own doing
        ([], 0, True),
    ],
    ids=["0", "5", "6", "100", "limits", "empty"],
)
def test_more_than_five_percent_of_failed_trajectories_skip_the_update(groups, failed_share, trains):
    health = ToolHealth()
    verdict = health.judge(groups)
    assert verdict.may_train is trains and verdict.failed_share == failed_share and not health.must_stop


def test_the_prompts_of_the_bad_batches_that_end_a_run_come_again():
    """8 prompts a step; the one bad batch before the good one was given up, as its run went on."""
    health, places = ToolHealth(), []
    for first, num_failed in zip(range(0, 48, 8), (20, 0, 20, 20, 34), strict=False):
        health.judge(batch(num_failed), first)
        places.append(health.num_drawn_on_resume(first + 8))
    assert places == [8, 16, 24, 32, 16]


# ---- searches for which nothing is recorded


MISS = ToolCall("search", "q", "Error", ok=False, error_kind="not_recorded")
FOUND = ToolCall("search", "q", "text", ok=True, cached=True)
REFUSED = ToolCall("search", "q", "Error", ok=False, error_kind="limit", executed=False)
SILENT = ToolCall("search", "", "Error", ok=False, error_kind="empty_query")
WRONG_CODE = ToolCall("python", "1/0", "ZeroDivisionError", ok=False, error_kind="error")
UNRECORDED_CODE = ToolCall("python", "1", "Error", ok=False, error_kind="not_recorded")


def calls(*made: ToolCall, inherited: tuple[ToolCall, ...] = ()) -> list[Group]:
    """One group, whose one trajectory made these calls after those that it has from its parent."""
    turns = [Turn(0, tool_calls=[call], inherited=True) for call in inherited]
    turns += [Turn(0, tool_calls=[call]) for call in made]
    prompt = Prompt("p", messages=[], answers=["1"])
    return [Group(prompt, [Trajectory("p", "0", turns=turns, stop_reason=StopReason.EOS)])]


@pytest.mark.parametrize(
    ("groups", "missed_share", "trains"),
    [
        (calls(), 0, True),
        (calls(*[FOUND] * 10), 0, True),
        (calls(*[MISS] * 2, *[FOUND] * 8), 0.2, True),  # not more than 20 %
        (calls(*[MISS] * 21, *[FOUND] * 79), 0.21, False),
        (calls(MISS), 1, False),
        (calls(MISS, MISS, *[FOUND] * 6, *[REFUSED] * 9), 0.25, False),  # what was not run missed nothing
        (calls(MISS, *[SILENT] * 4), 0.2, True),
        (calls(*[FOUND] * 4, inherited=(MISS,) * 9), 0, True),  # the parent's calls, which count there
        (calls(MISS, *[WRONG_CODE] * 99, FOUND), 0.5, False),  # of the searches, not of the calls
        (calls(*[WRONG_CODE] * 99), 0, True),
        (calls(*[UNRECORDED_CODE] * 99), 0, True),
    ],
)  # fmt: skip
def test_more_than_a_fifth_of_searches_without_a_recorded_result_skips_the_update(groups, missed_share, trains):
    health = ToolHealth()
    verdict = health.judge(groups)
    assert verdict.may_train is trains
    assert verdict.missed_share == pytest.approx(missed_share) and not health.must_stop
    assert ("this batch is not trained on" in verdict.warning) is not trains


FEW, MANY, NONE = calls(MISS, *[FOUND] * 9), calls(MISS, FOUND), calls(FOUND)


def test_few_misses_are_said_once_and_every_bad_batch_is_said():
    health, said = ToolHealth(), []
    for groups in (NONE, FEW, FEW, MANY, MANY, FEW, NONE):
        said.append(health.judge(groups).warning)
    assert [bool(text) for text in said] == [False, True, False, True, True, False, False]
    assert "10.0% of the searches" in said[1] and "is trained on it" in said[1]
    assert "50.0% of the searches" in said[3] and "not trained on" in said[3]
    verdict = health.judge(batch(num_failed=34))
    assert "not trained on: tools failed in 34% of the trajectories" in verdict.warning


@pytest.mark.parametrize(
    ("batches", "is_outage", "words"),
    [
        ([batch(20), batch(20), batch(0), batch(20), batch(20), batch(34)], True,
         ["34% of the trajectories, in 3 batches in a row"]),
        # no later start finds more in the recorded results
        ([MANY, MANY, FEW, MANY, batch(20), MANY], False,
         ["50.0% of the searches are not in the recorded results, in 3 batches in a row; ", "a key", "a retriever",
          "a corpus", "continues from the checkpoint"]),
    ],
    ids=["failures", "misses"],
)  # fmt: skip
def test_three_bad_batches_in_a_row_end_the_run_with_the_reason_and_the_alternatives(batches, is_outage, words):
    health, stops = ToolHealth(), []
    for groups in batches:
        health.judge(groups)
        stops.append(health.must_stop)
    assert stops == [False, False, False, False, False, True]
    error = health.stop_error()
    assert isinstance(error, Outage) is is_outage
    assert all(word in str(error) for word in words) and "\n" not in str(error)


ROOT = Path(__file__).resolve().parents[2]
SEARCHING = """
run: {name: replayed, num_steps: 4, save_every: 0, dump_every: 1, dir: @DIR@/runs}
model: {path: @DIR@/model, compute_dtype: float32, recompute_every_n_layers: 0}
data: {train: @DIR@/train.jsonl, num_prompts_per_step: 4, max_prompt_tokens: 64}
engine: {dtype: float32, kv_cache_gib: 0.05, max_num_seqs: 32}
rollout: {group_size: 4, max_response_tokens: 160, max_tool_calls: 2, max_result_tokens: 64, answer_reserve_tokens: 8}
branching: {selector: arpo, num_initial_rollouts: 3, entropy_tokens: 4}
tools:
  names: [search]
  search: {backend: replay, cache: "@ROOT@/extras/cache/released.py:ReleasedCache=@DIR@/search_cache.json"}
reward: {file: @DIR@/reward.py}
update: {num_prompts_per_minibatch: 2, max_tokens_per_microbatch: 256}
"""


@pytest.mark.slow
def test_a_real_run_whose_searches_miss_is_stopped_untrained_and_goes_on_with_a_corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache_home"))
    world = build_toy_world(tmp_path, SEARCHING.replace("@ROOT@", str(ROOT)))
    searching_model(world / "model")
    (world / "search_cache.json").write_text(json.dumps({"who wrote the book": "Page 1: nobody"}))
    done = try_script("train_rl.py", str(world / "config.yaml"))
    errors = [line for line in done.output.splitlines() if line.startswith("error")]
    assert done.code == 2 and len(errors) == 1 and "Traceback" not in done.output, done.output[-4000:]
    assert "% of the searches are not in the recorded results, in 3 batches in a row" in errors[0]
    assert "step 1: warning: this batch is not trained on: " in done.output
    run = world / "runs" / "replayed"
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert not any("optim/grad_norm" in row for row in rows)  # nothing was learned of the misses
    assert all(row["tools/search/failed_not_recorded"] > 0.2 * row["tools/search/calls"] > 0 for row in rows)
    kinds = {
        call["error_kind"]
        for record in read_jsonl(run / "trajectories" / "step_000001.jsonl.gz")
        for turn in record["turns"]
        for call in turn["tool_calls"]
    }
    assert "not_recorded" in kinds  # what the model read

    corpus = ["--tools.search.backend", "local", "--tools.search.corpus", str(world / "corpus.jsonl")]
    corpus += ["--tools.search.cache", "", "--run.resume_changed", "True"]  # as the line that ended the run says
    assert "run.resume_changed True" in errors[0]
    output = run_script("train_rl.py", str(world / "config.yaml"), *corpus)
    assert "from step 3" in output and "not trained on" not in output
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    asked = [{r["prompt_id"] for r in read_jsonl(run / "trajectories" / f"step_00000{n}.jsonl.gz")} for n in (1, 2, 4)]
    assert asked[2] == asked[0] != asked[1]  # what taught nothing is asked again
    assert read_metrics(run)[-1]["optim/grad_norm"] >= 0
