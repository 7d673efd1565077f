"""What the server of ranks imports before it forks (helpers/ranks.py): nothing that starts a thread or wants a device.

A fork that collects garbage would look through all of it, and so copy its pages: two of five seconds of a short run.
"""

import gc
import importlib.util
import sys

from helpers.models import CHAT_TEMPLATE
from helpers.parsers import parsers_kept

from arpo.model.chat_template import excess_of
from arpo.start.load import load_config

gc.disable()
for name in (
    "train_rl",
    "train_sft",
    "evaluate",
    "torch.distributed.run",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.generation",
    "torch.utils.tensorboard",
    "typeguard",
    "tyro._backends._tyro_backend",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
):
    importlib.import_module(name)

# A third of what a short run computes: vLLM sets up its log and looks through all modules at each start of an engine.
if importlib.util.find_spec("vllm.config.logging"):
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    from vllm.platforms import current_platform

    configure_logging(LoggingConfig())
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)  # they are registered
parsers_kept().start()
for script, config, rows in (
    ("train_rl", "RLConfig", "data.train"),
    ("train_sft", "SFTConfig", "data.train"),
    ("evaluate", "EvalConfig", "eval.files"),
):
    load_config(getattr(sys.modules[script], config), [f"--{rows}", "any.jsonl"])
excess_of(CHAT_TEMPLATE)  # a tenth of a second, which is kept, too
gc.collect()
gc.freeze()
gc.enable()
