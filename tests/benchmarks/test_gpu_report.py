"""The GPU kit on a machine without one: its driver against sections that fail in every way, and the kit itself."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.edits import ROOT

from arpo.start.load import load_config
from benchmarks import gpu_report
from benchmarks.shared.children import child_environment
from train_rl import RLConfig


@pytest.fixture
def outcome(tmp_path):
    def outcome(code: str, *, limit_s: float = 60, needs: tuple[str, ...] = ()):
        section = gpu_report.Section("some/section", ("-S", "-c", code), needs)
        return gpu_report.run(section, "cpu", tmp_path / "log", quick=True, limit_s=limit_s)

    return outcome


HELLO = "print('hello'); "


@pytest.mark.parametrize(
    "code, needs, status, reason, result",
    [
        (HELLO + "print('{\"ratio\": 2.5}')", (), "passed", "", {"ratio": 2.5}),
        (HELLO + "import os; print('{}', flush=True); os.abort()", (), "passed", "exit code -6", {}),
        (HELLO, (), "failed", "no JSON in its last line", None),
        ("raise ValueError('no such shape')", (), "failed", "ValueError: no such shape", None),
        ("print('torch.OutOfMemoryError: CUDA out of memory. Tried to'); exit(1)", (), "failed", "out of memory", None),
        ("import os; print('before', flush=True); os.abort()", (), "failed", "Aborted; before", None),
        ("import os; os._exit(3)", (), "failed", "no output", None),
        (HELLO, ("json", "no_such_a", "no_such_b"), "skipped", "no_such_a, no_such_b is not installed", None),
        # unsloth 7971, dask 4706: to skip a test for an import which nobody expected looks like a pass
        ("raise ModuleNotFoundError(\"No module named 'no_such_b.part'\")", (), "failed", "no_such_b.part is", None),
    ],
    ids=["passes", "crashes late", "says nothing", "raises", "has no memory", "crashes", "exits", "needs", "imports"],
)
def test_a_section_takes_nothing_with_it_and_says_its_result_or_reason(outcome, code, needs, status, reason, result):
    ended = outcome(code, needs=needs)
    assert (ended.status, ended.result) == (status, result)
    assert reason in ended.reason and bool(reason) == bool(ended.reason)


@pytest.mark.slow
def test_a_section_that_hangs_ends_at_its_limit_with_all_its_processes_and_leaves_their_stacks(outcome, tmp_path):
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(tmp_path / 'alive')!r}).write_text('')"
    code = "import subprocess, sys, time; "
    code += f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); time.sleep(600)"
    hung = outcome(code, limit_s=1.5)
    assert hung.status == "failed" and hung.reason.startswith("no end within 2 s")
    assert (tmp_path / "log").read_text().count('File "<string>", line 1 in <module>') == 2
    time.sleep(3)
    assert not (tmp_path / "alive").exists()


def test_a_section_imports_a_package_that_only_the_callers_pythonpath_names(outcome, tmp_path, monkeypatch):
    """As sdnext 3878: packages of pip install --target are found in no other way."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "only_there.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert outcome("import only_there, arpo; print('{}')").status == "passed"
    paths = child_environment(SOME="1")
    assert paths["PYTHONPATH"] == f"{ROOT}:{tmp_path / 'site'}" and paths["SOME"] == "1"
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment()["PYTHONPATH"] == str(ROOT), "an empty entry would be the current folder"


def test_a_section_that_fails_or_hangs_keeps_the_numbers_it_had(outcome):
    """As datafusion-ballista 2101: a failure in the last part must not cost what was measured before it."""
    so_far = "from benchmarks.shared.children import print_so_far; print_so_far({'name': 'x', 'ratio': 2.5}); "
    failed = outcome(so_far + "raise ValueError('no such shape')")
    assert (failed.status, failed.reason) == ("failed", "ValueError: no such shape")
    assert failed.result["ratio"] == 2.5 and gpu_report.summary(failed) == "ValueError: no such shape, ratio 2.5"
    hung = outcome(so_far + "import time; time.sleep(600)", limit_s=5)
    assert hung.status == "failed" and hung.result["ratio"] == 2.5
    assert outcome(so_far).status == "failed", "it ended before its last line"
    assert outcome(so_far + "print('{\"ratio\": 3}')").result == {"ratio": 3}


@pytest.mark.slow
def test_what_finds_no_place_in_the_total_time_is_skipped_and_says_how_to_run_it(tmp_path):
    hangs = gpu_report.Section("some/section", ("-S", "-c", "import time; time.sleep(600)"))
    for left_s, seconds in ((1.0, "[1-9]"), (-1.0, "0")):
        late = gpu_report.run_before(time.monotonic() + left_s, hangs, "cpu", tmp_path / "log", 600, quick=True)
        assert late.status == "skipped"
        assert re.search(f"over after {seconds} s of it; --only some/section runs it", late.reason), late.reason
    hang = "import time; time.sleep(600)"
    for code, limit_s, status in (("print('{}')", 300, "passed"), ("1 / 0", 300, "failed"), (hang, 2.0, "failed")):
        section = gpu_report.Section("some/section", ("-S", "-c", code))
        ended = gpu_report.run_before(time.monotonic() + 600, section, "cpu", tmp_path / "log", limit_s, quick=True)
        assert ended.status == status


