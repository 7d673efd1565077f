"""tools.python.interpreter: the packages of another environment, in the same jail."""

import dataclasses
import itertools
import os
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.edits import ROOT
from helpers.python_tools import HANG_S, SMALL, TIERS, jail_of, processes_of, run, started, text_of, wait_until

from arpo.errors import UserError
from arpo.jail import syscalls as kernel
from arpo.jail.interpreter import PACKAGE_PARENT
from arpo.tools.python import PythonTool

PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
OTHERS = sorted(path for path in PYENV.glob("3.*/bin/python") if path.parents[1].name.split(".")[1] not in ("6", "7"))
PATIENT = dataclasses.replace(SMALL, wall_s=120.0)


@pytest.fixture(scope="module")
def environment() -> Iterator[Path]:
    """A virtual environment with a package of its own, and one that is installed as a link to a project folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name) / "environment"
        venv.create(folder, symlinks=True)
        Path(name).chmod(0o755)  # where we are root, the code runs as another user
        packages = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        (packages / "chess_rules.py").write_text("SQUARES = 64\n")
        project = Path(name) / "project"
        project.mkdir()
        (project / "secret_answers.py").write_text("ANSWER = 42\n")
        (packages / "project.pth").write_text(f"{project}\nimport sys; sys.pth_was_run = True\n")
        yield folder


@pytest.fixture(scope="module", params=TIERS)
def tool(request, environment):
    with started(dataclasses.replace(PATIENT, interpreter=str(environment / "bin/python")), request.param) as tool:
        yield tool


def test_the_packages_of_a_named_environment_can_be_imported(tool):
    assert text_of(tool, "import chess_rules\nchess_rules.SQUARES") == "64"
    assert text_of(tool, "import sympy") == "ModuleNotFoundError: No module named 'sympy'"  # ours has it
    assert text_of(tool, "1 / 0") == "ZeroDivisionError: division by zero"


def test_neither_the_repository_nor_editable_installs_become_visible(tool):
    assert "No module named 'arpo'" in text_of(tool, "import arpo")
    assert "No module named 'secret_answers'" in text_of(tool, "import secret_answers")
    look = f"import sys\nhasattr(sys, 'pth_was_run'), {PACKAGE_PARENT!r} in sys.path"
    assert text_of(tool, look) == "(False, False)"
    [listing] = run(tool, f"import os\nos.listdir({str(ROOT)!r})")
    assert not listing.ok or "README.md" not in listing.text


@pytest.fixture(scope="module")
def borrowing() -> Iterator[Path]:
    """The Python of an environment whose packages are those of this one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        venv.create(name, symlinks=True)
        Path(name).chmod(0o755)
        packages = Path(name) / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (packages / "others.pth").write_text("\n".join(paths))
        yield Path(name) / "bin/python"


DATA_ANALYSIS = """
import numpy as np
import pandas as pd
from scipy import linalg, optimize, stats

frame = pd.DataFrame({"group": list("aabb"), "value": [1.0, 2.0, 4.0, 9.0]})
frame["day"] = pd.date_range("2024-01-31", periods=4)
frame.to_csv("frame.csv", index=False)
frame = pd.read_csv("frame.csv", parse_dates=["day"])
print(frame.groupby("group")["value"].mean().to_dict(), frame["day"].max().date())
print(round(stats.linregress([0, 1, 2, 3], frame["value"]).slope, 6), round(stats.norm.cdf(1.96), 4))
print(linalg.solve([[2.0, 1.0], [1.0, 3.0]], [3.0, 5.0]).round(6), round(optimize.brentq(np.cos, 0, 3), 6))
big = np.random.rand(300, 300)
print(np.allclose(linalg.inv(big) @ big, np.eye(300)))
"""
ANALYSED = "{'a': 1.5, 'b': 6.5} 2024-02-03\n2.6 0.975\n[0.8 1.4] 1.570796\nTrue"


IN_THE_FAST_TIER = ("namespaces", "own"), ("landlock", "named")
"""Each imports SciPy and pandas, which takes seconds."""


@pytest.mark.parametrize(
    "tier, whose",
    [
        pytest.param(*case, marks=() if case in IN_THE_FAST_TIER else pytest.mark.slow)
        for case in itertools.product([*TIERS, "none"], ["own", "named"])
    ],
)
def test_scipy_and_pandas_work_in_every_tier(borrowing, tier, whose):
    interpreter = str(borrowing) if whose == "named" else ""
    # OpenBLAS takes 32 MiB at once, on some CPUs, and tries for ever
    with started(dataclasses.replace(PATIENT, memory_mib=512, interpreter=interpreter), tier) as tool:
        [result] = run(tool, DATA_ANALYSIS)
    assert (result.text, result.error_kind) == (ANALYSED, None)


def test_a_host_that_was_lost_comes_back_with_the_same_interpreter(environment):
    cfg = dataclasses.replace(PATIENT, interpreter=str(environment / "bin/python"))
    with started(cfg, grace_s=HANG_S) as tool:
        pids = jail_of(tool)
        os.kill(tool.sandbox.host.pid, 9)
        assert wait_until(lambda: not any(processes_of(pid) for pid in pids))
        assert text_of(tool, "import chess_rules\nchess_rules.SQUARES") == "64"
        assert tool.sandbox.num_restarts == 1


@pytest.mark.skipif(not OTHERS, reason="no other Pythons here (pyenv has none)")
@pytest.mark.parametrize("executable", OTHERS, ids=lambda path: path.parents[1].name)
def test_every_python_since_3_9_carries_the_jail_and_older_ones_are_refused(executable):
    version = tuple(map(int, executable.parents[1].name.split(".")[:2]))
    cfg = dataclasses.replace(PATIENT, interpreter=str(executable))
    if version < (3, 9):
        with pytest.raises(UserError, match=r"is Python 3\.8\.\d+; name one of at least 3\.9"):
            PythonTool(cfg)
        return
    with started(cfg) as tool:
        assert text_of(tool, "import sys\nsys.version_info[:2]") == str(version)
        [failed, forked] = run(tool, "raise ValueError('x')", "import os\nif os.fork(): os.wait(); print('both')")
    assert failed.text == "ValueError: x"
    assert forked.text in ("both", "PermissionError: [Errno 1] Operation not permitted")


@pytest.mark.parametrize(
    ("executable", "complaint"),
    [("/nowhere/python", "there is no such file"), ("/tmp", "there is no such file"), ("/bin/true", "does not answer")],
)
def test_what_is_no_python_is_refused_in_one_line(executable, complaint):
    with pytest.raises(UserError, match=rf"tools\.python\.interpreter: {executable} {complaint}") as error:
        PythonTool(dataclasses.replace(PATIENT, interpreter=executable))
    assert "\n" not in str(error.value)


def test_a_python_that_cannot_load_the_host_is_refused_with_its_reason(tmp_path):
    broken = tmp_path / "python"
    without_ctypes = "import sys; sys.modules['ctypes'] = None; exec(sys.argv.pop(1))"
    broken.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{without_ctypes}" "$4" "$5"\n')
    broken.chmod(0o755)
    with pytest.raises(UserError, match=r"cannot run the sandbox \(ModuleNotFoundError: .*ctypes"):
        PythonTool(dataclasses.replace(PATIENT, interpreter=str(broken)))


def test_pidfd_open_is_there_even_where_python_was_built_without_it():
    fd = kernel.pidfd_open(os.getpid())
    assert os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[pidfd]" and not os.get_inheritable(fd)
    os.close(fd)
