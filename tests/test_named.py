"""Names of options, ours and those of a user's file; ours are read from the source, and must be what is there."""

import importlib
import io
import os
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.sample_groups import group as sample_group

from arpo import losses, rollout_correction
from arpo.advantages import FROM_REWARDS, TREE_CREDITS, assign_advantages, token_advantages
from arpo.config.named import check_name, find, is_own, names_of
from arpo.config.sections import ProtocolConfig
from arpo.errors import UserError
from arpo.options import AdvantageConfig, BranchingConfig, LossConfig, RolloutConfig
from arpo.start.inputs import check_rl
from arpo.start.load import load_config
from train_rl import RLConfig

DICTS = [
    ("losses", "TOKEN_LOSSES"),
    ("kl", "KL_ESTIMATORS"),
    ("losses", "AGGREGATIONS"),
    ("rollout_correction", "ROLLOUT_CORRECTIONS"),
    ("advantages", "GROUP_ESTIMATORS"),
    ("advantages", "CRITIC_ESTIMATORS"),
    ("advantages", "TREE_CREDITS"),
]


@pytest.mark.parametrize("module, dict_name", DICTS)
def test_names_read_from_the_source_are_the_keys_of_the_dict(module, dict_name):
    names = names_of(module, dict_name)
    assert names and list(names) == list(getattr(importlib.import_module(f"arpo.{module}"), dict_name))


def test_names_are_read_from_a_set_too():
    assert set(names_of("losses", "NEED_WHOLE_ROWS")) == losses.NEED_WHOLE_ROWS
    assert losses.TOKEN_LOSSES.keys() | losses.AGGREGATIONS.keys() > losses.NEED_WHOLE_ROWS
    assert rollout_correction.ROLLOUT_CORRECTIONS.keys() > rollout_correction.NEED_WHOLE_ROWS
    assert set(names_of("advantages", "FROM_REWARDS")) == FROM_REWARDS < TREE_CREDITS.keys()


OPTIONS = [(LossConfig, name) for name in ("kind", "kl_estimator", "aggregation", "rollout_correction")]
OPTIONS += [(AdvantageConfig, "kind"), (AdvantageConfig, "tree"), (BranchingConfig, "selector")]
OPTIONS += [(RolloutConfig, "context"), (ProtocolConfig, "format")]


@pytest.mark.parametrize("section, option", OPTIONS)
def test_every_option_that_takes_names_refuses_an_unknown_one(section, option):
    for word in ("", "no such name"):
        with pytest.raises(ValueError, match=rf"\.{option}='{word}' is unknown; .*use one of "):
            section(**{option: word})


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_misspelt_name_in_a_config_is_one_plain_line_whatever_the_terminal(encoding, monkeypatch):
    """tyro draws a box around it, of dashes where the terminal has no better lines."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with pytest.raises(UserError) as caught:
        load_config(RLConfig, ["--data.train", "x", "--loss.kind", "gpso"])
    hint = "did you mean 'gspo'? use one of ppo, gspo, cispo, reinforce, or FILE.py:NAME; see --help"
    assert str(caught.value) == f"command line: loss.kind='gpso' is unknown; {hint}"
    with pytest.raises(UserError, match=r"'xyz' is unknown; use one of tis, .*, none, or FILE.py:NAME; see"):
        load_config(RLConfig, ["--data.train", "x", "--loss.rollout_correction", "xyz"])


# ---- FILE.py:NAME

MINE = """
from arpo.advantages import grpo, hard
from arpo.kl import k3
from arpo.losses import AGGREGATIONS, gspo
from arpo.retrospective import Fork
from arpo.rollout_correction import ROLLOUT_CORRECTIONS

mean = AGGREGATIONS["sequence_mean_token_mean"]
masked = ROLLOUT_CORRECTIONS["mis"]


def half(evidence, cfg):
    return 0.5


def first(group, budget, cfg, rng):
    return [Fork(group.trajectories[0].trajectory_id, 0)] * budget


def odd(evidence):
    return 0.5


async def late(a, b=1):
    ...


made, (one, _) = 1, (2, 3)
if made:
    inside = 3
try:
    from nothing_like_it import tried
    from nothing_like_it import other as renamed
