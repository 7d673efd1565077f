"""scripts/mutants.py, which plants faults to show what the tests are worth."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("mutants")


def test_every_fault_can_be_planted_and_its_tests_exist(mutants):
    assert mutants.stale() == []
    for name, tests in mutants.FAULTS:
        assert tests, name
        for test in tests.split():
            assert (ROOT / "tests" / test).is_dir() or (ROOT / f"tests/{test}.py").is_file(), test


def test_a_fault_whose_text_is_gone_is_refused_in_one_line(mutants, monkeypatch):
    monkeypatch.setitem(mutants.FAULTS, ("losses", "test_losses"), [("this text is not there", "")])
    with pytest.raises(SystemExit) as stopped:
        mutants.main([])
    assert str(stopped.value).startswith("error: arpo/losses.py has 'this text is not there' 0 times, not once; repair")
