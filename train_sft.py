"""Cold-start supervised fine-tuning on conversations with tool calls; loss only on what the policy itself must write.

    torchrun --nproc_per_node 8 train_sft.py --model.path Qwen/Qwen2.5-7B --data.train sft.jsonl --run.name sft_7b

Prompts, tool results (<result> spans) and what the chat template adds are masked. Writes checkpoints with exact resume,
and a Hugging Face folder at runs/NAME/hf, from which train_rl.py starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arpo.config import UserError, load_or_exit, run_or_exit
from arpo.options import ModelConfig, OptimConfig, RunConfig


@dataclass(frozen=True)
class SFTDataConfig:
    """Conversations."""

    train: str = ""
    """Training conversations: parquet, jsonl or json; ShareGPT `conversations` or OpenAI `messages`."""
    valid: str = ""
    """Validation conversations; empty = no validation."""
    num_conversations_per_step: int = 16
    """Conversations per optimizer step, over all ranks."""
    max_tokens: int = 15000
    """Longer conversations are left out, and counted."""
    max_tokens_per_microbatch: int = 16384
    """Token budget of one forward/backward pass on one rank; must hold the longest conversation."""
    shuffle: bool = True
    """Draw a new order each epoch (from the seed)."""
    mask_results: bool = True
    """False = train on <result> spans too, as the released code does: the model learns to make up results."""
    system_prompt: str = "keep"
    """keep = as the file has it; none = without; default = the protocol's own; anything else = that text."""


@dataclass(frozen=True)
class SFTConfig:
    """All knobs of train_sft.py. The defaults are the paper's recipe."""

    run: RunConfig = field(
        default_factory=lambda: RunConfig(name="sft", num_epochs=3, validate_every=200, save_every=500)
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=7e-6, schedule="cosine", warmup_ratio=0.1))

    def __post_init__(self) -> None:
        if not self.data.train:
            raise ValueError("data.train is empty; pass a parquet or jsonl file of conversations")
        if self.data.max_tokens > self.data.max_tokens_per_microbatch:
            raise ValueError(
                f"data.max_tokens_per_microbatch={self.data.max_tokens_per_microbatch} cannot hold one conversation of "
                f"data.max_tokens={self.data.max_tokens}; raise it, or lower data.max_tokens"
            )


CONFIG = load_or_exit(SFTConfig) if __name__ == "__main__" else None  # before torch: --help and mistakes answer at once

import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from arpo import distributed  # noqa: E402
from arpo.batch import Row, microbatches  # noqa: E402
from arpo.checkpoint import Checkpoints  # noqa: E402
from arpo.data import PromptOrder, load_conversations  # noqa: E402
from arpo.distributed import Ranks  # noqa: E402
from arpo.export import export_hf  # noqa: E402
from arpo.log import RunLog  # noqa: E402
from arpo.model import Policy, check_model_folder, load_policy, load_tokenizer  # noqa: E402
from arpo.optim import build_optimizer, clip_grad_norm, set_learning_rate  # noqa: E402
from arpo.protocol import Codec, with_system_prompt  # noqa: E402
from arpo.trajectory import Metrics  # noqa: E402


