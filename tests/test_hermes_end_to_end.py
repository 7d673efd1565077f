"""The three scripts with calls in JSON, from SFT to a report, on tiny models that call real Python."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers.calling_model import DIALOGUES, build_calling_model, conversation
from helpers.edits import ROOT
from helpers.files import read_jsonl, write_jsonl
from helpers.ranks import run_script, script_on_ranks, try_script, wait_for_all
from helpers.vllm_serve import SERVER, serving

from arpo.evals.records import read_records
from arpo.log import read_metrics
from arpo.protocol import form_of

pytestmark = pytest.mark.slow
PYTHON = f"{Path(__file__).resolve().parent.parent}/extras/tools/python.py:RecordedPython"
CONFIG = """
run: {dir: @DIR@/runs}
model: {path: @DIR@/model, compute_dtype: float32, recompute_every_n_layers: 0}
protocol: {format: @FORMAT@}
train_sft:
  run: {name: sft, num_steps: 1}
  data: {train: @DIR@/sft.jsonl, num_conversations_per_step: 3, max_tokens: 800, max_tokens_per_microbatch: 800}
train_rl:
  run: {name: rl, num_steps: 1, validate_every: 0, dump_every: 1}
  data: {train: @DIR@/questions.jsonl, num_prompts_per_step: 3, max_prompt_tokens: 400}
  rollout: {group_size: 4, max_response_tokens: 400, max_result_tokens: 200, answer_reserve_tokens: 40}
  branching: {selector: random, num_initial_rollouts: 2}
  engine: {dtype: float32, kv_cache_gib: 0.1, max_num_seqs: 16}
  tools: {search: {backend: local, corpus: @DIR@/corpus.jsonl, mode: live}}
  reward: {bonus_tools: [python]}
  loss: {entropy_coefficient: 1.0e-3}  # the answers of a question are all right, so the rewards alone teach nothing
  update: {num_prompts_per_minibatch: 3, max_tokens_per_microbatch: 1600}
evaluate:
  eval: {files: [@DIR@/questions.jsonl], max_prompt_tokens: 400}
  rollout: {max_response_tokens: 400, max_result_tokens: 200, answer_reserve_tokens: 40, temperature: 0}
  tools:
    search: {backend: local, corpus: @DIR@/corpus.jsonl, cache: @DIR@/search.sqlite}
    names: ["@PYTHON@", search]
    options: [{"@PYTHON@": {cache: @DIR@/python.sqlite}}]