except ImportError:

    def tried(evidence, cfg):
        local = 1
        return 0.25

    renamed = tried
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Makes an option's value of a name in a file of the user's, which lies in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return lambda name: f"mine.py:{name}"


def test_functions_of_a_file_do_what_the_same_functions_of_ours_do(mine):
    logprobs, old = torch.rand(2, 5, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 5)
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]])
    inputs = losses.LossInputs(logprobs, old, torch.tensor([[1.0], [-1.0]]), mask, ref_logprobs=0.5 * logprobs)
    ours = LossConfig(kind="gspo", aggregation="sequence_mean_token_mean", kl_coefficient=0.1, rollout_correction="mis")
    own = replace(
        ours, kind=mine("gspo"), aggregation=mine("mean"), kl_estimator=mine("k3"), rollout_correction=mine("masked")
    )
    assert losses.policy_loss(inputs, own)[0] == losses.policy_loss(inputs, ours)[0]
    weights = [rollout_correction.rollout_weights(old, logprobs, mask, cfg)[0] for cfg in (own, ours)]
    assert torch.equal(*weights) and (weights[0][0] == 0).any()

    credits = []
    for cfg in (AdvantageConfig(kind=mine("grpo"), tree=mine("hard")), AdvantageConfig(tree="hard")):
        group = sample_group()
        assign_advantages([group], cfg)
        credits.append(np.concatenate([*token_advantages(group, cfg.tree, cfg).values()]))
    assert np.array_equal(*credits) and credits[0].any()


def test_a_selector_that_takes_something_else_is_refused(mine):
    for name, takes in (("odd", r"\(evidence\)"), ("late", r"\(a, b\)"), ("made", r"\(\)")):
        words = rf"mine.py:{name} takes {takes}; it must be a function of \(evidence, cfg\)"
        with pytest.raises(UserError, match=words):
            BranchingConfig(selector=mine(name))
    assert BranchingConfig(selector=mine("tried")) and find("branching.selector", mine("tried"), {})(None, None) == 0.25


def test_a_file_or_name_that_is_not_there_is_said_before_anything_is_imported(mine, tmp_path):
    for name in ("gspo", "mean", "half", "late", "made", "one", "inside", "tried", "renamed"):
        check_name("loss.kind", mine(name), "losses", "TOKEN_LOSSES")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "all.py").write_text("from arpo.losses import *\n")
    check_name("loss.kind", "all.py:anything", "losses", "TOKEN_LOSSES")
    for value, words in (
        ("none.py:f", "loss.kind=none.py:f: there is no such file; check the path"),
        ("mine.py:gpso", "loss.kind=mine.py:gpso: mine.py does not define 'gpso'; did you mean 'gspo'?"),
        ("mine.py:local", "mine.py does not define 'local'"),
        ("mine.py:zzzzz", "mine.py does not define 'zzzzz'; it has grpo, hard, k3, AGGREGATIONS"),
        ("broken.py:f", "broken.py is not valid Python (SyntaxError: "),
    ):
        with pytest.raises(UserError) as caught:
            load_config(RLConfig, ["--data.train", "x", "--loss.kind", value])
        assert words in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"run\.trackers=none\.py:f: there is no such file"):
        load_config(RLConfig, ["--data.train", "x", "--run.trackers", "none.py:f"])


