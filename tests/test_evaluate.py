"""evaluate.py from end to end: benchmarks, kill -9 and resume, regrade, replay, judge, compare, bad input.

Generation is by real vLLM of a random tiny model, in processes of their own; what a random model never does (call tools
on purpose, answer right) is played by a scripted server, in this process.
"""

import json
import logging
import re
import shutil
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.eval_sets import write_sets
from helpers.fakes import byte_tokenizer
from helpers.kill import run_until_killed
from helpers.models import build_tiny_model
from helpers.processes import free_port
from helpers.ranks import PATIENCE_S, ROOT, run_script, script_on_ranks
from helpers.scripted_server import ScriptedServer
from helpers.vllm_serve import SERVER
from helpers.web_service import WebService, says

import evaluate
from arpo.errors import UserError
from arpo.evals.benchmarks import BENCHMARKS
from arpo.evals.records import read_records
from arpo.start.load import load_config

FLAGS = {
    "eval.benchmarks": "all", "eval.num_samples": "2", "eval.max_prompt_tokens": "2500", "tools.names": "python",
    "rollout.max_response_tokens": "48", "rollout.answer_reserve_tokens": "8", "engine.dtype": "float32",
    "engine.kv_cache_gib": "0.2", "engine.max_num_seqs": "16", "rollout.temperature": "1.0",
}  # fmt: skip