""".replace("@PYTHON@", PYTHON)


LLAMA = f"{ROOT}/extras/llama.py:LLAMA"


@pytest.fixture(scope="module", params=["hermes", LLAMA])
def protocol(request):
    return request.param


@pytest.fixture(scope="module")
def world(tmp_path_factory, protocol):
    folder, family = tmp_path_factory.mktemp("world"), {"hermes": "qwen3", LLAMA: "llama3_1"}[protocol]
    build_calling_model(folder / "model", family=family)
    write_jsonl(folder / "sft.jsonl", [{"messages": conversation(question, family)} for question in DIALOGUES])
    write_jsonl(folder / "questions.jsonl", [{"question": question, "answer": "42"} for question in DIALOGUES])
    (folder / "corpus.jsonl").write_text(json.dumps({"title": "t", "text": "text"}))
    (folder / "config.yaml").write_text(CONFIG.replace("@DIR@", str(folder)).replace("@FORMAT@", protocol))
    return folder


@pytest.fixture(scope="module")
def exported(world) -> Path:
    """The model after SFT."""
    run_script("train_sft.py", str(world / "config.yaml"), ranks=1)
    return world / "runs" / "sft" / "hf"


def test_sft_learns_what_the_model_already_knows(world, exported):
    """Its rows are the conversations that the model has learnt to say, so there is next to nothing to learn."""
    [first] = [row["loss/nll"] for row in read_metrics(world / "runs" / "sft") if "loss/nll" in row]
    assert first < 0.05


def test_rl_trains_on_calls_of_real_python(world, protocol):
    run_script("train_rl.py", str(world / "config.yaml"), ranks=1)
    [row] = [row for row in read_metrics(world / "runs" / "rl") if row["step"] == 1]
    assert abs(row["mismatch/kl"]) < 1e-5 and row["reward/solved_share"] > 0 and row["tools/python/calls"] >= 6
    dumped = list(read_jsonl(world / "runs" / "rl" / "trajectories" / "step_000001.jsonl.gz"))
    most = max(len(turn["tool_calls"]) for row in dumped for turn in row["turns"])
    assert most == {"hermes": 2, LLAMA: 1}[protocol]
    done = try_script("train_rl.py", str(world / "config.yaml"), "--protocol.format", "tags", ranks=1)
    assert done.code == 2 and f"was begun with protocol.format={protocol}, and now it is tags" in done.output


def records(world, name: str) -> list[tuple]:
    found = sorted(read_records(world / "runs" / name), key=lambda r: r.question)
    return [
        (r.question, r.protocol, r.trajectory.text, [(c.tag, c.ok) for c in r.trajectory.tool_calls]) for r in found
    ]


@pytest.fixture(scope="module")
def own(world, exported, protocol) -> list[tuple]:
    """The records of an evaluation of what SFT exported, on an engine of its own."""
    form_of(protocol)  # as evaluate.py does by its option: records may name no other
    flags = ["--model.path", str(exported), "--engine.dtype", "float32", "--engine.kv_cache_gib", "0.1"]
    run_script("evaluate.py", str(world / "config.yaml"), "--run.name", "own", *flags, ranks=1)
    return records(world, "own")


def test_evaluation_answers_with_calls_of_real_python(own, world, protocol):
    assert {recorded for _, recorded, *_ in own} == {protocol}
    assert [calls for *_, calls in own] == [
        [("unknown", False), ("python", True)], [("python", True)], [("python", True)] * 2,
    ]  # fmt: skip
    scores = json.loads((world / "runs" / "own" / "scores.json").read_text())["questions"]
    assert scores["accuracy"] == 1.0 and scores["well_formed"] == pytest.approx(2 / 3)


ONE_FORM = pytest.mark.parametrize("protocol", ["hermes"], indirect=True)
"""For what knows of forms only by the codec, which the other tests run with each."""


@ONE_FORM
def test_evaluation_on_a_server_and_from_records_agrees_with_that_on_an_engine(own, exported, world):
    with serving(exported, max_model_len=1000) as url:
        flags = [str(world / "config.yaml"), "--model.path", str(exported), "--eval.server", f"{SERVER}={url}"]
        run_script("evaluate.py", *flags, "--run.name", "served", ranks=1)
        python = {PYTHON: {"cache": str(world / "python.sqlite"), "mode": "replay_strict"}}
        strict = ["--tools.search.mode", "replay_strict", "--tools.options", json.dumps(python)]
        run_script("evaluate.py", *flags, "--run.name", "replayed", *strict, ranks=1)
    assert own == records(world, "served") == records(world, "replayed")


def typing(file: Path, rank: int) -> None:
    sys.stdin = file.open()


@ONE_FORM
def test_questions_are_answered_line_by_line_and_one_that_is_too_long_costs_nothing_else(world):
    typed = "one call\n\n" + "call " * 2000 + "\na wrong call\n"
    (world / "typed").write_text(typed)

    with script_on_ranks(
        "extras/ask.py", str(world / "config.yaml"), ranks=1, prepare=partial(typing, world / "typed")
    ) as (processes, output):
        assert wait_for_all(processes, 30) == 0, output.read_text()
        shown = output.read_text()

    one, rest = shown.split("the question: ")
    assert "print(6 * 7)" in one and "boxed{42}" in one
    assert rest.startswith("1 of 1 prompts exceed max_prompt_tokens=400")
    assert rest.count("print(6 * 7)") >= 2 and rest.rstrip().endswith("boxed{42}.")
    assert "\x1b" not in shown  # colours are for terminals
