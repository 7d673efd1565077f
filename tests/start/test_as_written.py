"""Settings mean what stands in the file or on the command line; what would train nothing, or NaN, is refused."""

import json
from pathlib import Path

import pytest

from arpo.config.exits import check_launch
from arpo.config.facts import leaves
from arpo.errors import UserError
from arpo.log.settings import save_config
from arpo.start.load import load_config
from evaluate import EvalConfig
from train_rl import RLConfig
from train_sft import SFTConfig


def of_yaml(folder: Path, text: str, root: type = SFTConfig) -> dict:
    (folder / "c.yaml").write_text(text)
    return leaves(load_config(root, [str(folder / "c.yaml"), "--data.train", "x"]))


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        # vllm#51401, omnigent PR#1069: YAML 1.1 has truth values, octal and sexagesimal numbers that nobody writes
        ("run: {name: no}", "run.name", "no"),
        ("run: {name: on}", "run.name", "on"),
        ("run: {name: Yes}", "run.name", "Yes"),
        ("run: {name: 1.10}", "run.name", "1.10"),
        ("run: {name: 1:30}", "run.name", "1:30"),
        ("run: {name: 2026-11-27}", "run.name", "2026-11-27"),
        ("run: {name: 0510210600}", "run.name", "0510210600"),  # wireviz#213
        ("run: {name: 1e5}", "run.name", "1e5"),
        ("run: {name: 1_000}", "run.name", "1_000"),
        ("run: {name: '010'}", "run.name", "010"),
        ("data: {system_prompt: no}", "data.system_prompt", "no"),
        ("data: {tools: [on, 007]}", "data.tools", ("on", "007")),
        ("run: {num_steps: 010}", "run.num_steps", 10),
        ("run: {num_steps: 08}", "run.num_steps", 8),  # noyaml PR#35
        ("optim: {lr: 1e-5}", "optim.lr", 1e-5),
        ("optim: {lr: 1.0e-05}", "optim.lr", 1e-5),
        ("optim: {betas: [0.80, 9.5e-1]}", "optim.betas", (0.8, 0.95)),
        ("optim: {max_grad_norm: .inf}", "optim.max_grad_norm", float("inf")),
        # and for a knob that is on or off they are what they were
        ("run: {resume: no}", "run.resume", False),
        ("run: {resume: off}", "run.resume", False),
        ("run: {resume: false}", "run.resume", False),
        ("run: {keep_best: on}", "run.keep_best", True),
        ("run: {keep_best: TRUE}", "run.keep_best", True),
        # tyro#411, r-argparse#56: values that begin with a dash
        ("data: {system_prompt: '--be brief'}", "data.system_prompt", "--be brief"),
        ("data: {system_prompt: '-x'}", "data.system_prompt", "-x"),
        ("data: {system_prompt: '-h'}", "data.system_prompt", "-h"),
        ("data: {tools: ['-x']}", "data.tools", ("-x",)),
        ("model: {path: ~/m}", "model.path", "/home/me/m"),
        ("data: {valid: a~/b}", "data.valid", "a~/b"),
    ],
)
def test_a_value_of_a_file_is_its_text(tmp_path, monkeypatch, text, key, value):
    monkeypatch.setenv("HOME", "/home/me")
    assert of_yaml(tmp_path, text)[key] == value


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("5", "a mapping of sections, not '5'"),
        ("[1, no]", r"a mapping of sections, not '\[1, no\]'"),
        ("train_sft: 1:30", "train_sft must be a mapping of sections, not '1:30'"),
        ("run: {seed: [1, 010]}", r"run.seed must be one value, not the list \[1, 010\]"),
        ("script: no", "the settings of a run of no.py"),
        # numbers that YAML alone knows
        ("run: {num_steps: 1:30}", "'1:30'"),
        ("optim: {lr: 1:30}", "'1:30'"),
        ("run: {num_steps: 0x10}", "'0x10'"),
    ],
)
def test_an_error_shows_the_text_too(tmp_path, text, error):
    with pytest.raises(UserError, match=rf"c\.yaml.*{error}"):
        of_yaml(tmp_path, text)


def test_the_options_of_a_tool_keep_their_types_and_other_words_are_texts(tmp_path):
    (tmp_path / "t.py").write_text("class T: ...\n")
    given = "{rows: 20, rate: 1.5, small: 1e-3, deep: [true, {on: NO}], market: no, zip: 010, at: 1:30, v: '5', w: ~}"
    tool = f"{tmp_path}/t.py:T"
    text = f"tools: {{names: ['{tool}'], options: [{{'{tool}': {given}}}]}}"
    [entry] = of_yaml(tmp_path, text, RLConfig)["tools.options"]
    assert json.loads(entry)[tool] == {
        "rows": 20, "rate": 1.5, "small": "1e-3", "deep": [True, {"on": "NO"}], "market": "no", "zip": "010",
        "at": "1:30", "v": "5", "w": None,
    }  # fmt: skip


