"""YAML and flags into a frozen config; every mistake is one line that names the place and the fix."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from arpo.config.foreign import OTHER_MEANING, OURS
from arpo.config.keys import field_names
from arpo.errors import UserError
from arpo.log.settings import save_config
from arpo.options import AdvantageConfig, BranchingConfig
from arpo.start.load import load_config
from evaluate import EvalConfig
from extras.ablation.config import AblationConfig
from train_rl import RLConfig
from train_sft import SFTConfig

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_later_files_win_over_defaults_and_flags_over_all(tmp_path):
    model = write(tmp_path / "qwen3_8b.yaml", "data: {train: a.parquet}\nrun: {seed: 7, num_epochs: 4}\n")
    algorithm = write(tmp_path / "aepo.yaml", "run: {num_epochs: 5, validate_every: 8}\n")
    cfg = load_config(RLConfig, [model, algorithm, "--run.validate_every", "9"])
    assert (cfg.run.seed, cfg.run.num_epochs, cfg.run.validate_every, cfg.branching.threshold) == (7, 5, 9, None)


def test_a_run_is_called_after_its_files_unless_it_has_a_name(tmp_path):
    model = write(tmp_path / "qwen2.5_7b.yaml", "data: {train: a}\n")
    algorithm, named = write(tmp_path / "aepo.yaml", ""), write(tmp_path / "named.yaml", "run: {name: mine}\n")
    for argv, name in (
        ([model], "qwen2.5_7b"),
        ([model, algorithm], "qwen2.5_7b-aepo"),
        ([named, model], "mine"),
        ([model, named, "--run.name", "other"], "other"),
        (["--data.train", "a"], "rl"),
    ):
        assert load_config(RLConfig, argv).run.name == name


def test_what_stands_under_a_scripts_name_is_for_that_script_only(tmp_path):
    path = write(
        tmp_path / "c.yaml",
        "train_rl: {model: {path: rl}, rollout: {group_size: 32}}\nmodel: {path: all, enable_thinking: true}\n"
        "train_sft: {data: {max_tokens: 9}}\n",
    )
    rl = load_config(RLConfig, [path, "--data.train", "x"])
    assert (rl.model.path, rl.model.enable_thinking, rl.rollout.group_size) == ("rl", True, 32)
    sft = load_config(SFTConfig, [path, "--data.train", "x"])
    assert (sft.model.path, sft.model.enable_thinking, sft.data.max_tokens) == ("all", True, 9)
    assert load_config(EvalConfig, [path, "--eval.files", "x"]).model.path == "all"


def test_a_later_switch_takes_what_earlier_files_said_of_its_knobs_with_it(tmp_path):
    model = write(
        tmp_path / "model.yaml",
        "data: {train: x}\nrollout: {group_size: 12}\nbranching: {num_initial_rollouts: 6, threshold: 0.6}\n"
        "advantage: {dead_groups: resample, max_resample: 3}\n",
    )
    grpo = write(tmp_path / "grpo.yaml", "branching: {selector: none}\n")
    cfg = load_config(RLConfig, [model, grpo])
    assert cfg.branching == BranchingConfig(selector="none") and cfg.rollout.group_size == 12
    assert load_config(RLConfig, [model, "--branching.selector", "none"]).branching == cfg.branching
    save_config(cfg, tmp_path / "saved.yaml")
    assert load_config(RLConfig, [str(tmp_path / "saved.yaml")]) == cfg
    two_steps_away = load_config(RLConfig, [model, "--advantage.kind", "gae"]).advantage
    assert two_steps_away == AdvantageConfig(kind="gae")
    with pytest.raises(UserError, match=r"model\.yaml: branching\.num_initial_rollouts=6 is ignored unless") as refused:
        load_config(RLConfig, [grpo, model])
    hint = f"{grpo} says so, and comes before: put the model's file first ({model} {grpo})"
    assert hint in str(refused.value)
    both = write(tmp_path / "both.yaml", "data: {train: x}\nbranching: {selector: none, num_initial_rollouts: 6}\n")
    with pytest.raises(UserError) as refused:  # within one file there is nothing to swap, nor for a flag
        load_config(RLConfig, [both])
    assert "is ignored unless" in str(refused.value) and "put the model's file first" not in str(refused.value)
    with pytest.raises(UserError) as refused:
        load_config(RLConfig, [grpo, "--data.train", "x", "--branching.num_initial_rollouts", "6"])
    assert "is ignored unless" in str(refused.value) and "put the model's file first" not in str(refused.value)


@pytest.mark.parametrize(
    ("files", "lost"),
    [
        (["forks", "qwen3_14b"], "branching.num_initial_rollouts"),
        (["one_gpu", "qwen2.5_7b"], "optim.lr"),
        (["qwen3_14b", "forks"], ""),
        (["qwen2.5_7b", "arpo", "one_gpu"], ""),
        (["demo_arpo", "demo_hard"], ""),  # two files with a model: the later one is another task
        (["at2po", "qwen2.5_7b"], ""),  # the wrong order, without effect
    ],
)
def test_a_recipe_that_the_models_file_overrides_is_said_with_the_order_that_keeps_it(files, lost, caplog):
    """Nothing else tells: the run goes on with the other number of roots. Later files that win in silence:
    berlinonline/converjon#134, matrix-org/matrix-authentication-service#3136."""
    paths = [f"{ROOT}/configs/{name}.yaml" for name in files]
    with suppress(UserError):  # some of it is also refused
        load_config(RLConfig, [*paths, "--tools.search.zone", "z"])
    said = [record.getMessage() for record in caplog.records]
    if not lost:
        assert said == []
        return
    [line] = said
    assert line.startswith(f"warning: {paths[1]} comes after {paths[0]} and overrides its ")
    assert lost in line and line.endswith(f"put the model's file first: {paths[1]} {paths[0]}")


