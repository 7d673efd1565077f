"""The names that options may take are read from the source; they must be what the modules really hold."""

import importlib
import io
import sys

import pytest

from arpo import losses, rollout_correction
from arpo.advantages import FROM_REWARDS, TREE_CREDITS
from arpo.config.load import load_config
from arpo.errors import UserError, check_name, names_of
from train_rl import RLConfig

DICTS = [
    ("losses", "TOKEN_LOSSES"),
    ("losses", "KL_ESTIMATORS"),
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


def test_an_unknown_name_is_refused_with_the_closest_one_and_the_list():
    with pytest.raises(ValueError) as caught:
        check_name("loss.kind", "cipso", "losses", "TOKEN_LOSSES")
    hint = "did you mean 'cispo'? use one of ppo, gspo, cispo, reinforce"
    assert str(caught.value) == f"loss.kind='cipso' is unknown; {hint}"
    with pytest.raises(ValueError, match=r"is unknown; use one of tis, mis, sequence_tis, .*, none$"):
        check_name("loss.rollout_correction", "xyz", "rollout_correction", "ROLLOUT_CORRECTIONS", "none")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_misspelt_name_in_a_config_is_one_plain_line_whatever_the_terminal(encoding, monkeypatch):
    """tyro draws a box around it, of dashes where the terminal has no better lines."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with pytest.raises(UserError) as caught:
        load_config(RLConfig, ["--data.train", "x", "--loss.kind", "gpso"])
    hint = "did you mean 'gspo'? use one of ppo, gspo, cispo, reinforce; see --help"
    assert str(caught.value) == f"command line: loss.kind='gpso' is unknown; {hint}"


def test_names_beside_the_dict_are_known_too():
    check_name("loss.rollout_correction", "none", "rollout_correction", "ROLLOUT_CORRECTIONS", "none")


def test_a_dict_that_is_not_there_is_an_error_of_ours():
    with pytest.raises(LookupError, match=r"losses\.py assigns no dict or set literal to RULES"):
        names_of("losses", "RULES")
