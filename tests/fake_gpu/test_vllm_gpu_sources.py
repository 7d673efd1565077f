"""Our engine against the real sources of vLLM's GPU wheels on a pretended H100: an upstream rename fails here.

`make test-downloads`; not part of the other targets, since a version is a download of 300 MB. What runs is their
config, sampler and reloading; no kernel, no CUDA graph and no NCCL.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu.vllm_sources import sources

ROOT = Path(__file__).parents[2]
VERSIONS = ("0.22.1", "0.32.0", "0.33.0")
"""The oldest that pyproject.toml allows, the CPU's, and the newest."""


def test_the_versions_are_the_ends_of_the_range_that_pyproject_allows():
    oldest, beyond = re.search(r"vllm>=0\.(\d+),<0\.(\d+)", (ROOT / "pyproject.toml").read_text()).groups()
    minors = [int(version.split(".")[1]) for version in VERSIONS]
    assert (minors[0], minors[-1]) == (int(oldest), int(beyond) - 1)


def of_a_download(test):
    return pytest.mark.slow(pytest.mark.download(test))


@pytest.fixture(scope="module", params=VERSIONS)
def report(request, tiny_model_dir) -> dict:
    """What engine_on_fake_h100.py found with this version."""
    paths = [sources(request.param), ROOT / "tests", ROOT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    script = ROOT / "tests" / "fake_gpu" / "engine_on_fake_h100.py"
    done = subprocess.run(
        [sys.executable, script, tiny_model_dir], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == request.param, "these are not the sources of the wheel"
    return found


@of_a_download
def test_vllm_takes_our_arguments_for_the_gpu(report):
    expected = {
        "v2_runner": False, "worker": "vllm.v1.worker.gpu_worker.Worker", "executor": "ExecutorWithExternalLauncher",
        "sleep": True, "cumem": True, "async": True, "graphs": "FULL_AND_PIECEWISE", "quantization": "NoneType",
        "prefix_caching": True, "chunked": True, "autotune": False, "largest_graph": 256,
    }  # fmt: skip
    assert report["config"] == expected
    assert report["config_without"] == expected | {"async": False, "graphs": "NONE", "largest_graph": 0}
    assert report["config_fp8"] == expected | {"quantization": "OnlineQuantizationConfig"}
    assert report["config_v2"] == expected | {"v2_runner": True}


@of_a_download
@pytest.mark.parametrize("sampling", ["1", "0.6", "0", "top_p"])
@pytest.mark.parametrize("sampler", ["sampler", "sampler_v2"])
def test_our_hooks_give_the_right_numbers_in_both_real_samplers_without_a_wait_for_the_gpu(report, sampler, sampling):
    """As vllm 33391 and 42259: the second runner's logprobs have been those of other rows, and of other logits."""
    found = report[f"{sampler}_{sampling}"]
    assert isinstance(found, dict), found
    assert found["same_tokens"] and found["waits"] == {} and found.get("without_flashinfer", True), found
    assert found.get("columns", 5) == 2 + 3  # as many top logprobs as the request that wants most
    assert max(found["errors"]) < 1e-4  # of logprobs, entropies and top logprobs


@of_a_download
def test_all_that_the_engine_calls_is_there_as_it_calls_it(report):
    assert report["interface"] == report["interface_v2"] == []


@of_a_download
def test_vllms_own_failures_are_explained_and_it_still_says_what_we_look_for(report):
    found = report["failures"]
    assert isinstance(found, dict), found
    assert "too little of the GPU's memory is free; lower engine.gpu_memory_utilization" in found["message"]
    assert found["own"] >= 6 and found["unknown"] == []


@of_a_download
def test_a_reload_quantises_the_new_weights_into_the_old_storage(report):
    found = report["fp8"]
    assert isinstance(found, dict), found
    assert found["dtype"] == "torch.float8_e4m3fn" and found["same_storage"]
    assert 0.001 < max(found["errors"]) < 0.07  # three bits of mantissa; a stale weight would be off by 1 and more
    assert found["head"] is None, "the head must not be quantised: its logprobs are trained on"