def test_of_several_ranks_the_first_alone_says_it(monkeypatch, caplog):
    monkeypatch.setenv("RANK", "1")
    load_config(RLConfig, [f"{ROOT}/configs/{name}.yaml" for name in ("forks", "qwen3_14b")])
    assert not caplog.records


def test_the_defaults_are_the_papers_7b_recipe():
    cfg = load_config(RLConfig, ["--data.train", "train_10k.parquet"])
    assert (cfg.rollout.group_size, cfg.branching.num_initial_rollouts, cfg.rollout.max_tool_calls) == (16, 8, 3)
    assert (cfg.data.num_prompts_per_step, cfg.update.num_prompts_per_minibatch) == (128, 16)
    assert (cfg.data.max_prompt_tokens, cfg.rollout.max_response_tokens, cfg.optim.lr) == (1536, 4096, 1e-6)


def test_the_names_of_others_are_answered_with_settings_that_are_there():
    assert set(OURS.values()) <= field_names(RLConfig).keys()


def test_a_name_with_another_meaning_is_explained_in_the_docs():
    """Named after verl's workers/config/actor.py and rollout.py, and TRL's grpo_config.py."""
    table = (ROOT / "docs" / "training.md").read_text().split("## The same word in verl and TRL")[1].split("\n## ")[0]
    assert OURS.keys() >= OTHER_MEANING and all(f"`{name}" in table for name in OTHER_MEANING)
    with pytest.raises(UserError, match=r"here it is --loss\.clip_low, see docs/training\.md, since the value means"):
        load_config(RLConfig, ["--epsilon", "0.3"])


