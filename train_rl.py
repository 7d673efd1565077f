"""Agentic RL with real tools inside the rollout: GRPO, ARPO, AEPO and PPO are settings of this one script.

    torchrun --nproc_per_node 8 train_rl.py configs/qwen2.5_7b.yaml configs/arpo.yaml

A step, top to bottom in `main`:
rollout -> reward -> logprobs -> advantage -> update -> weight sync -> validate -> log -> save.
Every rank samples its share of the prompts with its own vLLM engine and trains its share of the tokens with FSDP2.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from arpo.config.rewards import TrainingRewardConfig
from arpo.config.sections import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    ProtocolConfig,
    RunConfig,
    UpdateConfig,
)
from arpo.config.tools import ToolsConfig
from arpo.errors import raise_all
from arpo.options import AdvantageConfig, BranchingConfig, CriticConfig, LossConfig, RolloutConfig
from arpo.start import checks
from arpo.start.inputs import check_rl
from arpo.start.load import load_or_exit, run_or_exit


@dataclass(frozen=True)
class RLConfig:
    """All knobs of train_rl.py. The defaults are the paper's 7B reasoning recipe (ARPO)."""

    SCRIPT: ClassVar[str] = "train_rl"
    run: RunConfig = field(default_factory=lambda: RunConfig(name="rl"))
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    branching: BranchingConfig = field(default_factory=BranchingConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: TrainingRewardConfig = field(default_factory=TrainingRewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def max_model_len(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def num_updates_per_step(self) -> int:
        return self.data.num_prompts_per_step // self.update.num_prompts_per_minibatch * self.update.num_epochs

    @property
    def critic_model(self) -> ModelConfig:
        return replace(self.model, path=self.critic.path or self.model.path, lora_rank=0)

    @property
    def critic_optim(self) -> OptimConfig:
        return replace(self.optim, lr=self.critic.lr)

    @property
    def reference_model(self) -> ModelConfig:
        path = self.loss.reference or self.model.path
        return replace(self.model, path=path, recompute_every_n_layers=0, lora_rank=0)

    def __post_init__(self) -> None:
        raise_all(
            *checks.check_sizes(self.data, self.rollout, self.branching, self.update),
            *checks.check_result_room(self.tools.search, self.rollout),
            *checks.check_parallel(self.model, self.advantage, self.loss),
            *checks.check_loss(self.loss, self.advantage),
            *checks.check_terms(self.reward, self.rollout),
            *checks.check_sampling_policy(self.engine, self.loss, self.rollout, self.advantage),
        )


# The config is read before torch is imported, so that --help and mistakes answer at once.
CONFIG = load_or_exit(RLConfig, check_rl) if __name__ == "__main__" else None

from functools import partial

from torch.optim import Optimizer

from arpo.checkpoint import Saver
from arpo.data.order import make_order
from arpo.engine import Engine
from arpo.engine.team import form_team
from arpo.log import RunLog
from arpo.log.alarms import Alarms
from arpo.log.charts import RL_CHARTS
from arpo.log.machine import memory_metrics, speeds
from arpo.log.nonfinite import reported_if_not_finite
from arpo.losses import towards_target
from arpo.metrics import Metrics, distributions
from arpo.model import Policy, load_policy, load_tokenizer
from arpo.model.attention import attention_backend, resolve_layout
from arpo.model.critic import TrainedCritic, fill_values
from arpo.model.optim import build_optimizer, set_learning_rate
from arpo.model.policy import check_companion
from arpo.model.sketch import GradientSketch
from arpo.ranks import Ranks, StopRequest, Timers, init_ranks, seed_everything
from arpo.sampling import Rollouts, Sampler
from arpo.sampling.environment import Environment
from arpo.sampling.gradient_noise import GradientNoise
from arpo.sampling.scoring import Scoring
from arpo.start.costs import expected_calls
from arpo.start.memory import Job, check_memory, sizes_of
from arpo.start.trial import try_functions
from arpo.update import (
    Minibatch,
    drop_if_no_gradient,
    fill_advantages,
    fill_old_logprobs,
    fill_ref_logprobs,
    first_update_computes_old_logprobs,
    make_minibatches,
    step_sketches,
    update_policy,
)


def main(cfg: RLConfig) -> None:
    run, model, temperature, max_norm = cfg.run, cfg.model, cfg.rollout.temperature, cfg.optim.max_grad_norm
    ranks = init_ranks(run.peer_timeout_minutes, run.silence_timeout_s, model.shard_size, model.context_parallel)

    # ---- everything that can be wrong is found before a model is loaded
    check_start(cfg, ranks)
    team = form_team(ranks, cfg.engine.tensor_parallel, model.path)
    env = Environment(model, cfg.protocol, cfg.tools, team, cfg.rollout)
    prompts = env.prompts(cfg.data.train, cfg.data)
    valid_prompts = env.prompts(cfg.data.valid, cfg.data)[: cfg.data.num_valid_prompts or None]
    order = make_order(cfg.data.order, prompts, cfg.data.num_prompts_per_step, run.seed)
    num_steps = run.num_steps or run.num_epochs * order.steps_per_epoch
    num_updates = num_steps * cfg.num_updates_per_step
    score = Scoring(cfg.reward, team, env.codec, cfg.rollout.max_response_tokens)
    score.try_on(prompts[0])
    update_cfg = resolve_layout(cfg.update, cfg.rollout.group_size)

    # ---- policy, optimizer, engine; the trainer first, so that vLLM finds the memory that is left
    policy, optimizer, critic, reference = load_models(cfg, ranks, num_updates)
    saver = Saver(run, ranks, source=model.path)
    done_steps = saver.resume(policy, optimizer, critic)
    engine = start_engine(cfg, policy, seed=run.seed + team.index)
    log = RunLog(
        run.folder, cfg, is_main=ranks.is_main, resume_step=done_steps, charts=RL_CHARTS,
        keep_dumps=run.keep_dumps, trackers=run.trackers,
    )  # fmt: skip
    log.line(f"{len(prompts)} prompts, {num_steps} steps, {update_cfg.layout} layout, from step {done_steps}")
    say_at_start(cfg, num_steps, log)
    sampler = Sampler(
        engine, env.tools, env.codec, team, log, run.seed, cfg.rollout, cfg.branching, cfg.engine.max_num_seqs,
        score=score, on_group=score.on_group,
    )  # fmt: skip
    noise = GradientNoise(cfg.advantage, cfg.update.num_prompts_per_minibatch, log) if policy.sketch else None
    rollouts = Rollouts(sampler, order, prompts, cfg.advantage, num_steps, noise)
    rollouts.go_on_from(saver.progress, saver.rank_files, done_steps=done_steps)
    rollouts.validate_on(valid_prompts, log, run, done_steps)
    alarms = Alarms(run, log, ranks, done_steps)
    train_on = partial(update_policy, policy, optimizer, temperature=temperature, max_grad_norm=max_norm, ranks=ranks)
    progress, stop = log.progress(num_steps, "step", done=done_steps), StopRequest()
    for step in range(done_steps + 1, num_steps + 1):
        timers, metrics, loss = Timers(), Metrics(), towards_target(cfg.loss, alarms.values["entropy"])

        # ---- rollout and reward
        batch = rollouts.next(step, timers)
        metrics.merge(batch.metrics)

        # ---- mini-batches of whole groups; what the models say of their tokens before the update; advantages
        minibatches = make_minibatches(batch.groups, update_cfg, cfg.advantage, ranks)
        metrics.merge(fill_model_outputs(minibatches, policy, reference, critic, cfg, timers))
        metrics.merge(fill_advantages(batch.groups, minibatches, cfg.advantage, cfg.loss, ranks))
        minibatches = minibatches if critic else drop_if_no_gradient(minibatches, loss, ranks)

        # ---- update: one optimizer step per mini-batch (while a critic warms up, the policy stays)
        dump = partial(log.trajectories, step, batch.sampled, kind="nonfinite")
        with timers("update"):
            for number, minibatch in enumerate(minibatches * cfg.update.num_epochs):
                update, micros = (step - 1) * cfg.num_updates_per_step + number, minibatch.micros
                with reported_if_not_finite(f"step {step}, mini-batch {number + 1}", micros, run.folder, ranks, dump):
                    if critic:
                        metrics.merge(critic.update(micros, update, ranks))
                    if step > cfg.critic.warmup_steps:
                        metrics.mean("optim/lr", set_learning_rate(optimizer, update, num_updates, cfg.optim))
                        metrics.merge(train_on(micros, loss, is_first=number == 0))

        # ---- the engine samples from the new policy
        with timers("sync"):
            engine.wake_up()
            engine.sync_weights(policy.hf_parameters())

        # ---- validate, log, save; in this order, so that no checkpoint is ahead of the log
        values = batch.values | rollouts.after_update(step, timers)
        metrics.merge(memory_metrics(ranks.device))
        values |= ranks.step_times(timers) | ranks.reduce_metrics(metrics).values()
        values |= noise.of_step(step, batch.groups, step_sketches(policy, minibatches, ranks)) if noise else {}
        is_final = step == num_steps or rollouts.must_stop or stop.agreed(ranks)
        log.scalars(step, values | speeds(values, ranks.world_size), distributions(batch.sampled))
        if run.dump_every and (step == num_steps or step % run.dump_every == 0):
            log.trajectories(step, batch.sampled)
        progress.at(step, console_text(values), keep="valid/well_formed" in values)
        alarms.look(step, values)
        saver.save_if_due(step, rollouts, is_final=is_final)
        rollouts.raise_if_broken()
        if is_final:
            break

    log.finish()
    for part in (progress, env.tools, engine, ranks):
        part.close()


def start_engine(cfg: RLConfig, policy: Policy, seed: int) -> Engine:
    """Return vLLM with the policy's weights."""
    engine = Engine(cfg.model.path, cfg.engine, max_model_len=cfg.max_model_len, seed=seed, load_weights=False)
    engine.sync_weights(policy.hf_parameters())
    return engine


def say_at_start(cfg: RLConfig, num_steps: int, log: RunLog) -> None:
    """Log what the run's branching will be, what it lacks, and what its calls cost."""
    log.line(checks.forecast(cfg.rollout, cfg.branching))
    for warning in checks.doubts(cfg.rollout, cfg.branching, cfg.advantage, cfg.loss):
        log.line(warning)
    if calls := expected_calls(cfg.tools, cfg.rollout, num_steps, cfg.data.num_prompts_per_step):
        log.line(calls)


def check_start(cfg: RLConfig, ranks: Ranks) -> None:
    """Raise UserError where ranks, memory, functions of the user's, or the models beside the policy do not fit."""
    try_functions(cfg.branching, cfg.advantage, cfg.loss)
    ranks.log_devices(attention_backend(cfg.model, ranks.device))
    ranks.check_multiple(cfg.data.num_prompts_per_step, "data.num_prompts_per_step")
    check_memory(job_of(cfg, num_shards=ranks.mesh.shape[-1]), ranks.device)
    tokenizer = load_tokenizer(cfg.model.path)
    for option, path in {"critic.path": cfg.critic.path, "loss.reference": cfg.loss.reference}.items():
        if path:
            check_companion(path, tokenizer, max_model_len=cfg.max_model_len, option=option)


def load_models(
    cfg: RLConfig, ranks: Ranks, num_updates: int
) -> tuple[Policy, Optimizer, TrainedCritic | None, Policy | None]:
    """Return the policy and its optimizer; critic and reference, where the algorithm has any. Collective."""
    seed_everything(cfg.run.seed + ranks.rank)
    max_len = cfg.max_model_len
    policy = load_policy(cfg.model, ranks.mesh, device=ranks.device, max_model_len=max_len, seed=cfg.run.seed)
    optimizer = build_optimizer(policy, cfg.optim)
    if cfg.update.measure_noise:
        policy.sketch = GradientSketch(policy.hf.config.get_text_config().hidden_size, ranks.device)
    critic = reference = None
    if cfg.advantage.needs_critic:
        critic = TrainedCritic.load(cfg.critic_model, cfg.critic_optim, num_updates, ranks, max_model_len=max_len)
    if cfg.loss.kl_coefficient:
        reference = load_policy(
            cfg.reference_model,
            ranks.mesh,
            device=ranks.device,
            max_model_len=max_len,
            offload=cfg.loss.offload_reference,
        )
        reference.requires_grad_(False)
    return policy, optimizer, critic, reference


def fill_model_outputs(
    minibatches: list[Minibatch],
    policy: Policy,
    reference: Policy | None,
    critic: TrainedCritic | None,
    cfg: RLConfig,
    timers: Timers,
) -> Metrics:
    """Fill what policy, reference and critic say of each token before the update."""
    metrics = Metrics()
    with timers("old_logprobs"):
        for minibatch in minibatches[1:] if first_update_computes_old_logprobs(cfg.loss) else minibatches:
            metrics.merge(fill_old_logprobs(policy, minibatch.micros, cfg.loss, cfg.rollout.temperature))
    if reference:
        with timers("reference"):
            for minibatch in minibatches:
                fill_ref_logprobs(reference, minibatch.micros, cfg.rollout.temperature)
    if critic:
        with timers("values"):
            for minibatch in minibatches:
                fill_values(critic.model, minibatch.micros)
    return metrics


def job_of(cfg: RLConfig, num_shards: int) -> Job:
    """Return what decides the memory of a GPU, one of `num_shards` that share a copy of the model."""
    has_reference = cfg.loss.kl_coefficient and not cfg.loss.offload_reference
    return Job(
        sizes_of(cfg.model.path), cfg.model, num_shards, cfg.engine, cfg.max_model_len,
        critic=sizes_of(cfg.critic_model.path) if cfg.advantage.needs_critic else None,
        reference=sizes_of(cfg.reference_model.path) if has_reference else None,
        offload=cfg.optim.offload,
    )  # fmt: skip


def console_text(values: dict[str, float]) -> str:
    """Return the text that the console shows for a training step, from the metrics of all ranks."""
    shown = {
        "valid/accuracy": "valid {:.3f}",
        "reward/solved_share": "solved {:.2f}",
        "reward/positive_share": "reward>0 {:.2f}",
    }
    if "valid/accuracy" not in values:  # a reward of one's own that does not say what is right
        shown["valid/reward"] = "valid reward {:+.3f}"
    shown["valid/unscored"] = "({:.0f} without a reward)"  # they count as wrong
    parts = [
        f"reward {values['reward/mean']:+.3f}" if "reward/mean" in values else "every trajectory failed through us",
        *(words.format(values[name]) for name, words in shown.items() if name in values),
        f"calls {values['tools/calls_per_trajectory']:.2f} (ran {values['tools/all/calls']:.0f})",
        f"branches {values['branching/branches_per_prompt']:.1f}",
        *([_replays(values)] if "tools/replayed" in values else []),
        f"tokens {values['response/tokens']:.0f}",
        f"entropy {values['loss/entropy']:.2f}  mismatch kl {values['mismatch/kl']:.1e}"
        if "loss/entropy" in values
        else _why_no_update(values),
        f"{values['time/step']:.1f} s (rollout {values['time/rollout']:.1f}, update {values['time/update']:.1f})",
    ]
    return "  ".join(parts)


def _why_no_update(values: dict[str, float]) -> str:
    if "critic/loss" in values:
        return "no policy update (the critic warms up)"
    if "group/not_trained_on" in values:
        return "no policy update: this batch is not trained on, for the reason in the warning above"
    reasons = {name.partition("/")[2]: n for name, n in values.items() if name.startswith("reward_reason/")}
    if values.get("group/mixed_share") != 0 or not reasons:
        return "no policy update"
    most = max(reasons, key=lambda reason: reasons[reason])
    share = reasons[most] / sum(reasons.values())
    return f"no policy update: all groups alike ({most} {share:.0%}), docs/troubleshooting.md#all-groups-are-dead"


def _replays(values: dict[str, float]) -> str:
    mismatches = values["tools/replay_mismatch"]
    return f"replayed {values['tools/replayed']:.0f}" + (f" ({mismatches:.0f} otherwise)" if mismatches else "")


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
