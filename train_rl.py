"""Agentic RL with real tools inside the rollout: GRPO, ARPO and AEPO are settings of this one script.

    torchrun --nproc_per_node 8 train_rl.py configs/arpo_7b.yaml --model.path runs/sft_7b/hf

A step, top to bottom in `main`: rollout -> reward -> advantage -> policy update -> weight sync -> validate, log, save.
Every rank samples its share of the prompts with its own vLLM engine and trains its share of the tokens with FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from arpo.config import UserError, load_or_exit, run_or_exit
from arpo.options import (
    AdvantageConfig,
    BranchingConfig,
    DataConfig,
    EngineConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ToolsConfig,
    UpdateConfig,
)


@dataclass(frozen=True)
class RLConfig:
    """All knobs of train_rl.py. The defaults are the paper's 7B reasoning recipe (ARPO)."""

    run: RunConfig = field(default_factory=lambda: RunConfig(name="rl"))
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    branching: BranchingConfig = field(default_factory=BranchingConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def max_model_len(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def num_updates_per_step(self) -> int:
        return self.data.num_prompts_per_step // self.update.num_prompts_per_minibatch * self.update.num_epochs

    def __post_init__(self) -> None:
        data, rollout, branching, update = self.data, self.rollout, self.branching, self.update
        if not data.train:
            raise ValueError("data.train is empty; pass a parquet or jsonl file of prompts")
        if not 1 <= branching.num_initial_rollouts <= rollout.group_size:
            raise ValueError(
                f"branching.num_initial_rollouts={branching.num_initial_rollouts} must lie between 1 and "
                f"rollout.group_size={rollout.group_size}; lower it or raise the group size"
            )
        if branching.dynamic_budget and branching.selector == "none":
            raise ValueError("branching.dynamic_budget needs branching; set branching.selector or turn it off")
        if data.num_prompts_per_step % update.num_prompts_per_minibatch:
            raise ValueError(
                f"data.num_prompts_per_step={data.num_prompts_per_step} is not a multiple of "
                f"update.num_prompts_per_minibatch={update.num_prompts_per_minibatch}"
            )
        if not 1 <= rollout.answer_reserve_tokens < rollout.max_response_tokens:
            raise ValueError(
                f"rollout.answer_reserve_tokens={rollout.answer_reserve_tokens} must lie between 1 and "
                f"rollout.max_response_tokens={rollout.max_response_tokens}"
            )
        if self.max_model_len > update.max_tokens_per_microbatch:
            raise ValueError(
                f"update.max_tokens_per_microbatch={update.max_tokens_per_microbatch} cannot hold one trajectory of "
                f"data.max_prompt_tokens + rollout.max_response_tokens = {self.max_model_len} tokens; raise it"
            )
        if rollout.temperature <= 0:
            raise ValueError(
                "rollout.temperature must be above 0 in training: greedy rollouts have nothing to learn from"
            )


CONFIG = load_or_exit(RLConfig) if __name__ == "__main__" else None  # before torch: --help and mistakes answer at once

import time  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from arpo import distributed  # noqa: E402
from arpo.advantages import assign_advantages  # noqa: E402
from arpo.batch import MicroBatch, microbatches, training_rows  # noqa: E402
from arpo.checkpoint import Checkpoints, export_hf  # noqa: E402
from arpo.data import PromptOrder, load_prompts, tokenize_prompts  # noqa: E402
from arpo.distributed import Ranks  # noqa: E402
from arpo.engine import Engine  # noqa: E402
from arpo.evals.summary import summarize  # noqa: E402
from arpo.log import RunLog  # noqa: E402
from arpo.losses import entropy_moments, entropy_statistics_of, policy_loss  # noqa: E402
from arpo.metrics import rollout_metrics  # noqa: E402
from arpo.model import Policy, check_model_folder, load_policy, load_tokenizer  # noqa: E402
from arpo.optim import build_optimizer, clip_grad_norm, set_learning_rate  # noqa: E402
from arpo.protocol import Codec, with_system_prompt  # noqa: E402
from arpo.rewards import load_custom, score_groups  # noqa: E402
from arpo.rollout import rollout  # noqa: E402
from arpo.tools import make_tools  # noqa: E402
from arpo.tools.base import ToolRunner  # noqa: E402
from arpo.trajectory import Group, Metrics, Prompt  # noqa: E402


def main(cfg: RLConfig) -> None:
    dist = distributed.init()

    # ---- everything that can be wrong is found before a model is loaded
    if cfg.data.num_prompts_per_step % dist.world_size:
        raise UserError(
            f"data.num_prompts_per_step={cfg.data.num_prompts_per_step} is not a multiple of the "
            f"{dist.world_size} ranks; change it or --nproc_per_node"
        )
    check_model_folder(cfg.model.path, max_model_len=cfg.max_model_len)
    codec = Codec(load_tokenizer(cfg.model.path), enable_thinking=cfg.model.enable_thinking)
    train_prompts = load_and_tokenize(cfg.data.train, cfg.data, codec)
    valid_prompts = load_and_tokenize(cfg.data.valid, cfg.data, codec)[: cfg.data.num_valid_prompts or None]
    order = PromptOrder(len(train_prompts), cfg.data.num_prompts_per_step, cfg.run.seed, cfg.data.shuffle)
    num_steps = cfg.run.num_steps or cfg.run.num_epochs * order.steps_per_epoch
    custom_reward = load_custom(cfg.reward.file, cfg.reward.function) if cfg.reward.file else None
    tools = ToolRunner(make_tools(cfg.tools))
    run_dir = Path(cfg.run.dir) / cfg.run.name
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=cfg.run.keep_checkpoints)

    # ---- policy, optimizer, engine; the trainer first, so that vLLM finds the memory that is left
    distributed.seed_everything(cfg.run.seed + dist.rank)
    policy = load_policy(cfg.model, dist.mesh, device=dist.device)
    optimizer = build_optimizer(policy, cfg.optim)
    done_steps = checkpoints.resume(policy, optimizer, allow=cfg.run.resume)
    engine = Engine(
        cfg.model.path, cfg.engine, max_model_len=cfg.max_model_len, seed=cfg.run.seed + dist.rank, load_weights=False
    )
    engine.sync_weights(policy.hf_parameters())
    log = RunLog(run_dir, cfg, is_main=dist.is_main, resume_step=done_steps)
    log.line(f"{len(train_prompts)} prompts, {num_steps} steps, {dist.world_size} ranks, from step {done_steps}")

    def sample(
        prompts: list[Prompt], rollout_cfg, branching: BranchingConfig, step: int, description: str
    ) -> list[Group]:
        """All ranks sample their share; every rank gets all groups, scored, in the order of `prompts`."""
        share = prompts[dist.rank :: dist.world_size]
        with log.progress(len(share) * rollout_cfg.group_size, description, "trajectory") as bar:
            groups = rollout(
                share, engine, tools, codec, rollout_cfg, branching,
                seed=cfg.run.seed, step=step, on_progress=lambda done: bar.update(done - bar.n),
            )  # fmt: skip
        score_groups(groups, cfg.reward, custom_reward)
        shares = dist.all_gather_objects(groups)
        return [shares[i % dist.world_size][i // dist.world_size] for i in range(len(prompts))]

    def validate(step: int) -> dict[str, float]:
        """Greedy, one trajectory per prompt, no branching."""
        greedy = replace(cfg.rollout, temperature=0.0, top_p=1.0, group_size=1)
        none = replace(cfg.branching, selector="none", num_initial_rollouts=1, dynamic_budget=False)
        groups = sample(valid_prompts, greedy, none, step, "validation")
        log.trajectories(step, groups, kind="valid")
        log.transcripts(step, groups, tag="valid")
        return {f"valid/{name}": value for name, value in summarize(groups, seed=cfg.run.seed).items()}

    if valid_prompts and cfg.run.validate_first and cfg.run.validate_every and done_steps == 0:
        values = validate(0)
        log.scalars(0, values)
        log.line(f"step 0  valid accuracy {values['valid/accuracy']:.3f}")

    for step in range(done_steps + 1, num_steps + 1):
        started, timers, metrics = time.perf_counter(), distributed.Timers(), Metrics()

        # ---- rollout and reward
        with timers("rollout"):
            prompts = [train_prompts[i] for i in order.indices(step - 1)]
            groups = sample(prompts, cfg.rollout, cfg.branching, step, f"step {step} rollout")
            engine.sleep()
        metrics.merge(rollout_metrics(groups[dist.rank :: dist.world_size]))  # each rank counts its share once

        # ---- advantages, and mini-batches of whole groups
        assign_advantages(groups, cfg.advantage)
        size = cfg.update.num_prompts_per_minibatch
        minibatches = [
            microbatches(rows, dist.rank, dist.world_size, cfg.update.max_tokens_per_microbatch, device=dist.device)
            for start in range(0, len(groups), size)
            if (rows := training_rows(groups[start : start + size], cfg.advantage))
        ]

        # ---- policy update: one optimizer step per mini-batch
        with timers("old_logprobs"):
            for micros in minibatches:
                metrics.merge(fill_old_logprobs(policy, micros, cfg))
        with timers("update"):
            for epoch in range(cfg.update.num_epochs):
                for index, micros in enumerate(minibatches):
                    update = (step - 1) * cfg.num_updates_per_step + epoch * len(minibatches) + index
                    lr = set_learning_rate(optimizer, update, num_steps * cfg.num_updates_per_step, cfg.optim)
                    metrics.mean("optim/lr", lr)
                    is_first = epoch == 0 and index == 0
                    try:
                        metrics.merge(update_policy(policy, optimizer, micros, cfg, dist, is_first=is_first))
                    except FloatingPointError:
                        log.trajectories(step, groups, kind="nonfinite")
                        raise

        # ---- the engine samples from the new policy
        with timers("sync"):
            engine.wake_up()
            engine.sync_weights(policy.hf_parameters())

        # ---- validate, log, save; in this order, so that no checkpoint is ahead of the log
        is_last = step == num_steps
        values = {}
        if valid_prompts and cfg.run.validate_every and (is_last or step % cfg.run.validate_every == 0):
            with timers("validate"):
                values = validate(step)
        values |= dist.reduce_metrics(metrics).values() | timers.seconds(prefix="time/")
        values["time/step"] = time.perf_counter() - started
        log.scalars(step, values)
        if cfg.run.dump_every and (is_last or step % cfg.run.dump_every == 0):
            log.trajectories(step, groups)
            log.transcripts(step, groups, tag="train")
        log.line(console_line(step, num_steps, values))
        if is_last or (cfg.run.save_every and step % cfg.run.save_every == 0):
            folder = checkpoints.save(step, policy, optimizer)
            if cfg.run.save_hf:
                export_hf(policy, folder / "hf", source=cfg.model.path, link=run_dir / "hf")

    log.line(f"curve: {log.curve(['reward/mean', 'valid/accuracy'])}\ntensorboard --logdir {run_dir / 'tb'}")
    log.close()
    tools.close()
    engine.close()
    dist.close()


def load_and_tokenize(file: str, cfg: DataConfig, codec: Codec) -> list[Prompt]:
    if not file:
        return []
    return tokenize_prompts(
        load_prompts(file),
        lambda messages: codec.render_prompt(with_system_prompt(messages, cfg.system_prompt)),
        cfg.max_prompt_tokens,
        cfg.overlong,
        file,
    )


def fill_old_logprobs(policy: Policy, micros: list[MicroBatch], cfg: RLConfig) -> Metrics:
    """The policy's logprobs and entropies before the update, and how far vLLM's logprobs are from them."""
    metrics = Metrics()
    for micro in micros:
        with torch.no_grad():
            micro.old_logprobs, micro.old_entropies = policy(micro, cfg.rollout.temperature)
        if num_tokens := micro.num_loss_tokens:
            difference = (micro.old_logprobs - micro.rollout_logprobs)[micro.loss_mask]
            metrics.mean("mismatch/abs", float(difference.abs().mean()), num_tokens)
            metrics.mean("mismatch/kl", float((difference.exp() - 1 - difference).mean()), num_tokens)
            metrics.sum("tokens/trained", micro.input_ids.numel() * cfg.update.num_epochs)
        if cfg.loss.old_logprobs == "rollout":
            micro.old_logprobs = micro.rollout_logprobs
    return metrics


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micros: list[MicroBatch],
    cfg: RLConfig,
    dist: Ranks,
    *,
    is_first: bool,
) -> Metrics:
    """One optimizer step on a global mini-batch, of which `micros` are this rank's part."""
    metrics, temperature = Metrics(), cfg.rollout.temperature
    num_tokens, num_sequences = dist.all_reduce_sum(
        sum(micro.num_loss_tokens for micro in micros), sum(micro.num_sequences for micro in micros)
    )
    statistics = None
    if cfg.loss.entropy_balanced_advantage:
        # Of the current policy; before the first step that is the policy the old logprobs came from.
        statistics = entropy_statistics(policy, micros, temperature, dist, reuse_old=is_first)

    for micro in micros:
        logprobs, entropies = policy(micro, temperature)  # (B, T)
        loss, loss_metrics = policy_loss(
            logprobs,
            micro.old_logprobs,
            micro.advantages,
            micro.loss_mask,
            entropy=entropies,
            clip_low=cfg.loss.clip_low,
            clip_high=cfg.loss.clip_high,
            dual_clip=cfg.loss.dual_clip,
            entropy_balanced_clipping=cfg.loss.entropy_balanced_clipping,
            entropy_balanced_advantage=cfg.loss.entropy_balanced_advantage,
            entropy_advantage_weight=cfg.loss.entropy_advantage_weight,
            entropy_statistics=statistics,
            aggregation=cfg.loss.aggregation,
            denominators=num_tokens if cfg.loss.aggregation == "token_mean" else num_sequences,
        )
        # The loss is this micro-batch's part of the global mean; FSDP2 averages gradients over ranks, so undo that.
        (loss * dist.world_size).backward()
        metrics.merge(loss_metrics, prefix="loss/")

    metrics.mean("optim/grad_norm", clip_grad_norm(policy, cfg.optim.max_grad_norm))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return metrics


def entropy_statistics(
    policy: Policy, micros: list[MicroBatch], temperature: float, dist: Ranks, *, reuse_old: bool
) -> tuple[float, float]:
    """(mean, std) of the policy's token entropies over all loss tokens of the global mini-batch (AEPO)."""
    moments = torch.zeros(3, dtype=torch.float64)
    for micro in micros:
        entropies = micro.old_entropies
        if not reuse_old:
            with torch.no_grad():
                _, entropies = policy(micro, temperature)
        moments += entropy_moments(entropies, micro.loss_mask)
    return entropy_statistics_of(torch.tensor(dist.all_reduce_sum(*moments.tolist()), dtype=torch.float64))


def console_line(step: int, num_steps: int, values: dict[str, float]) -> str:
    parts = [
        f"step {step}/{num_steps}",
        f"reward {values['reward/mean']:+.3f}",
        f"solved {values['reward/solved_share']:.2f}",
        f"calls {values['tools/calls_per_trajectory']:.2f} (ran {values['tools/executed']:.0f})",
        f"branches {values['branching/branches_per_prompt']:.1f}",
        f"tokens {values['response/tokens']:.0f}",
        f"entropy {values['loss/entropy']:.2f}  kl {values['mismatch/kl']:.1e}"
        if "loss/entropy" in values
        else "no update: every group's rewards are all equal",
        f"{values['time/step']:.1f} s (rollout {values['time/rollout']:.1f}, update {values['time/update']:.1f})",
    ]
    if "valid/accuracy" in values:
        parts.append(f"valid {values['valid/accuracy']:.3f}")
    return "  ".join(parts)


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