def test_the_names_of_the_released_code_are_answered_as_the_docs_say():
    """ARPO #7 asks what call_limit is. `beam_size` and `entropy_weight` were answered with settings of other things."""
    table = (ROOT / "docs" / "training.md").read_text().split("## Names in the released code\n")[1]
    rows = [re.findall(r"`([\w.]+)`", row) for row in table.splitlines() if row.startswith("| `")]
    said = {there: here for row in rows for there, here in zip(row[: len(row) // 2], row[len(row) // 2 :], strict=True)}
    assert {name: OURS[name] for name in said} == said and len(said) == 8


@pytest.mark.parametrize(
    "yaml, flags, words",
    [
        ("branching: {bas: 1}", [], ["c.yaml", "'branching.bas'", "did you mean 'branching.base'"]),
        ("branching: 3", [], ["c.yaml", "branching must be a mapping"]),
        ("run: {seed: {a: 1}}", [], ["c.yaml", "run.seed must be a value"]),
        ("run: {seed: many}", [], ["c.yaml", "run.seed", "int"]),
        ("branching: {selector: best}", [], ["c.yaml", "branching.selector='best'", "use one of arpo, aepo, "]),
        ("", ["--branching.selector", "randm"], ["command line", "did you mean 'random'?"]),
        ("a: [", [], ["c.yaml", "not valid YAML"]),
        ("run: {seed: }", [], ["c.yaml", "run.seed has no value"]),
        ("train_rl: {branching: {bas: 1}}", [], ["c.yaml", "'branching.bas'", "did you mean 'branching.base'"]),
        ("", ["--rollout", "4"], ["command line", "--rollout is a section"]),
        ("", ["-x"], ["command line", "-x"]),
        ("", ["--group_size", "4"], ["command line", "did you mean 'rollout.group_size'"]),
        ("", ["--rollout.group-siz", "4"], ["command line", "did you mean 'rollout.group_size'"]),
        ("", ["--run.seed", "3", "a.b=4"], ["command line", ": Unrecognized options: a.b=4"]),
        ("", ["--learning_rate", "1e-6"], ["command line", "'learning_rate'", "here it is --optim.lr"]),
        ("", ["--run.seed", "3", "actor_rollout_ref.rollout.n=4"], ["here it is --rollout.group_size"]),
        # anntzer/defopt 110: the last one alone would count
        ("", ["--tools.names", "python", "--tools.names", "search"], ["--tools.names stands there twice"]),
        ("", ["rollout.group_size=4"], ["command line", "'rollout.group_size=4'", "put -- before it"]),
        ("eval: {num_samples: 2}", [], ["c.yaml", "'eval' is a section of evaluate.py"]),
        ("run: &a\n  seed: *a", [], ["c.yaml", "line 2", "alias", "write it out"]),
        ("", ["--branching.num_initial_rollouts", "17"], ["num_initial_rollouts=17", "group_size=16"]),
        ("", ["--update.num_prompts_per_minibatch", "100"], ["num_prompts_per_step=128", "minibatch=100"]),
        ("", ["--rollout.answer_reserve_tokens", "5000"], ["answer_reserve_tokens=5000", "=4096"]),
        ("", ["--update.max_tokens_per_microbatch", "5000"], ["max_tokens_per_microbatch=5000", "5632"]),
        ("", ["--rollout.temperature", "0"], ["rollout.temperature"]),
        ("", ["--branching.selector", "none", "--branching.dynamic_budget", "True"], ["dynamic_budget"]),
        ("data: {valid: [a, b]}", [], ["c.yaml", "data.valid must be one value"]),
        ("run: {seed: 1}\nrun: {seed: 2}", [], ["c.yaml", "'run' stands in lines 1 and 2; drop one"]),
        ("run:\n  seed: 1\n  seed: 2", [], ["c.yaml", "'seed' stands in lines 2 and 3"]),
        ("", ["--run.name", ""], ["run.name=''", "choose a name like"]),
        ("", ["--run.name", "../x"], ["run.name='../x' must name a folder inside run.dir"]),
        ("", ["--run.name", "/tmp/x"], ["run.name='/tmp/x' must name"]),
        ("", ["--optim.lr", "fast"], ["command line", "optim.lr"]),
        ("", ["--loss.kind", "pop"], ["loss.kind='pop' is unknown", "did you mean 'ppo'?"]),
        ("", ["--rollout.group_size", "nan"], ["command line", "invalid literal for int()"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_place_and_fix(tmp_path, yaml, flags, words):
    path = write(tmp_path / "c.yaml", yaml)
    with pytest.raises(UserError) as caught:
        load_config(RLConfig, [path, "--data.train", "x", *flags])
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


def test_a_folder_with_an_equals_sign_is_a_folder(tmp_path):
    """hydra-ecosystem/hydra 1577: so sweeps name their runs."""
    (tmp_path / "lr=1e-6").mkdir()
    path = write(tmp_path / "lr=1e-6" / "config.yaml", "run: {seed: 3}")
    assert load_config(RLConfig, [path, "--data.train", "n=1/x.jsonl"]).run.seed == 3


def test_a_config_file_that_is_missing_or_in_another_encoding_is_named(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"data: {train: caf\xe9}")
    with pytest.raises(UserError, match=r"c\.yaml: the config file is not UTF-8; save it as that"):
        load_config(RLConfig, [str(tmp_path / "c.yaml")])
    with pytest.raises(UserError, match=r"^configs/qwen_70b\.yaml: cannot read the config file"):
        load_config(RLConfig, [str(ROOT / "configs" / "arpo.yaml"), "configs/qwen_70b.yaml"])


def test_a_script_ends_with_code_2_on_rank_0_only():
    launched = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "PATH": ""}
    for environment, words in (
        (launched | {"RANK": "0"}, ["error: command line: ", "did you mean 'run.name'"]),
        (launched | {"RANK": "1"}, []),
        ({"RANK": "3", "PATH": ""}, ["error: RANK=3 is set, but WORLD_SIZE=''"]),  # left by a scheduler
    ):
        command = [sys.executable, "train_rl.py", "--run.nam", "x"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == bool(words)
        assert all(word in done.stderr for word in words)


@pytest.mark.slow
def test_under_torchrun_the_last_line_on_the_screen_is_ours():
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_rl.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    first, *_, rule, last = [line for line in done.stderr.splitlines() if line.startswith(("error", "==="))]
    assert first == last == done.stderr.splitlines()[-1] and not rule.strip("=") and done.returncode == 1
    assert last.startswith("error: command line: data.train is empty")


@pytest.mark.slow
def test_where_files_are_not_read_as_utf8_one_line_says_so():
    other = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "train_rl.py"], cwd=ROOT, capture_output=True, text=True, env=other)
    assert done.returncode == 2 and "; set PYTHONUTF8=1" in done.stderr and done.stderr.count("\n") == 1


OVERLAYS = ("demo_hard", "demo_long", "demo_notes", "llm_long")
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem not in OVERLAYS)
ROOTS = {"sft": SFTConfig, "eval": EvalConfig, "ablation": AblationConfig}
DATA = {SFTConfig: ["--data.train", "x"], RLConfig: ["--data.train", "x"], EvalConfig: ["--eval.files", "x"]}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_of_the_repository_loads(path):
    """By the script that its name says; a model's file by all of them."""
    own = [root for word, root in ROOTS.items() if word in path.stem.split("_")] or [RLConfig]
    parts = [RLConfig, EvalConfig] if path.stem in ("search_r1", "gsm8k") else list(DATA)  # a task has no SFT
    for root in parts if "train_rl:" in path.read_text() else own:
        name = load_config(root, [str(path), *DATA.get(root, [])]).run.name
        assert name == ("gsm8k-before" if (root, path.stem) == (EvalConfig, "gsm8k") else path.stem)


@pytest.mark.parametrize("task", OVERLAYS)
@pytest.mark.parametrize("stage, root", [("sft", SFTConfig), ("arpo", RLConfig), ("eval", EvalConfig)])
def test_the_other_tasks_go_on_top_of_the_demo(stage, root, task):
    files = [str(ROOT / "configs" / f"{name}.yaml") for name in (f"{task.partition('_')[0]}_{stage}", task)]
    assert load_config(root, files).run.name == f"{task}_{stage}"


def test_a_mistake_may_be_in_the_file_or_beside_it(tmp_path):
    (tmp_path / "c.yaml").write_text("rollout: {group_size: 4}")
    with pytest.raises(UserError, match=rf"^{tmp_path}/c.yaml and command line: invalid choice 'serpr'"):
        load_config(RLConfig, [str(tmp_path / "c.yaml"), "--data.train", "x", "--tools.search.backend", "serpr"])


def test_help_that_nobody_reads_to_its_end_ends_without_a_traceback():
    """`train_rl.py --help | head`, where head has closed its end before the first word."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "train_rl.py", "--help"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writes)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


SAID = "interrupted: the same command continues the run\n"


@pytest.mark.parametrize(
    "during, rank, said",
    [
        ("signal.raise_signal(signal.SIGINT)", "0", SAID),
        ("signal.raise_signal(signal.SIGINT)", "1", ""),
        ("broken_off_save()", "0", SAID),
    ],
)
def test_ctrl_c_is_one_line_of_one_rank(rank, said, during):
    code = f"""
import signal
from arpo.start.load import run_or_exit
from arpo.config.exits import exit_interrupted

def broken_off_save():
    try:
        signal.raise_signal(signal.SIGINT)
    except SystemExit as error:  # as torch's distributed checkpoints do
        raise KeyboardInterrupt from error

signal.signal(signal.SIGINT, exit_interrupted)
run_or_exit(lambda _: {during}, None)
"""
    environment = os.environ | {"RANK": rank}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (130, said, "")