def test_a_file_is_imported_once_and_files_of_one_name_do_not_clash(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        code = f"class Loss:\n    folder = {folder!r}\n    made = []\n\nLoss.made.append(1)\n"
        (tmp_path / folder / "loss.py").write_text(code)
    found = [find("loss.kind", f"{tmp_path}/{folder}/loss.py:Loss", {}) for folder in "aba"]
    assert [(loss.folder, loss.made) for loss in found] == [("a", [1]), ("b", [1]), ("a", [1])]
    assert found[0] is found[2] and sys.modules[found[1].__module__].Loss is found[1]  # as pickle looks it up
    assert find("loss.kind", "ppo", losses.TOKEN_LOSSES) is losses.ppo and not is_own("ppo")


def test_a_file_beside_it_is_found_where_pythonpath_says_so(tmp_path, monkeypatch):
    """axolotl #2557: a reward that needs another file could not be loaded, and nothing said why."""
    (tmp_path / "tells.py").write_text("from neighbour_of_tells import f")
    (tmp_path / "neighbour_of_tells.py").write_text("def f(): return 3")
    told = f"'neighbour_of_tells', in line 1 of tells.py); to import files beside it, set PYTHONPATH={tmp_path}"
    with pytest.raises(UserError, match=re.escape(told)):
        find("reward.file", f"{tmp_path}/tells.py:f", {})
    monkeypatch.syspath_prepend(tmp_path)
    assert find("reward.file", f"{tmp_path}/tells.py:f", {})() == 3


def test_a_file_that_cannot_be_imported_is_said_before_a_model_is_loaded(tmp_path, tiny_model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "mine.py").write_text("import nothing_like_it\n\n\ndef f(inputs, cfg): ...\n")
    short = ["--data.max_prompt_tokens", "64", "--rollout.max_response_tokens", "128"]
    common = ["--data.train", "good.jsonl", "--model.path", str(tiny_model_dir), "--tools.names", "python", *short]
    for option in ("loss.kind", "advantage.tree", "run.trackers"):
        cfg = load_config(RLConfig, [*common, "--rollout.answer_reserve_tokens", "16", f"--{option}", "mine.py:f"])
        with pytest.raises(UserError, match=rf"{option}=mine.py:f: cannot be imported \(ModuleNotFoundError: "):
            check_rl(cfg)


def test_a_users_function_may_need_what_any_of_ours_does(mine):
    """It is refused where rows are cut into parts; and no knob that some function may look at is called useless."""
    flags = ["--data.train", "x", "--loss.kind", mine("gspo"), "--loss.clip_low", "0.1", "--loss.dual_clip", "4"]
    flags += ["--advantage.kind", mine("grpo"), "--advantage.normalize", "none", "--advantage.tree", mine("hard")]
    flags += ["--loss.rollout_correction", mine("masked"), "--loss.correction_low", "0.1"]
    cfg = load_config(RLConfig, [*flags, "--branching.selector", mine("half"), "--branching.weight", "0.1"])
    assert not cfg.advantage.needs_critic
    late = ["--data.train", "x", "--branching.selector", mine("first"), "--branching.expansion_rounds", "3"]
    load_config(RLConfig, late)
    for wrong, words in (
        ([*late, "--branching.base", "0.4"], r"base=0\.4 is ignored unless branching\.selector=arpo or aepo"),
        ([*flags, "--critic.lr", "1e-4"], r"critic\.lr=.* is ignored unless advantage\.kind=gae"),
        ([*flags, "--model.context_parallel", "2"], r"context_parallel=2 cannot go with loss\.kind=mine\.py:gspo"),
    ):
        with pytest.raises(UserError, match=words):
            load_config(RLConfig, wrong)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("make", "said"), [
    (lambda path: path.write_text("x = " + "(" * 100_000), "is not valid Python"),
    (lambda path: path.write_text("x = " + "-" * 300_000 + "1"), "is not valid Python"),
    (lambda path: path.write_text("x = " + "+".join("1" * 200_000)), "is not valid Python|does not define"),
    (lambda path: path.write_bytes(b"\xff\xfe"), "is not valid Python"),
    (lambda path: path.write_bytes(b"x = 1\0"), "is not valid Python"),
    (lambda path: path.symlink_to(path), "there is no such file"),
    (lambda path: path.symlink_to("/dev/zero"), "no file of at most 16 MiB"),
    (os.mkfifo, "no file of at most 16 MiB"),
    (lambda path: path.mkdir(), "no file of at most 16 MiB"),
], ids=["brackets", "signs", "sum", "bytes", "NUL", "circle", "device", "FIFO", "folder"])  # fmt: skip
def test_a_file_that_is_none_or_too_deep_is_one_line(tmp_path, make, said):
    path = tmp_path / "mine.py"
    make(path)
    with pytest.raises(UserError, match=rf"^loss\.kind=.*mine\.py:f: .*({said})") as error:
        check_name("loss.kind", f"{path}:f", "losses", "TOKEN_LOSSES")
    assert "\n" not in str(error.value)
