"""The jail against hostile code: the suite of sandbox_attacks/ in every tier, as this user and as an ordinary one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.python_tools import skip_where_the_kernel_refuses
from sandbox_attacks import ATTACKS

from arpo.errors import UserError

ORDINARY_UID = 61234
UNAVAILABLE = 77
"""Exit code of the suite where the machine cannot carry the tier."""
PATIENCE_S = 900.0
AFTERWARDS = ["harm", "survivors", "host_lost", "sane_call_afterwards", "files_left"]
TESTS = Path(__file__).parents[1]


def runs_as(python: str, uid: int) -> bool:
    """Return whether that user can use this interpreter (3.11 or later) and read the suite."""
    check = "import sys; sys.exit(sys.version_info < (3, 11) or not open(sys.argv[1]).readable())"
    try:
        command = [python, "-c", check, str(TESTS / "sandbox_attacks" / "__main__.py")]
        return subprocess.run(command, user=uid, group=uid, extra_groups=[], stderr=subprocess.DEVNULL).returncode == 0
    except PermissionError:
        return False


def launch(tier: str, user: str) -> subprocess.CompletedProcess[str]:
    python, identity = sys.executable, {}
    if user == "ordinary":
        if os.geteuid() != 0:
            pytest.skip("only root can become another user; the suite has run as this one")
        candidates = [sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")]
        python = next((p for p in candidates if p and runs_as(p, ORDINARY_UID)), None)
        if python is None:
            pytest.skip("no interpreter (3.11 or later) that an ordinary user may run")
        identity = {"user": ORDINARY_UID, "group": ORDINARY_UID, "extra_groups": []}
    command = [python, "-B", "-m", "sandbox_attacks", "--tier", tier]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=TESTS, **identity)


@pytest.fixture(scope="module")
def results():
    """(tier, user) -> {attack: None or what went wrong}; each suite runs once."""
    finished: dict[tuple[str, str], dict[str, str | None] | UserError] = {}

    def get(tier: str, user: str) -> dict[str, str | None]:
        if (tier, user) not in finished:
            run = launch(tier, user)
            if run.returncode == UNAVAILABLE:
                finished[tier, user] = UserError(run.stderr.strip().splitlines()[-1])
            else:
                assert run.returncode == 0, run.stderr
                finished[tier, user] = json.loads(run.stdout)
        if isinstance(found := finished[tier, user], UserError):
            skip_where_the_kernel_refuses(found)
        return found

    return get


@pytest.mark.parametrize("user", ["own", "ordinary"])
@pytest.mark.parametrize("tier", ["namespaces", "landlock"])
@pytest.mark.parametrize("attack", [a.name for a in ATTACKS] + AFTERWARDS)
def test_the_jail_withstands(attack, tier, user, results):
    found = results(tier, user)
    if attack not in found:
        pytest.skip(f"{attack} is not for {tier}: it needs child processes, or the lack of them")
    assert found[attack] is None
