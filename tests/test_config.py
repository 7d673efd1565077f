"""YAML and flags into a frozen config; every mistake is one line that names the place and the fix."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from ablate import AblationConfig
from arpo.config import load_config, save_config
from arpo.errors import UserError
from evaluate import EvalConfig
from train_rl import RLConfig
from train_sft import SFTConfig

ROOT = Path(__file__).resolve().parent.parent


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_precedence_is_default_then_yaml_then_flag(tmp_path):
    path = write(tmp_path / "c.yaml", "data: {train: a.parquet}\nbranching: {base: 0.3, weight: 0.4}\n")
    cfg = load_config(RLConfig, [path, "--branching.weight", "0.9"])
    assert (cfg.branching.base, cfg.branching.weight, cfg.branching.threshold) == (0.3, 0.9, 0.5)


def test_a_base_file_is_read_first_and_relative_to_the_file(tmp_path):
    write(tmp_path / "base.yaml", "data: {train: a.parquet}\nrun: {name: base, seed: 7}\n")
    path = write(tmp_path / "c.yaml", "base: base.yaml\nrun: {name: own}\n")
    cfg = load_config(RLConfig, [path])
    assert (cfg.run.name, cfg.run.seed, cfg.data.train) == ("own", 7, "a.parquet")


def test_the_defaults_are_the_papers_7b_recipe():
    cfg = load_config(RLConfig, ["--data.train", "train_10k.parquet"])
    assert (cfg.rollout.group_size, cfg.branching.num_initial_rollouts, cfg.rollout.max_tool_calls) == (16, 8, 3)
    assert (cfg.data.num_prompts_per_step, cfg.update.num_prompts_per_minibatch) == (128, 16)
    assert (cfg.data.max_prompt_tokens, cfg.rollout.max_response_tokens, cfg.optim.lr) == (1536, 4096, 1e-6)


def test_a_saved_config_loads_to_the_same_config(tmp_path):
    cfg = load_config(RLConfig, ["--data.train", "x", "--tools.names", "search", "--optim.betas", "0.8", "0.9"])
    save_config(cfg, tmp_path / "saved.yaml")
    assert load_config(RLConfig, [str(tmp_path / "saved.yaml")]) == cfg


def test_a_config_is_frozen():
    cfg = load_config(RLConfig, ["--data.train", "x"])
    with pytest.raises(FrozenInstanceError):
        cfg.rollout.group_size = 3


@pytest.mark.parametrize(
    "yaml, flags, words",
    [
        ("branching: {bas: 1}", [], ["c.yaml", "'branching.bas'", "did you mean 'branching.base'"]),
        ("branching: 3", [], ["c.yaml", "branching must be a mapping"]),
        ("run: {seed: {a: 1}}", [], ["c.yaml", "run.seed must be a value"]),
        ("run: {seed: many}", [], ["c.yaml", "run.seed", "int"]),
        ("branching: {selector: best}", [], ["c.yaml", "branching.selector='best'", "arpo, aepo, random, none"]),
        ("", ["--branching.selector", "randm"], ["command line", "did you mean 'random'?"]),
        ("- a\n- b", [], ["c.yaml", "must be a mapping"]),
        ("a: [", [], ["c.yaml", "not valid YAML"]),
        ("base: nowhere.yaml", [], ["nowhere.yaml", "cannot read"]),
        ("", ["--group_size", "4"], ["command line", "did you mean 'rollout.group_size'"]),
        ("", ["--rollout.group-siz", "4"], ["command line", "did you mean 'rollout.group_size'"]),
        ("", ["--branching.num_initial_rollouts", "17"], ["num_initial_rollouts=17", "group_size=16"]),
        ("", ["--update.num_prompts_per_minibatch", "100"], ["num_prompts_per_step=128", "minibatch=100"]),
        ("", ["--rollout.answer_reserve_tokens", "5000"], ["answer_reserve_tokens=5000", "=4096"]),
        ("", ["--update.max_tokens_per_microbatch", "5000"], ["max_tokens_per_microbatch=5000", "5632"]),
        ("", ["--rollout.temperature", "0"], ["rollout.temperature"]),
        ("", ["--branching.selector", "none", "--branching.dynamic_budget", "True"], ["dynamic_budget"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_place_and_fix(tmp_path, yaml, flags, words):
    path = write(tmp_path / "c.yaml", yaml)
    with pytest.raises(UserError) as caught:
        load_config(RLConfig, [path, "--data.train", "x", *flags])
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


def test_a_missing_config_file_is_named():
    with pytest.raises(UserError, match=r"^configs/arpo_70b\.yaml: cannot read the config file"):
        load_config(RLConfig, ["configs/arpo_70b.yaml"])


def test_a_script_ends_with_code_2_on_rank_0_only():
    for rank, lines in (("0", 1), ("1", 0)):
        done = subprocess.run(
            [sys.executable, "train_rl.py", "--run.nam", "x"],
            cwd=ROOT, env={"RANK": rank, "PATH": ""}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == lines
    assert done.stderr == ""


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_of_the_repository_loads(path):
    roots = {"sft": SFTConfig, "eval": EvalConfig, "ablation": AblationConfig}
    root = next((roots[word] for word in path.stem.split("_") if word in roots), RLConfig)
    cfg = load_config(root, [str(path)])
    assert cfg.run.name == path.stem


def test_a_mistake_may_be_in_the_file_or_beside_it(tmp_path):
    (tmp_path / "c.yaml").write_text("rollout: {group_size: 4}")
    with pytest.raises(UserError, match=rf"^{tmp_path}/c.yaml and command line: invalid choice 'serpr'"):
        load_config(RLConfig, [str(tmp_path / "c.yaml"), "--data.train", "x", "--tools.search.backend", "serpr"])
