"""Import everything slow, without starting a thread. The runs of an experiment are forked from such a process."""

import gc
import importlib

for name in (
    "train_rl",
    "train_sft",
    "extras.ablation.right_moves",
    "extras.demo.build",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
):
    importlib.import_module(name)
gc.freeze()
