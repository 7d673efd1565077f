"""Asynchronous scheduling changes when results come, and nothing else."""

import json

import pytest
import torch
from helpers.ranks import run_script


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends CUDA's streams; on a GPU see test_gpu.py")
def test_tokens_logprobs_and_entropies_are_the_same_with_asynchronous_scheduling(tiny_model_dir):
    pytest.importorskip("vllm")
    output = run_script("tests/helpers/async_engine.py", str(tiny_model_dir), ranks=1)
    own, gpu, own_async, gpu_async = json.loads(next(line for line in output.splitlines() if line.startswith("[{")))
    assert [run["async"] for run in (own, gpu, own_async, gpu_async)] == [False, False, True, True]
    assert own["done"] != gpu["done"], "the noise hook does not reach the sampler"
    for plain, other in ((own, own_async), (gpu, gpu_async)):
        assert plain["done"].keys() == other["done"].keys()
        for request_id, (tokens, logprobs, entropies, ends) in plain["done"].items():
            found = other["done"][request_id]
            assert (found[0], found[3]) == (tokens, ends), request_id
            assert found[1] == pytest.approx(logprobs, abs=1e-4) and found[2] == pytest.approx(entropies, abs=1e-4)
    ends = {end for *_, ends in own["done"].values() for end, _ in ends}
    assert ends >= {"stop", "length"}, "the requests must end in several ways for this test to see them"