def test_the_report_is_complete_after_each_section_and_keeps_what_was_measured_before(tmp_path):
    first = gpu_report.Outcome("speed/a", "passed", 3.0, result={"ratio": 1.23456}, gpu="H200, 139 GiB")
    gpu_report.write_report(tmp_path, {"gpu": "some GPU"}, [first])
    assert gpu_report.read_outcomes(tmp_path) == [first]
    second = gpu_report.Outcome("speed/b", "failed", 4.0, "no_such_a is not installed")
    gpu_report.write_report(tmp_path, {"gpu": "some GPU"}, [first, second])
    assert json.loads((tmp_path / "report.json").read_text())["machine"] == {"gpu": "some GPU"}
    assert "| speed/a | passed | 3 | ratio 1.235 | H200 |" in (tmp_path / "report.md").read_text()
    assert gpu_report.absent_packages([first, second]).endswith("want of packages: no_such_a (1)")


TESTS = """
import os
def test_good(): ...
def test_bad(): assert 1 == 2
def test_killer(): os.abort() if os.environ["KILL"] == "1" else None
def test_late(): ...
"""


@pytest.mark.parametrize("kill, passed", [("0", ["good", "killer", "late"]), ("1", [])])
def test_tests_of_a_file_share_a_process_and_those_that_did_not_pass_there_are_left_to_run_apart(
    tmp_path, monkeypatch, kill, passed
):
    (tmp_path / "test_some.py").write_text(TESTS)
    monkeypatch.setenv("KILL", kill)
    command = ("-m", "pytest", "-v", "-s", "-p", "no:cacheprovider")
    of_file = [
        gpu_report.Section(name, (*command, f"{tmp_path}/test_some.py::test_{name}"), file="test_some.py")
        for name in ("good", "bad", "killer", "late")
    ]
    found = gpu_report.run_file(of_file, "cpu", tmp_path / "log", quick=True, limit_s=60)
    assert [(o.name, o.status) for o in found.values()] == [(name, "passed") for name in passed]


def test_what_sections_wrote_is_kept_but_for_the_beginning_of_what_is_long(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "LOG_BYTES", 8)
    for text in ("short", "a long one"):
        (tmp_path / gpu_report.RUNNING).write_text(text)
        gpu_report.keep_log(tmp_path, f"speed/{text[0]}")
    kept = (tmp_path / gpu_report.LOGS).read_text()
    assert kept == "\n\n==== speed/s\nshort\n\n==== speed/a\nlong one"


def test_every_section_has_a_name_of_its_own_and_a_script_that_is_there():
    found = gpu_report.sections("cuda")
    assert len(found) == len({section.name for section in found}) > 12
    for section in found:
        script = next(part for part in section.command if "/" in part).partition("::")[0]
        assert (ROOT / script).exists(), script


def test_train_rl_knows_the_flags_of_the_kits_runs():
    runs = [section for section in gpu_report.sections("cuda") if section.command[0] == "benchmarks/gpu/run_rl.py"]
    assert len(runs) > 3
    for section in runs:
        flags = [part for part in section.command[1:] if part != "{quick}"]
        own = {flags.index(name) + n for name in ("--ranks", "--shape") if name in flags for n in (0, 1)}
        rest = [part for n, part in enumerate(flags) if n not in own]
        load_config(RLConfig, ["--data.train", "any.jsonl", *rest])


def run_kit(folder: Path, *parts: str) -> dict[str, dict]:
    """Run these sections on the CPU, all of which must pass; return their results."""
    command = [sys.executable, "benchmarks/gpu_report.py", "--device", "cpu", "--quick", "--out", str(folder)]
    command += ["--limit-s", "900", "--total-min", "60"]  # of a machine that may be busy with other things
    done = subprocess.run([*command, "--only", *parts], cwd=ROOT, capture_output=True, text=True, timeout=3600)
    outcomes = gpu_report.read_outcomes(folder)
    failed = [(o.name, o.reason) for o in outcomes if o.status != "passed"]
    assert failed == [], done.stdout + (folder / gpu_report.LOGS).read_text()[-6000:]
    assert done.returncode == 0
    assert all(any(part in o.name for o in outcomes) for part in parts), [o.name for o in outcomes]
    return {o.name: o.result for o in outcomes}


@pytest.mark.slow
def test_the_kit_runs_on_the_cpu(tmp_path):
    """Without what the engine's own tests and test_scripts.py run here, too. Its other runs of train_rl.py are this one
    with flags that test_multi_node.py and test_tensor_parallel.py have."""
    parts = ["fsdp2", "a_tree_equals", "chunked_head", "attention_is", "offloaded", "checkpoint"]
    results = run_kit(tmp_path, *parts, "run/train_rl_small", "ranks/lost")
    run = results["run/train_rl_small"]
    assert run["ranks"] == 1 and run["tools/all/calls"] > 0 and 0 <= run["mismatch/kl"] < 1e-5
    assert "rank 1" in results["ranks/lost"]["killed"]
