"""The arithmetic of GPU memory: the numbers of the shipped configs, by a calculation of their own, and what is refused.

The GPU is pretended: 80 GB as an H100 reports them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.edits import ROOT

from arpo.config.sections import EngineConfig, ModelConfig
from arpo.engine.arguments import CPU_HEAD_SIZES
from arpo.errors import UserError
from arpo.start.load import load_config
from arpo.start.memory import GIB, Job, check_memory, describe, engine_memory, misfits, sizes_of, training_state
from benchmarks.shared.cost_model import memory_of_job
from benchmarks.shared.shapes import MODELS, shape_from_json
from train_rl import RLConfig, job_of

GPU = 79.1 * GIB
DEVICE = torch.device("cuda", 0)


SHAPES = {
    "qwen2.5_7b": MODELS["Qwen2.5-7B"],
    "llama3.1_8b": MODELS["Llama-3.1-8B"],
    "qwen3_8b": MODELS["Qwen3-8B"],
    "qwen3_14b": MODELS["Qwen3-14B"],
}
# With gpu_memory_utilization: training state, update peak, trainer and engine while it samples (GiB); KV cache (GiB,
# thousands of tokens, rows of full length). Worked out by hand from the sources of vLLM 0.33 and FSDP2, without this
# module; the state is exact, the others had their own guesses at what activations and vLLM's profile run take.
BY_HAND = {
    "qwen2.5_7b": (0.7, 14.2, 30, 66.6, 39, 734, 130),
    "llama3.1_8b": (0.7, 15.0, 31, 67.2, 39, 318, 56),
    "qwen3_8b": (0.6, 15.3, 36, 59.4, 30, 222, 18),
    "qwen3_14b": (0.6, 27.5, 51, 68.6, 18, 118, 14),
}


@pytest.fixture
def job(monkeypatch):
    """job(model, *flags) -> what train_rl.py checks for configs/MODEL.yaml on 8 GPUs."""

    def job(model: str, *flags: str) -> Job:
        monkeypatch.setattr("train_rl.sizes_of", lambda path: SHAPES[model].sizes)
        return job_of(load_config(RLConfig, [f"{ROOT}/configs/{model}.yaml", *flags]), num_shards=8)

    return job


@pytest.mark.parametrize("model", SHAPES)
def test_the_shipped_configs_need_what_a_calculation_by_hand_found(job, model):
    share, state, update, rollout, kv_gib, kv_thousands, rows = BY_HAND[model]
    flags = ["--engine.gpu_memory_utilization", str(share), "--engine.max_num_seqs", "256", "--optim.offload", "False"]
    asked = job(model, *flags)
    need = memory_of_job(SHAPES[model], asked, 16384, GPU, reserved=0.0)
    vllm = engine_memory(asked.sizes, asked.engine, GPU)
    assert training_state(asked) / GIB == pytest.approx(state, abs=0.06)
    assert need.training / GIB == pytest.approx(update, rel=0.1)
    assert need.rollout / GIB == pytest.approx(rollout, abs=1.0)
    assert vllm.kv_cache / GIB == pytest.approx(kv_gib, rel=0.1)
    assert vllm.kv_tokens / 1000 == pytest.approx(kv_thousands, rel=0.1)
    assert vllm.kv_tokens / asked.max_model_len == pytest.approx(rows, rel=0.1)


@pytest.mark.parametrize("model", SHAPES)
def test_the_shipped_configs_fit_with_gigabytes_to_spare_and_sequences_that_the_cache_can_hold(job, model):
    asked = job(model)
    vllm = engine_memory(asked.sizes, asked.engine, GPU)
    assert not misfits(asked, GPU)
    assert memory_of_job(SHAPES[model], asked, 16384, GPU, reserved=3 * GIB).training < GPU
    # A row is rarely full, but where far more run than fit, vLLM drops rows and computes them again.
    assert asked.engine.max_num_seqs < 5 * vllm.kv_tokens / asked.max_model_len


def test_the_line_says_what_is_needed_and_what_fits_and_that_offloaded_moments_are_there_only_in_a_step(job):
    line = describe(job("qwen2.5_7b"), GPU)
    assert line.startswith("memory per GPU (79.1 GiB): training state 14.2, vLLM 55.4 while it samples: ")
    assert line.endswith("KV cache about 39.7 = 744k tokens = 132 full rows (engine.max_num_seqs=256)")

    assert "training state 27.5 (6.9 between optimizer steps), vLLM 63.3 while" in describe(job("qwen3_14b"), GPU)


@pytest.mark.parametrize(
    "num_shards, flags, message",
    [
        (8, "--engine.gpu_memory_utilization 0.3", "=0.3 of 79.1 GiB leaves 0.0 GiB for .* KV cache"),
        (8, "--engine.gpu_memory_utilization 0.39", "less than one row of 8192 tokens; raise it"),
        (2, "", "the training state needs 110.0 GiB of a GPU's 79.1 GiB; use more GPUs"),
        (
            8,
            "--optim.offload False",
            "=0.8 of 79.1 GiB leaves no room for the 20.6 GiB .* or set optim.offload=True",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_change(job, monkeypatch, num_shards, flags, message):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=int(GPU)))
    check_memory(job("qwen3_14b"), DEVICE)
    with pytest.raises(UserError, match=message):
        check_memory(replace(job("qwen3_14b", *flags.split()), num_shards=num_shards), DEVICE)


def test_on_a_cpu_nothing_is_checked_or_said(job, caplog):
    with caplog.at_level("INFO", logger="arpo"):
        check_memory(job("qwen3_14b", "--engine.gpu_memory_utilization", "1.0"), torch.device("cpu"))
    assert not caplog.messages


def test_on_a_cpu_heads_without_a_kernel_are_refused_where_there_is_an_engine(job):
    odd = replace(job("qwen3_14b"), sizes=replace(MODELS["Qwen3-14B"], head_dim=40).sizes)
    with pytest.raises(UserError, match=r"heads of 40 numbers, and vLLM's CPU kernels have 32, 64, .*, 512; take"):
        check_memory(odd, torch.device("cpu"))
    check_memory(replace(odd, engine=None), torch.device("cpu"))


@pytest.mark.slow
def test_the_head_sizes_of_vllms_cpu_kernels_are_those_of_the_installed_version():
    backend = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    assert tuple(backend.CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES


@pytest.mark.parametrize(
    "option, part, factor",
    [
        ({"lora_rank": 32}, "states", 1 / 8),  # frozen, in bfloat16
        ({"lora_rank": 32, "compute_dtype": "float32"}, "states", 1 / 4),
        ({"context_parallel": 4}, "activations", 1 / 4),
        ({"compute_dtype": "float32"}, "activations", 1.93),
        ({"recompute_every_n_layers": 0}, "activations", 15.5),
        ({"recompute_every_n_layers": 28}, "activations", 15.0),
        ({"reshard_after_forward": False}, "gathered", 2.2),
    ],
)
def test_every_option_that_moves_memory_counts(option, part, factor):
    shape = MODELS["Qwen2.5-7B"]
    jobs = [Job(shape.sizes, ModelConfig(**options), num_shards=8) for options in ({}, option)]
    plain, other = (memory_of_job(shape, job, max_tokens_per_microbatch=16384, gpu_bytes=GPU) for job in jobs)
    assert getattr(other, part) == pytest.approx(factor * getattr(plain, part), rel=0.1)


def test_a_critic_and_a_reference_have_their_own_shapes(job):
    asked = job("qwen2.5_7b", "--loss.kl_coefficient", "0.01", "--advantage.kind", "gae")
    states = 16 * MODELS["Qwen2.5-7B"].parameters / 8
    assert training_state(asked) == pytest.approx(states + states + states / 4)
    offloaded = job("qwen2.5_7b", "--loss.kl_coefficient", "0.01", "--loss.offload_reference", "True")
    assert training_state(offloaded) == states


def test_an_engine_over_two_gpus_holds_half_of_weights_and_heads():
    sizes = MODELS["Qwen2.5-7B"].sizes
    one, two = (engine_memory(sizes, EngineConfig(tensor_parallel=parts), GPU) for parts in (1, 2))
    assert two.weights == one.weights / 2 and two.kv_bytes_per_token == one.kv_bytes_per_token / 2
    assert training_state(Job(sizes, ModelConfig())) == 0
    for dtype in ("bfloat16", "float32"):  # docs/scale.md: a byte per weight
        fp8 = engine_memory(sizes, EngineConfig(quantization="fp8", dtype=dtype), GPU)
        assert fp8.weights == sizes.parameters


def test_sizes_are_read_from_the_folder_and_those_that_cannot_be_read_are_left_to_the_loader(tiny_model_dir, tmp_path):
    from safetensors.numpy import load_file

    stored = load_file(tiny_model_dir / "model.safetensors")
    sizes = sizes_of(str(tiny_model_dir))
    assert sizes.parameters == sum(array.size for array in stored.values())
    config = json.loads((tiny_model_dir / "config.json").read_text())
    assert sizes == shape_from_json(config).sizes
    assert sizes_of(str(tmp_path)) is None
