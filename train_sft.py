"""Cold-start supervised fine-tuning on conversations with tool calls. Only the assistant's tokens are in the loss.

    torchrun --nproc_per_node 8 train_sft.py configs/qwen2.5_7b.yaml configs/sft.yaml --data.train sft.jsonl

Prompts, tool results (<result> spans) and the chat template's text have loss mask 0. The script writes checkpoints with
exact resume, and a Hugging Face folder at runs/NAME/hf, from which train_rl.py starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from arpo.config.sections import ModelConfig, OptimConfig, ProtocolConfig, RunConfig, SFTDataConfig
from arpo.errors import require
from arpo.sft.inputs import check_sft
from arpo.start.load import load_or_exit, run_or_exit


@dataclass(frozen=True)
class SFTConfig:
    """All options of train_sft.py. The defaults are the paper's recipe."""

    SCRIPT: ClassVar[str] = "train_sft"
    run: RunConfig = field(
        default_factory=lambda: RunConfig(name="sft", num_epochs=3, validate_every=200, save_every=500)
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=7e-6, schedule="cosine", warmup_ratio=0.1, weight_decay=0.0)
    )

    def __post_init__(self) -> None:
        data = self.data
        require(data.train, "data.train is empty; pass a parquet or jsonl file of conversations")
        require(
            data.max_tokens <= data.max_tokens_per_microbatch,
            f"data.max_tokens_per_microbatch={data.max_tokens_per_microbatch} cannot hold one conversation of "
            f"data.max_tokens={data.max_tokens}; raise it, or lower data.max_tokens",
        )


# The config is read before torch is imported, so that --help and mistakes answer at once.
CONFIG = load_or_exit(SFTConfig, check_sft) if __name__ == "__main__" else None

import torch

from arpo.batch import MicroBatch, Row, microbatches
from arpo.checkpoint import Saver
from arpo.checkpoint.best import why_no_best
from arpo.checkpoint.export import why_no_end
from arpo.data import PromptOrder
from arpo.data.hub import local_file
from arpo.log import RunLog
from arpo.log.charts import SFT_CHARTS
from arpo.log.machine import memory_metrics, speeds
from arpo.log.nonfinite import reported_if_not_finite
from arpo.metrics import Metrics
from arpo.model import Policy, load_policy, load_tokenizer
from arpo.model.attention import attention_backend
from arpo.model.context_parallel import local_shares
from arpo.model.optim import build_optimizer, set_learning_rate
from arpo.model.policy import accumulating
from arpo.ranks import Ranks, StopRequest, Timers, init_ranks, seed_everything
from arpo.sft.token_store import tokenise
from arpo.start.memory import Job, check_memory, sizes_of
from arpo.tools import make_codec
from arpo.update import optimizer_step


def main(cfg: SFTConfig) -> None:
    run = cfg.run
    model = cfg.model
    max_tokens = cfg.data.max_tokens_per_microbatch
    ranks = init_ranks(
        run.peer_timeout_minutes,
        run.silence_timeout_s,
        shard_size=model.shard_size,
        context_parallel=model.context_parallel,
    )
    ranks.log_devices({"model.compute_dtype": model.compute_dtype}, attention_backend(model, ranks.device))

    # ---- check all inputs before the model is loaded
    job = Job(sizes_of(model.path), model, num_shards=ranks.mesh.shape[-1], offload=cfg.optim.offload)
    check_memory(job, ranks.device)
    tokenizer = load_tokenizer(model.path)
    codec = make_codec(tokenizer, cfg.protocol, cfg.data.tools, enable_thinking=model.enable_thinking)
    saver = Saver(run, ranks, source=model.path)
    tokens = run.folder / "tokens"
    train_rows = tokenise(local_file(cfg.data.train), cfg.data, codec, folder=tokens / "train", ranks=ranks)
    valid_rows = []
    if cfg.data.valid:  # kept in memory as a list: each validation reads all of them
        valid_rows = list(tokenise(local_file(cfg.data.valid), cfg.data, codec, folder=tokens / "valid", ranks=ranks))
    order = PromptOrder(
        len(train_rows), cfg.data.num_conversations_per_step, run.seed, option="data.num_conversations_per_step"
    )
    num_steps = run.num_steps or run.num_epochs * order.steps_per_epoch

    # ---- policy and optimizer
    seed_everything(run.seed + ranks.rank)
    policy = load_policy(model, ranks.mesh, device=ranks.device, max_model_len=cfg.data.max_tokens, seed=run.seed)
    optimizer = build_optimizer(policy, cfg.optim)
    done_steps = saver.resume(policy, optimizer)
    log = RunLog(
        run.folder, cfg, is_main=ranks.is_main, resume_step=done_steps, charts=SFT_CHARTS, trackers=run.trackers
    )
    log.line(
        f"{len(train_rows)} training and {len(valid_rows)} validation conversations, {num_steps} steps, "
        f"{ranks.world_size} ranks, from step {done_steps}"
    )
    for warning in filter(None, (why_no_best(run, cfg.data.valid, num_steps), why_no_end(model.path, tokenizer))):
        log.line(warning)
    # From the checkpoint: earlier steps may have had another size than order.num_per_step.
    place = Place(saver.progress.get("num_drawn", done_steps * order.num_per_step))
    validates = bool(valid_rows and run.validate_every)
    if done_steps == 0:
        start = {
            "data/conversations": len(train_rows),
            "data/tokens": train_rows.num_tokens,
            "data/dropped": train_rows.num_dropped,
        }
        if validates:
            start["valid/nll"] = validation_nll(policy, valid_rows, max_tokens, ranks)
            log.line(f"step 0  valid {start['valid/nll']:.4f}")
        log.scalars(0, start)

    progress = log.progress(num_steps, "step", done=done_steps)
    stop = StopRequest()
    for step in range(done_steps + 1, num_steps + 1):
        timers = Timers()
        metrics = Metrics()

        # ---- every rank reads the global batch, and takes its share of the tokens
        indices, place.num_drawn = order.draw(place.num_drawn, order.num_per_step)
        rows = [train_rows[i] for i in indices]
        num_loss_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        micros = local_microbatches(rows, max_tokens, ranks)

        # ---- one optimizer step on the mean over all loss tokens of all ranks
        with timers("update"):
            lr = set_learning_rate(optimizer, step - 1, num_steps, cfg.optim)
            metrics.mean("optim/lr", lr)
            with reported_if_not_finite(f"step {step}", micros, run.folder, ranks):
                update_metrics = update_policy(
                    policy=policy,
                    optimizer=optimizer,
                    micros=micros,
                    num_loss_tokens=num_loss_tokens,
                    max_grad_norm=cfg.optim.max_grad_norm,
                    ranks=ranks,
                )
            metrics.merge(update_metrics)

        # ---- validate, log, save. In this order no checkpoint is ahead of the log.
        is_last = step == num_steps
        metrics.merge(memory_metrics(ranks.device))
        values = ranks.reduce_metrics(metrics).values()
        values |= {"tokens/trained": sum(row.num_tokens for row in rows), "tokens/loss": num_loss_tokens}
        if validates and (is_last or step % run.validate_every == 0):
            with timers("validate"):
                values["valid/nll"] = validation_nll(policy, valid_rows, max_tokens, ranks)
        values |= timers.seconds(prefix="time/")
        values |= speeds(values, ranks.world_size)
        log.scalars(step, values)
        progress.at(step, console_text(values), keep="valid/nll" in values)
        is_final = is_last or stop.agreed(ranks)
        saver.save_if_due(step, place, is_final=is_final)
        if is_final:
            break

    progress.close()
    log.finish()
    ranks.close()