def main(cfg: SFTConfig) -> None:
    dist = distributed.init(shard_size=cfg.model.shard_size)

    # ---- everything that can be wrong is found before the model is loaded
    check_model_folder(cfg.model.path)
    codec = Codec(load_tokenizer(cfg.model.path), enable_thinking=cfg.model.enable_thinking)
    run_dir = Path(cfg.run.dir) / cfg.run.name
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=cfg.run.keep_checkpoints)
    train_rows, num_train_overlong = load_rows(cfg.data.train, cfg.data, codec, dist)
    valid_rows, num_valid_overlong = load_rows(cfg.data.valid, cfg.data, codec, dist)
    if len(train_rows) < cfg.data.num_conversations_per_step:
        raise UserError(
            f"{cfg.data.train}: {len(train_rows)} usable conversations are fewer than "
            f"data.num_conversations_per_step={cfg.data.num_conversations_per_step}; lower it"
        )
    order = PromptOrder(len(train_rows), cfg.data.num_conversations_per_step, cfg.run.seed, cfg.data.shuffle)
    num_steps = cfg.run.num_steps or cfg.run.num_epochs * order.steps_per_epoch

    # ---- policy and optimizer
    distributed.seed_everything(cfg.run.seed + dist.rank)
    policy = load_policy(cfg.model, dist.mesh, device=dist.device, seed=cfg.run.seed)
    optimizer = build_optimizer(policy, cfg.optim)
    done_steps = checkpoints.resume(policy, optimizer, allow=cfg.run.resume)
    log = RunLog(run_dir, cfg, is_main=dist.is_main, resume_step=done_steps)
    log.line(
        f"{len(train_rows)} training and {len(valid_rows)} validation conversations "
        f"({num_train_overlong + num_valid_overlong} longer than {cfg.data.max_tokens} tokens left out), "
        f"{num_steps} steps, {dist.world_size} ranks, from step {done_steps}"
    )
    validates = bool(valid_rows and cfg.run.validate_every)
    if validates and cfg.run.validate_first and done_steps == 0:
        nll = validation_nll(policy, valid_rows, cfg.data.max_tokens_per_microbatch, dist)
        log.scalars(0, {"valid/nll": nll})
        log.line(f"step 0  valid {nll:.4f}")

    loop_started = time.perf_counter()
    for step in range(done_steps + 1, num_steps + 1):
        timers, metrics = distributed.Timers(), Metrics()

        # ---- every rank knows the whole batch, and takes its share of the tokens
        rows = [train_rows[i] for i in order.indices(step - 1)]
        num_loss_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        micros = microbatches(rows, dist.rank, dist.world_size, cfg.data.max_tokens_per_microbatch)

        # ---- one optimizer step on the mean over all loss tokens of all ranks
        with timers("update"):
            metrics.mean("optim/lr", set_learning_rate(optimizer, step - 1, num_steps, cfg.optim))
            for micro in micros:
                micro = micro.to(dist.device)
                logprobs, entropies = policy(micro)  # (B, T), 0 where the loss mask is 0
                nll = -logprobs.sum()
                # FSDP2 averages gradients over ranks; times world_size makes that the sum.
                (nll * dist.world_size / num_loss_tokens).backward()
                metrics.sum("loss/nll", float(nll.detach()) / num_loss_tokens)
                metrics.sum("loss/entropy", float(entropies.detach().sum()) / num_loss_tokens)
            metrics.mean("optim/grad_norm", clip_grad_norm(policy, cfg.optim.max_grad_norm))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        # ---- validate, log, save; in this order, so that no checkpoint is ahead of the log
        is_last = step == num_steps
        values = dist.reduce_metrics(metrics).values()
        num_tokens = sum(row.num_tokens for row in rows)
        values |= {"tokens/trained": num_tokens, "tokens/loss": num_loss_tokens}
        values["tokens/per_second"] = num_tokens / timers.seconds()["step"]
        if validates and (is_last or step % cfg.run.validate_every == 0):
            with timers("validate"):
                values["valid/nll"] = validation_nll(policy, valid_rows, cfg.data.max_tokens_per_microbatch, dist)
        values |= timers.seconds(prefix="time/")
        log.scalars(step, values)
        eta = (time.perf_counter() - loop_started) / (step - done_steps) * (num_steps - step)
        log.line(console_line(step, num_steps, values, eta))
        if is_last or (cfg.run.save_every and step % cfg.run.save_every == 0):
            folder = checkpoints.save(step, policy, optimizer)
            if cfg.run.save_hf:
                export_hf(policy, folder / "hf", source=cfg.model.path, link=run_dir / "hf")

    log.line(f"curve: {log.curve(['loss/nll', 'valid/nll'])}\ntensorboard --logdir {run_dir / 'tb'}")
    log.close()
    dist.close()


def load_rows(file: str, cfg: SFTDataConfig, codec: Codec, dist: Ranks) -> tuple[list[Row], int]:
    """(conversations of at most `max_tokens` as rows, how many were longer), in file order; "" gives none.

    Each rank tokenises its share, and all get all. Raises UserError for a conversation that cannot be masked exactly.
    """
    if not file:
        return [], 0
    share = []
    conversations = load_conversations(file)
    for index in range(dist.rank, len(conversations), dist.world_size):
        messages = with_system_prompt(conversations[index], cfg.system_prompt)
        try:
            share.append(conversation_row(messages, codec, mask_results=cfg.mask_results))
        except ValueError as error:
            raise UserError(f"{file}: conversation {index + 1}: {error}") from None
    shares = dist.all_gather_objects(share)
    rows = [shares[i % dist.world_size][i // dist.world_size] for i in range(len(conversations))]
    kept = [row for row in rows if row.num_tokens <= cfg.max_tokens]
    if not kept:
        raise UserError(
            f"{file}: no conversation has at most data.max_tokens={cfg.max_tokens} tokens (the shortest has "
            f"{min(row.num_tokens for row in rows)}); raise it"
        )
    return kept, len(rows) - len(kept)


def conversation_row(messages: list[dict[str, str]], codec: Codec, *, mask_results: bool) -> Row:
    """A conversation as one row; its "response" begins with the first token that counts in the loss."""
    token_ids, loss_mask = codec.render_conversation(messages, mask_results=mask_results)
    first = loss_mask.index(1)
    return Row(
        prompt_ids=np.asarray(token_ids[:first], dtype=np.int32),
        response_ids=np.asarray(token_ids[first:], dtype=np.int32),
        loss_mask=np.asarray(loss_mask[first:], dtype=np.int8),
    )


@torch.no_grad()
def validation_nll(policy: Policy, rows: list[Row], max_tokens_per_microbatch: int, dist: Ranks) -> float:
    """Mean negative log-likelihood per loss token (nats) over all rows and ranks."""
    total = 0.0
    for micro in microbatches(rows, dist.rank, dist.world_size, max_tokens_per_microbatch):
        logprobs, _ = policy(micro.to(dist.device))
        total -= float(logprobs.sum())
    return dist.all_reduce_sum(total)[0] / sum(int(row.loss_mask.sum()) for row in rows)


def console_line(step: int, num_steps: int, values: dict[str, float], eta_s: float) -> str:
    parts = [
        f"step {step}/{num_steps}",
        f"loss {values['loss/nll']:.4f}",
        f"entropy {values['loss/entropy']:.3f}",
        f"grad {values['optim/grad_norm']:.2f}",
        f"lr {values['optim/lr']:.1e}",
        f"{values['tokens/per_second']:,.0f} tokens/s",
        f"ETA {int(eta_s // 60)}:{int(eta_s % 60):02d}",
    ]
    if "valid/nll" in values:
        parts.append(f"valid {values['valid/nll']:.4f}")
    return "  ".join(parts)


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
