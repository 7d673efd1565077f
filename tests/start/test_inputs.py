"""What the files of a config are asked before torch is imported, in one line each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.files import write_jsonl

from arpo.errors import UserError
from arpo.evals.inputs import check_evaluation
from arpo.sft.inputs import check_sft
from arpo.start.inputs import NUM_ROWS, check_rl
from arpo.start.load import load_config
from evaluate import EvalConfig
from train_rl import RLConfig
from train_sft import SFTConfig

ROOT = Path(__file__).resolve().parents[2]
QUESTION = {"prompt": "1 + 1?", "answer": "2"}
TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
HUB = ["--model.path", "Qwen/Qwen2.5-7B-Instruct"]  # the Hub is asked last
CHECKS = {SFTConfig: check_sft, RLConfig: check_rl, EvalConfig: check_evaluation}
GOOD = ["--data.train", "good.jsonl"]
PYTHON = ["--tools.names", "python"]
FILES = ["--eval.files", "good.jsonl"]
SHORT = ["--rollout.max_response_tokens", "128", "--rollout.answer_reserve_tokens", "16"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("good.jsonl"), [QUESTION])
    write_jsonl(Path("talks.jsonl"), [TALK])
    write_jsonl(Path("columns.jsonl"), [{"text": "1 + 1?"}] * 3)
    write_jsonl(Path("offers.jsonl"), [QUESTION | {"tools": ["pyhton"]}])
    Path("model").mkdir()
    Path("t.py").write_text(
        "class Tool: ...\nclass Plain:\n    tag = 'p'\n    def run(self, text): ...\n"
        "class Two(Plain):\n    async def run(self, query, top_k): ...\n"
        "class Selfless(Plain):\n    async def run(text): ...\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("root", "flags", "words"),
    [
        (RLConfig, ["--data.train", "absent.jsonl"], "absent.jsonl: cannot read the file"),
        (RLConfig, ["--data.train", "columns.jsonl"], "columns.jsonl:1: .*question.*all of the first 3"),
        (RLConfig, ["--data.train", "offers.jsonl"], "offers the tool 'pyhton'.*did the row mean 'python'"),
        (RLConfig, [*GOOD, "--data.valid", "talks.jsonl"], "talks.jsonl:1: "),
        (RLConfig, [*GOOD, "--reward.file", "r.py"], "reward.file=r.py:compute_score: there is no"),
        (RLConfig, [*GOOD, "--tools.names", "pyton"], "tools.names='pyton' is unknown; did you mean 'python'"),
        (RLConfig, [*GOOD, "--tools.names", "python", "t.py:Tool"], "t.py:Tool is no tool: a class with"),
        (RLConfig, [*GOOD, "--tools.names", "t.py:Plain"], "Plain: run must be a coroutine"),
        # a call would cost its trajectory each time, with a traceback
        (RLConfig, [*GOOD, "--tools.names", "t.py:Two"], "Two: missing a required argument: 'top_k'; write `async def"),
        (RLConfig, [*GOOD, "--tools.names", "t.py:Selfless"], "Selfless: too many positional arguments; write `async"),
        (RLConfig, [*GOOD, "--model.path", "model"], "model.path=model: no config.json"),
        (RLConfig, [*GOOD, "--model.path", "./none"], "model.path=./none: no such folder"),
        # Flux159/mcp-server-kubernetes PR 356: a name that nothing has was accepted, and had no effect
        (
            RLConfig,
            [*GOOD, *PYTHON, "--rollout.max_calls_per_tool", "pyton=3"],
            "max_calls_per_tool: no tool 'pyton' in",
        ),
        (
            RLConfig,
            [*GOOD, *PYTHON, "--reward.bonus_tools", "search", "calc"],
            "no tool 'calc' in tools.names; .* python$",
        ),
        (
            EvalConfig,
            [*FILES, *PYTHON, "--rollout.max_calls_per_tool", "serach=9"],
            "max_calls_per_tool: no tool 'serach'",
        ),
        (SFTConfig, GOOD, "good.jsonl:1: needs a list 'conversations'"),
        (SFTConfig, ["--data.train", "talks.jsonl", "--data.valid", "x.xlsx"], "x.xlsx: unknown file type '.xlsx'"),
        (EvalConfig, ["--eval.files", "absent.jsonl"], "absent.jsonl: cannot read the file"),
        (EvalConfig, ["--eval.benchmarks", "gaia"], "gaia needs .*, which is not there"),
        (EvalConfig, ["--eval.files", "columns.jsonl"], "columns.jsonl:1: "),
    ],
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(folder, root, flags, words):
    with pytest.raises(UserError, match=words) as error:
        CHECKS[root](load_config(root, [*HUB, *flags]))
    assert "\n" not in str(error.value)


def test_files_that_can_be_used_pass_and_validation_on_the_training_data_is_told(folder, tiny_model_dir, capsys):
    model = ["--model.path", str(tiny_model_dir)]
    short = ["--data.max_prompt_tokens", "64", *SHORT, *PYTHON]
    check_rl(load_config(RLConfig, [*model, *short, *GOOD, "--data.valid", "good.jsonl"]))
    assert capsys.readouterr().out.startswith("warning: data.valid=good.jsonl is the training data")
    check_sft(load_config(SFTConfig, [*model, "--data.train", "talks.jsonl"]))
    assert not capsys.readouterr().out
    flags = [*SHORT, *PYTHON, "--eval.max_prompt_tokens", "64", "--eval.files", "good.jsonl"]
    check_evaluation(load_config(EvalConfig, [*model, *flags]))
    regrade = load_config(EvalConfig, ["--eval.regrade", "runs/of_old", "--eval.files", "absent.jsonl"])
    with pytest.raises(UserError, match=r"^eval\.regrade=runs/of_old: no such folder; pass runs/NAME$"):
        check_evaluation(regrade)  # before the judge's cache makes the folder
    Path("runs/of_old").mkdir(parents=True)
    check_evaluation(regrade)


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "tools.search.cache is empty, and backend replay reads it"),
        (["--tools.search.backend", "serper"], "needs a key; set the environment variable SERPER_API_KEY"),
        (["--tools.search.backend", "local", "--tools.search.corpus", "c.jsonl"], "corpus c.jsonl: no such file"),
        (["--tools.search.backend", "brightdata"], "BRIGHTDATA_API_KEY"),
    ],
)
def test_a_search_that_cannot_work_is_said_at_once_with_the_way_to_do_without(
    folder, tiny_model_dir, monkeypatch, flags, words
):
    for name in ("SERPER_API_KEY", "BRIGHTDATA_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    short = ["--model.path", str(tiny_model_dir), "--data.max_prompt_tokens", "64", *SHORT]
    with pytest.raises(UserError, match=rf"{words}.*or leave search out: --tools.names python$"):
        check_rl(load_config(RLConfig, [*short, *GOOD, *flags]))


def test_only_the_first_rows_are_read(folder, tiny_model_dir):
    lines = [json.dumps(TALK)] * NUM_ROWS + ["{broken"]
    Path("long.jsonl").write_text("\n".join(lines))
    check_sft(load_config(SFTConfig, ["--model.path", str(tiny_model_dir), "--data.train", "long.jsonl"]))


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_rl", [*GOOD, *PYTHON]),
        ("train_sft", ["--data.train", "talks.jsonl"]),
        ("evaluate", ["--eval.files", "good.jsonl", *PYTHON]),
    ],
)
def test_a_model_that_neither_is_here_nor_can_be_fetched_is_named_at_once(folder, script, flags):
    command = [sys.executable, "-X", "importtime", str(ROOT / f"{script}.py"), "--model.path", "Nobody/Nothing", *flags]
    nowhere = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(command, env=nowhere, capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "error: model.path=Nobody/Nothing: not here, and http://127.0.0.1:9/" in last
    assert "cannot be reached" in last
    assert " torch\n" not in done.stderr and " transformers\n" not in done.stderr


def test_a_run_folder_that_cannot_be_written_is_named_before_the_hub_is_asked(folder):
    Path("runs").write_text("a file")
    with pytest.raises(UserError, match=r"cannot write the run's folder .*set run\.dir"):
        check_sft(load_config(SFTConfig, [*HUB, "--data.train", "talks.jsonl"]))


@pytest.mark.parametrize("chosen, threads", [(None, "1"), ("2", "2")])
def test_a_rank_has_one_thread_unless_told_otherwise(monkeypatch, chosen, threads):
    code = (
        "import os, sys\n"
        "from dataclasses import dataclass, field\n"
        "from arpo.start.load import load_or_exit\n"
        "from arpo.config.sections import RunConfig\n"
        "@dataclass(frozen=True)\n"
        "class Config:\n"
        "    run: RunConfig = field(default_factory=RunConfig)\n"
        "load_or_exit(Config)\n"
        "print(os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"  # which reads it once
    )
    monkeypatch.delenv("OMP_NUM_THREADS")
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [threads, "False"], done.stderr
