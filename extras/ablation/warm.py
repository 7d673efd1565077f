"""Imports all that is slow, and starts no thread: an experiment's runs are forked from a process that has done so."""

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