def flags_of(**changes: str) -> list[str]:
    flags = FLAGS | {name.replace("__", "."): value for name, value in changes.items()}
    if "eval.server" in flags:  # which has an engine of its own
        flags = {name: value for name, value in flags.items() if name not in ("engine.dtype", "engine.kv_cache_gib")}
    return [part for name, value in flags.items() for part in (f"--{name}", *value.split())]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A random model with room for the benchmarks' prompts, a tokenizer for the scripted server, the test sets."""
    folder = tmp_path_factory.mktemp("world")
    build_tiny_model(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    byte_tokenizer().save_pretrained(folder / "scripted")
    write_sets(folder / "sets")
    (folder / "corpus.jsonl").write_text('{"title": "otter", "text": "otters swim"}\n')
    rows = [{"question": f"q{i}?", "answer": "42", "data_source": "gsm8k"} for i in range(3)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "gaia.jsonl").write_text(json.dumps(rows[0]))
    return folder


def of_run(world: Path, name: str) -> list[str]:
    return ["--model.path", str(world / "model"), "--run.dir", str(world), "--run.name", name,
            "--eval.data_dir", str(world / "sets")]  # fmt: skip


def run(world: Path, name: str, *flags: str, ranks: int = 1) -> str:
    """What the evaluation prints."""
    return run_script("evaluate.py", *of_run(world, name), *flags, ranks=ranks)


@pytest.fixture(scope="module")
def whole(world) -> Path:
    """One run over two questions of each benchmark, one engine for all."""
    run(world, "whole", *flags_of())
    return world / "whole"


@pytest.fixture
def evaluate_here(monkeypatch):
    """evaluate.main in this process, for runs without an engine; it leaves no process group and no log behind."""
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    logger = logging.getLogger("arpo")
    handlers, level = list(logger.handlers), logger.level
    was_there = dist.is_initialized()  # the group of an engine that other tests share
    yield lambda *flags: evaluate.main(load_config(evaluate.EvalConfig, list(flags)))
    if dist.is_initialized() and not was_there:
        dist.destroy_process_group()
    logger.handlers[:], logger.level = handlers, level


def texts_of(run: Path) -> dict[tuple, str]:
    return {(r.benchmark, r.question_id, r.sample): r.trajectory.text for r in read_records(run)}


# ---- generation by vLLM


def test_every_benchmark_is_generated_graded_and_reported(whole):
    scores = json.loads((whole / "scores.json").read_text())
    assert list(scores) == list(BENCHMARKS)
    for name, s in scores.items():
        assert (s["questions"], s["samples"], s["trajectories"]) == (2, 2, 4)
        assert s["metric"] == {"math": "math_equal", "qa": "f1"}[BENCHMARKS[name].grader]
    assert set(scores["gaia"]["splits"]) == {"level 2"} and set(scores["hle"]["splits"]) == {"Math"}
    assert "No judge" in (whole / "report.md").read_text()
    records = read_records(whole)
    assert len(records) == 14 * 2 * 2 and len({r.trajectory.text for r in records}) > 50
    assert all(0 < len(r.trajectory.token_ids) <= 48 and r.wall_s >= 0 for r in records)


@pytest.mark.slow
def test_a_run_killed_with_9_continues_on_two_ranks_and_generates_nothing_twice(whole, world):
    """Each trajectory has its own random stream, so the result is that of the run that was left alone."""
    flags = *of_run(world, "killed"), *flags_of(engine__max_num_seqs="2")
    dumps, deadline = world / "killed" / "trajectories", time.monotonic() + PATIENCE_S
    with script_on_ranks("evaluate.py", *flags, ranks=1) as ([process], output):
        while sum(path.read_text().count("\n") for path in dumps.glob("*.jsonl")) < 10:
            assert process.is_alive() and time.monotonic() < deadline, output.read_text()
            time.sleep(0.005)
    finished = {path: path.read_bytes() for path in dumps.glob("*.jsonl")}
    assert 10 <= len(read_records(world / "killed")) < 56 and not (world / "killed" / "scores.json").exists()
    with (dumps / "xbench.0.jsonl").open("ab") as torn:
        torn.write(b'{"benchmark": "xbe')

    output = run(world, "killed", *flags_of(), ranks=2)
    assert "2 of them finished before" in output and (dumps / "xbench.2.jsonl").exists()
    whole_lines = [line for path in dumps.glob("*.jsonl") for line in path.read_bytes().splitlines(keepends=True)]
    assert sum(line.endswith(b"\n") for line in whole_lines) == 56  # else a trajectory was generated twice
    assert all(path.read_bytes().startswith(before) for path, before in finished.items())
    assert texts_of(world / "killed") == texts_of(whole)


@pytest.mark.slow
def test_ranks_that_pull_their_questions_generate_the_same_also_after_a_kill_at_the_queue(whole, world):
    flags = [*of_run(world, "pulled"), *flags_of(rollout__dispatch="pull", engine__max_num_seqs="4")]
    run_until_killed(("arpo.sampling.sources:OneRollout.pull", 5, 1), "evaluate.py", *flags)
    run_script("evaluate.py", *flags, ranks=2)
    assert texts_of(world / "pulled") == texts_of(whole)
    dumps = (world / "pulled" / "trajectories").glob("*.jsonl")
    assert {path.name.split(".")[-2] for path in dumps} == {"0", "1"}  # who took what, the machine decides


def test_a_finished_run_is_reported_again_without_loading_the_model(whole, world):
    before = (whole / "scores.json").read_bytes()
    shutil.rmtree(whole / "grades")
    output = run(world, "whole", *flags_of(engine__kv_cache_gib="0.000001"))  # an engine could not start
    assert output.count("2 questions, 2 of them finished before") == 14
    assert output.startswith("1 rank on the CPU (1 thread each), torch ")
    assert (whole / "scores.json").read_bytes() == before and (whole / "grades" / "gaia.jsonl").exists()


def test_regrading_needs_no_model_and_gives_the_same_to_the_digit(whole, evaluate_here):
    before = {name: (whole / name).read_bytes() for name in ("scores.json", "report.md")}
    for name in before:
        (whole / name).unlink()
    evaluate_here(str(whole / "config.yaml"), "--model.path", "/nonexistent", "--eval.regrade", str(whole))
    assert {name: (whole / name).read_bytes() for name in before} == before


# ---- generation by a scripted server: calls and right answers


def script(_prompt, _trajectory, turn: int) -> str:
    return [
        "<think>t</think><search>otter</search>",
        "<think>t</think><python>import random; print(random.random())</python>",
        "<think>t</think><answer>\\boxed{42}</answer>",
    ][turn]


@pytest.fixture
def server():
    with ScriptedServer(script, max_model_len=10**6) as running:
        yield running


def server_flags(world: Path, server: WebService, name: str, **changes: str) -> list[str]:
    changes = {
        "eval__server": f"{SERVER}={server.url.removesuffix('/retrieve')}", "model__path": str(world / "scripted"),
        "run__dir": str(world), "run__name": name, "eval__data_dir": str(world / "sets"),
        "tools__names": "python search", "tools__search__backend": "local",
        "tools__search__corpus": str(world / "corpus.jsonl"),
        "rollout__max_response_tokens": "900",
    } | changes  # fmt: skip
    return flags_of(**changes)


def without_times(scores: dict) -> dict:
    """What a replay must give to the digit: everything but seconds, and whether a cache answered."""
    for s in scores.values():
        s.pop("seconds")
        for tool in s["tools"].values():
            tool.pop("seconds"), tool.pop("cached_share")
    return scores


def test_a_replay_runs_no_tool_and_gives_the_same_table(world, server, evaluate_here, tmp_path):
    own = {"eval__benchmarks": "gsm8k gaia", "eval__files": str(world / "own.jsonl")}
    python = f"{ROOT}/extras/tools/python.py:RecordedPython"
    caches = {
        "tools__names": f"{python} search", "tools__search__cache": str(tmp_path / "s.sqlite"),
        "tools__options": json.dumps({python: {"cache": str(tmp_path / "p.sqlite")}}, separators=(",", ":")),
    }  # fmt: skip
    evaluate_here(*server_flags(world, server, "live", **own, **caches))
    first = read_records(world / "live")
    assert len(first) == 7 * 2 and {r.metric for r in first} == {"math", "qa", "reward"}
    for record in first:
        assert [(call.tag, call.ok) for call in record.trajectory.tool_calls] == [("search", True), ("python", True)]
        assert record.trajectory.text.endswith("\\boxed{42}</answer>") and "otters swim" in record.trajectory.text

    options = {python: {"cache": str(tmp_path / "p.sqlite"), "mode": "replay_strict"}}
    strict = {"tools__search__mode": "replay_strict", "tools__options": json.dumps(options, separators=(",", ":"))}
    evaluate_here(*server_flags(world, server, "replayed", **own | caches | strict))
    second = read_records(world / "replayed")
    assert [r.trajectory.text for r in second] == [r.trajectory.text for r in first]  # random.random() and all
    assert all(call.cached for r in second for call in r.trajectory.tool_calls)
    old, new = (json.loads((world / name / "scores.json").read_text()) for name in ("live", "replayed"))
    assert old["own"]["accuracy"] == 1.0 and old["own"]["reward"] == pytest.approx(1.1)
    assert without_times(new) == without_times(old)


def test_the_report_says_what_was_asked_of_which_model_and_what_was_left_out(world, server, evaluate_here, tmp_path):
    questions = [{"question": "q?" * length, "answer": "42", "data_source": "gsm8k"} for length in (1, 2, 2000)]
    (tmp_path / "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    changes = {"eval__benchmarks": "gsm8k", "eval__files": str(tmp_path / "lengths.jsonl"), "eval__overlong": "drop"}
    flags = server_flags(world, server, "about", **changes, rollout__temperature="0.5")
    evaluate_here(*flags)
    folder = world / "about"
    text = (folder / "report.md").read_text()
    assert text.startswith("# about\n\n- Model: ") and "| lengths | 2 (1 left out) | 2 |" in text
    assert "not recorded" not in text
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "grades", "report.md", "scores.json", "sessions.jsonl", "trajectories"}
    evaluate_here(*flags)  # nothing is left to ask: no session, and the same report to the letter
    assert len((folder / "sessions.jsonl").read_text().splitlines()) == 1 and (folder / "report.md").read_text() == text


def test_the_control_with_muted_tools_asks_the_same_questions_and_is_in_no_average(
    world, server, evaluate_here, tmp_path
):
    (tmp_path / "mine.py").write_text(
        "def compute_score(trajectory, prompt):\n"
        "    assert prompt.prompt_id.startswith('own'), 'benchmarks have graders of their own'\n"
        "    return {'score': 1, 'accuracy': 1}\n"
    )
    flags = {"eval__benchmarks": "gsm8k math500", "eval__files": str(world / "own.jsonl")}
    flags["reward__file"] = f"{tmp_path}/mine.py"
    evaluate_here(*server_flags(world, server, "muted", **flags, eval__num_muted="1"))
    records = read_records(world / "muted")
    muted = [r for r in records if r.benchmark.endswith("_muted")]
    assert sorted((r.benchmark, r.metric) for r in muted) == sorted(
        2 * [("gsm8k_muted", "math"), ("math500_muted", "math"), ("own_muted", "reward")]
    )
    assert {call.error_kind for r in muted for call in r.trajectory.tool_calls} == {"muted"}
    assert all(call.ok for r in records if r not in muted for call in r.trajectory.tool_calls)
    asked = {r.question for r in records if r.benchmark == "own"}
    assert len(asked) == 3 and {r.question for r in muted if r.benchmark == "own_muted"} < asked
    report = (world / "muted" / "report.md").read_text()
    assert "SET_muted: all tool calls were refused." in report
    assert "| mean of 2 (math) |" in report and "| mean of 3 (all) |" in report and "| own_muted | 1 | 2 |" in report
    evaluate_here(*server_flags(world, server, "muted", **flags, eval__num_muted="2"))  # goes on with one more
    again = read_records(world / "muted")
    assert sum(r.benchmark == "own_muted" for r in again) == 4 and sum(r.benchmark == "own" for r in again) == 6


def test_a_judge_is_asked_once_for_each_answer_and_never_again(world, server, evaluate_here):
    reply = {"choices": [{"message": {"content": "The same. <judgment>Correct</judgment>"}}]}
    with WebService([says(reply)]) as judge:
        asked = {"judge__url": judge.url, "judge__model": "j", "eval__benchmarks": "gsm8k gaia"}
        evaluate_here(*server_flags(world, server, "judged", **asked))
        scores = json.loads((world / "judged" / "scores.json").read_text())
        assert (scores["gaia"]["metric"], scores["gaia"]["accuracy"]) == ("judge", 1.0)
        assert scores["gsm8k"]["metric"] == "math_equal"
        num_asked = sum(b"zip code" in r.body for r in judge.requests)
        assert num_asked == 2  # one for each question, whose samples say the same
        evaluate_here(str(world / "judged" / "config.yaml"), "--eval.regrade", str(world / "judged"))
        assert sum(b"zip code" in r.body for r in judge.requests) == num_asked
        assert json.loads((world / "judged" / "scores.json").read_text()) == scores


def test_a_run_that_its_server_left_continues_with_the_next_one(world, evaluate_here):
    with ScriptedServer(script, max_model_len=10**6) as first:

        async def dies_after_ten(request):
            if len(first.requests) > 30:
                first.plan = [says({"error": "out of memory"}, 400)]
                return await first.plan[0](request)
            return await first.answer(request)

        first.plan = [dies_after_ten]
        flags = {"eval__benchmarks": "qa", "engine__max_num_seqs": "2", "tools__names": "search"}
        with pytest.raises(UserError, match="what is finished is saved"):
            evaluate_here(*server_flags(world, first, "left", **flags))
    done = read_records(world / "left")
    assert 0 < len(done) < 20
    with ScriptedServer(script, max_model_len=10**6) as second:
        evaluate_here(*server_flags(world, second, "left", **flags))
        assert len(second.requests) - 2 <= 3 * (20 - len(done))
    assert len(read_records(world / "left")) == 20


def test_questions_that_an_outage_cut_off_are_asked_again_by_the_same_command(world, server, evaluate_here, tmp_path):
    (tmp_path / "web.py").write_text(
        "from pathlib import Path\nfrom arpo.tools.base import ToolResult\n"
        "class Search:\n"
        "    tag = 'search'\n"
        "    async def run(self, argument):\n"
        f"        return ToolResult(Path({str(tmp_path)!r}, argument).read_text(), ok=True)\n"
    )
    flags = {"eval__benchmarks": "gsm8k", "tools__names": f"python {tmp_path}/web.py:Search", "eval__num_muted": "1"}
    flags = [
        f for f in server_flags(world, server, "outage", **flags) if not re.match(r"--tools.search|local|.*corpus", f)
    ]
    evaluate_here(*flags)
    lines = (world / "outage" / "report.md").read_text().splitlines()
    [note] = [line for line in lines if "infrastructure" in line]
    assert note.startswith("- 4 trajectories were cut off by an infrastructure error (the same command asks again)")
    (tmp_path / "otter").write_text("otters swim")
    server.requests.clear()
    evaluate_here(*flags)
    assert sum(b'"seed"' in r.body for r in server.requests) == 4 * 3  # none of the muted set
    assert "infrastructure" not in (world / "outage" / "report.md").read_text()
    records = read_records(world / "outage")
    assert len(records) == 4 + 2 and all(r.trajectory.text.endswith("\\boxed{42}</answer>") for r in records)


# ---- bad input: one line, before anything is generated


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"eval__server": f"{SERVER}=http://127.0.0.1:9"}, r"eval\.server: cannot reach http://127\.0\.0\.1:9/v1"),
        ({"eval__server": SERVER}, r"eval\.server=.* must be FILE\.py:NAME=ADDRESS"),
        ({"eval__server": "http://127.0.0.1:9"}, r"eval\.server=http://127.0.0.1:9 must be FILE\.py:NAME=ADDRESS"),
        ({"eval__server_model": "big"}, "does not serve 'big'"),
        ({"judge__url": "http://127.0.0.1:9/v1/chat/completions", "judge__model": "j"}, r"judge\.url"),
        ({"tools__search__mode": "replay_strict"}, r"tools\.search\.cache is empty, and mode replay_strict reads it"),
        ({"eval__num_muted": "-1"}, "num_muted=-1 must be at least 0"),
        ({"eval__max_prompt_tokens": "10"}, "exceed max_prompt_tokens=10"),
        ({"eval__benchmarks": "gaia", "eval__files": "@WORLD@/gaia.jsonl"}, "gaia.jsonl has the name of another set"),
    ],
)
def test_bad_input_is_found_before_anything_is_generated(world, server, evaluate_here, changes, words, tmp_path):
    changes = {name: value.replace("@WORLD@", str(world)) for name, value in changes.items()}
    with pytest.raises(UserError, match=words):
        evaluate_here(*server_flags(world, server, "bad", **{"run__dir": str(tmp_path)} | changes))
    assert not list(tmp_path.rglob("trajectories/*.jsonl"))
    assert not any(b'"seed"' in r.body for r in server.requests)


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "nothing to evaluate; pass eval.benchmarks"),
        (["--eval.files", "x", "--eval.num_samples", "0"], "must be at least 1"),
        (["--eval.regrade", "/nowhere"], "is /nowhere the folder of an evaluation"),
    ],
)
def test_bad_flags_are_one_line(flags, words, evaluate_here):
    with pytest.raises(UserError, match=words):
        evaluate_here(*flags)