@dataclass
class Place:
    """The place in the training conversations, which a checkpoint keeps (arpo/checkpoint/saver.py: Stateful)."""

    num_drawn: int
    """Conversations drawn so far."""

    def state(self) -> dict:
        return {"num_drawn": self.num_drawn}

    def rank_state(self) -> bytes | None:
        return None


def local_microbatches(rows: list[Row], max_tokens: int, ranks: Ranks) -> list[MicroBatch]:
    """Return this rank's micro-batches of `rows`; with context parallelism, its part of the group's micro-batches."""
    micros = microbatches(
        rows, ranks.data_rank, ranks.data_size, max_tokens=max_tokens, option="data.max_tokens_per_microbatch"
    )
    return [micro.to(ranks.device) for micro in local_shares(micros, ranks.group)]


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micros: list[MicroBatch],
    *,
    num_loss_tokens: int,
    max_grad_norm: float,
    ranks: Ranks,
) -> Metrics:
    """Take one optimizer step on the mean loss over the `num_loss_tokens` tokens of all ranks.

    `micros` are this rank's micro-batches. Raises NonFinite, on all ranks alike.
    """
    metrics = Metrics()
    losses = []
    for micro in accumulating(policy, micros):
        logprobs, entropies = policy(micro)  # (B, T), 0 where the loss mask is 0
        nll = -logprobs.sum()
        # FSDP2 averages gradients over ranks. Times world_size, the average becomes the sum.
        (nll * ranks.world_size / num_loss_tokens).backward()
        losses.append(nll.detach())
        metrics.sum("loss/nll", nll.detach().double() / num_loss_tokens)
        metrics.sum("loss/entropy", entropies.detach().sum().double() / num_loss_tokens)
    metrics.mean("optim/grad_norm", optimizer_step(policy, optimizer, max_grad_norm, losses))
    return metrics


@torch.no_grad()
def validation_nll(policy: Policy, rows: list[Row], max_tokens: int, ranks: Ranks) -> float:
    """Return the mean negative log-likelihood per loss token (nats) over all rows and ranks."""
    total = 0.0
    for micro in local_microbatches(rows, max_tokens, ranks):
        logprobs, _ = policy(micro)
        total -= logprobs.sum().double()
    [global_total] = ranks.all_reduce_sum(float(total))
    return global_total / sum(int(row.loss_mask.sum()) for row in rows)


def console_text(values: dict[str, float]) -> str:
    """Return the console line of a training step."""
    parts = [
        f"loss {values['loss/nll']:.4f}",
        f"entropy {values['loss/entropy']:.3f}",
        f"grad {values['optim/grad_norm']:.2f}",
        f"lr {values['optim/lr']:.1e}",
        f"{values['tokens/trained_per_second']:,.0f} tokens/s per rank",
    ]
    if "valid/nll" in values:
        parts.insert(1, f"valid {values['valid/nll']:.4f}")
    return "  ".join(parts)


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