def test_a_saved_config_of_odd_texts_loads_to_the_same_config(tmp_path):
    flags = ["--run.name=no", "--data.system_prompt=010", "--optim.max_grad_norm=inf", "--data.train=on"]
    flags += ["--tools.names", "search", "--optim.betas", "0.8", "0.9", "--loss.dual_clip", "None"]
    cfg = load_config(RLConfig, flags)
    save_config(cfg, tmp_path / "saved.yaml")
    assert load_config(RLConfig, [str(tmp_path / "saved.yaml")]) == cfg


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--data.system_prompt=--be brief"], "data.system_prompt", "--be brief"),
        (["--data.system_prompt", "-x"], "data.system_prompt", "-x"),
        (["--run.dir=~/runs"], "run.dir", "/home/me/runs"),  # openshift/installer#1821, OPM#5063: bash leaves it
        (["--run.dir", "~"], "run.dir", "/home/me"),
        (["--data.tools", "~/a", "b~/c"], "data.tools", ("/home/me/a", "b~/c")),
        (["--optim.betas", "0.8", "0.9"], "optim.betas", (0.8, 0.9)),
    ],
)
def test_a_value_of_a_flag_is_its_text(monkeypatch, flags, key, value):
    monkeypatch.setenv("HOME", "/home/me")
    assert leaves(load_config(SFTConfig, ["--data.train", "x", *flags]))[key] == value


@pytest.mark.parametrize(
    "entries", [("-I", "-B"), ("a", "-x"), ("-x", "a"), ("a", "-h"), ("--data.train", "y"), ("a", "--")]
)
def test_an_entry_with_a_dash_among_others_is_refused_and_never_a_flag(tmp_path, entries):
    """python/cpython#53580 and #138950, pycbc#3876, tyro#411, byexample PR#249."""
    error = rf"data\.tools has the entry '{next(e for e in entries if e[0] == '-')}'"
    with pytest.raises(UserError, match=rf"c\.yaml: {error}.* write a file as \./-"):
        of_yaml(tmp_path, f"data: {{tools: {list(entries)}}}")
    if not any(entry.startswith("--") or entry == "-h" for entry in entries):  # those are flags, as everywhere
        with pytest.raises(UserError, match=rf"command line: {error}"):
            load_config(SFTConfig, ["--data.train", "x", "--data.tools", *entries])


def test_a_file_whose_name_begins_with_a_dash_is_given_with_its_folder():
    cfg = load_config(EvalConfig, ["--model.path", "m", "--eval.files", "./-a.jsonl", "b.jsonl"])
    assert cfg.eval.files == ("./-a.jsonl", "b.jsonl")


def test_a_value_with_two_dashes_in_an_argument_of_its_own_is_told_its_form():
    with pytest.raises(UserError, match=r"is written --data\.system_prompt='--be brief'"):
        load_config(SFTConfig, ["--data.train", "x", "--data.system_prompt", "--be brief"])


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--optim.lr", "inf"], "optim.lr=inf must be a finite number"),
        (["--optim.lr", "nan"], "optim.lr=nan must be a finite number"),
        # torch refuses it after the model is there
        (["--optim.betas", "0.9", "1.0"], "must be at least 0 and below 1"),
        (["--optim.betas", "nan", "0.9"], "optim.betas"),
        (["--optim.weight_decay", "inf"], "optim.weight_decay=inf must be a finite number"),
        (["--optim.max_grad_norm", "nan"], "optim.max_grad_norm=nan must be a finite number"),
        (["--model.lora_rank", "8", "--model.lora_alpha", "0"], "would train nothing"),  # vllm PR#48437, robots PR#2028
        (["--model.lora_rank", "8", "--model.lora_alpha", "inf"], "model.lora_alpha=inf must be a finite number"),
        (["--model.lora_rank", "8", "--model.lora_targets"], "would train nothing"),
        # knobs without a range
        (["--branching.weight", "inf"], "branching.weight=inf must be a finite number"),
        (["--loss.dual_clip", "nan"], "loss.dual_clip=nan must be a finite number"),
    ],
)
def test_numbers_that_nobody_means_are_refused(flags, error):
    with pytest.raises(UserError, match=error):
        load_config(RLConfig, ["--data.train", "x", *flags])


WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        ({}, ""),
        ({"WORLD_SIZE": "4", "SLURM_PROCID": "2"}, ""),  # without RANK a run of one
        (WHOLE, ""),
        ({"RANK": "3"}, "RANK=3 is set, but WORLD_SIZE=''"),  # Megatron-LM PR#2571
        (WHOLE | {"MASTER_ADDR": ""}, "MASTER_ADDR=''"),  # NVIDIA-NeMo/Megatron-Bridge PR#999
        (WHOLE | {"LOCAL_RANK": ""}, "LOCAL_RANK=''"),
        (WHOLE | {"MASTER_PORT": "127.0.0.1", "MASTER_ADDR": "12139"}, "MASTER_PORT='127.0.0.1'"),  # DSL#28
        (WHOLE | {"RANK": "2"}, "WORLD_SIZE='2'"),
        (WHOLE | {"RANK": "first"}, "RANK='first'"),
    ],
)
def test_half_of_torchruns_environment_is_one_line(environment, error):
    environment = dict(environment)
    if not error:
        check_launch(environment)
        return
    with pytest.raises(UserError, match=error):
        check_launch(environment)
    assert "RANK" not in environment
