"""Agentic RL with real tools inside the rollout: GRPO, ARPO, AEPO and PPO are settings of this one script.

    torchrun --nproc_per_node 8 train_rl.py configs/qwen2.5_7b.yaml configs/arpo.yaml

A step, from top to bottom in `main`:
rollout -> reward -> logprobs -> advantage -> update -> weight sync -> validate -> log -> save.
Every rank samples its share of the prompts with its own vLLM engine and trains its share of the tokens with FSDP2.

Where to read more. Each file can be read alone:

    rollout      arpo/rollout.py: turns, tool calls, forks; arpo/branching.py: where to fork; arpo/sampling: prompts
    reward       arpo/rewards: one function per task
    advantage    arpo/advantages.py: from the rewards of a group, or from a critic
    update       arpo/update.py: mini-batches and the optimizer step; arpo/losses.py: the loss of each token
    options      arpo/options.py, arpo/config/sections.py: each field and its meaning (also in --help)

Left out on purpose: replay buffers, reward models that are trained, and an update while other GPUs sample. Rollout and
update take turns on the same GPUs; rollout.carry_over only keeps slow trajectories from holding up a step.
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
    """Name of the script. In config files it heads the settings for this script only (docs/training.md)."""
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
    def num_critic_only_updates(self) -> int:
        """Optimizer steps at the start of the run that only the critic takes."""
        return self.critic.warmup_steps * self.num_updates_per_step

    @property
    def critic_model(self) -> ModelConfig:
        """The critic's model, without adapters: all weights are trained."""
        return replace(self.model, path=self.critic.path or self.model.path, lora_rank=0)

    @property
    def critic_optim(self) -> OptimConfig:
        return replace(self.optim, lr=self.critic.lr)

    @property
    def reference_model(self) -> ModelConfig:
        """The model of the KL term: never trained, so without adapters and recomputation."""
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

from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer

from arpo.checkpoint import Saver
from arpo.checkpoint.best import why_no_best
from arpo.checkpoint.export import why_no_end
from arpo.data.order import make_order
from arpo.engine import Engine
from arpo.engine.team import form_team
from arpo.log import RunLog
from arpo.log.alarms import Alarms
from arpo.log.charts import RL_CHARTS
from arpo.log.machine import memory_metrics, speeds
from arpo.log.metrics_file import rows_until
from arpo.log.nonfinite import reported_if_not_finite
from arpo.log.step_line import console_text
from arpo.losses import EntropyTarget
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
    run = cfg.run
    ranks = init_ranks(
        run.peer_timeout_minutes,
        run.silence_timeout_s,
        shard_size=cfg.model.shard_size,
        context_parallel=cfg.model.context_parallel,
    )

    # ---- everything that can be wrong is found before a model is loaded
    check_start(cfg, ranks)
    team = form_team(ranks, cfg.engine.tensor_parallel, cfg.model.path)
    env = Environment(cfg.model, cfg.protocol, cfg.tools, team=team, rollout=cfg.rollout)
    prompts = env.prompts(cfg.data.train, cfg.data)
    valid_prompts = env.prompts(cfg.data.valid, cfg.data)[: cfg.data.num_valid_prompts or None]  # 0: all of them
    order = make_order(cfg.data.order, prompts, cfg.data.num_prompts_per_step, seed=run.seed)
    num_steps = run.num_steps or run.num_epochs * order.steps_per_epoch
    score = Scoring(cfg.reward, team, env.codec, max_response_tokens=cfg.rollout.max_response_tokens)
    score.try_on(prompts[0])
    update_cfg = resolve_layout(cfg.update, cfg.rollout.group_size)

    # ---- policy, optimizer, engine; the trainer first, so that vLLM finds the memory that is left
    models = load_models(cfg, ranks, num_updates=num_steps * cfg.num_updates_per_step)
    saver = Saver(run, ranks, source=cfg.model.path)
    done_steps = saver.resume(models.policy, models.optimizer, models.critic)
    engine = start_engine(cfg, models.policy, seed=run.seed + team.index)
    log = open_log(cfg, ranks, done_steps)
    log.line(f"{len(prompts)} prompts, {num_steps} steps, {update_cfg.layout} layout, from step {done_steps}")
    log_plan(cfg, num_steps, log, tokenizer=env.codec.tokenizer)
    sampler = make_sampler(cfg, engine, env, score=score, log=log)
    noise = None
    if cfg.update.measure_noise:
        num_prompts = cfg.update.num_prompts_per_minibatch
        noise = GradientNoise(cfg.advantage, num_prompts, log, sizes_vary=cfg.branching.until_mixed)
    rollouts = Rollouts(sampler, order, prompts, advantage=cfg.advantage, num_steps=num_steps, noise=noise)
    rollouts.resume(saver.progress, saver.rank_files, done_steps=done_steps)
    rollouts.validate_on(valid_prompts, log, run, done_steps=done_steps)
    alarms = Alarms(run, log, ranks, done_steps, is_corrected=cfg.loss.is_corrected)
    entropy_target = EntropyTarget(cfg.loss, entropies_until(done_steps, cfg, ranks))
    progress = log.progress(num_steps, "step", done=done_steps)
    stop = StopRequest()  # from here on a signal ends the run after the step, with a checkpoint

    for step in range(done_steps + 1, num_steps + 1):
        timers = Timers()
        metrics = Metrics()
        loss_cfg = entropy_target.loss_cfg  # cfg.loss with the entropy coefficient of this step

        # ---- rollout and reward
        batch = rollouts.next(step, timers)
        metrics.merge(batch.local_metrics)

        # ---- mini-batches of groups; logprobs and values of their tokens before the update; advantages
        # `batch.groups` are the groups to train on, `batch.sampled` all groups of the step
        minibatches = make_minibatches(batch.groups, update_cfg, cfg.advantage, ranks)
        model_metrics = fill_model_outputs(
            minibatches, models, loss_cfg, temperature=cfg.rollout.temperature, timers=timers
        )
        metrics.merge(model_metrics)
        metrics.merge(fill_advantages(batch.groups, minibatches, cfg.advantage, loss_cfg=loss_cfg, ranks=ranks))
        # A critic also learns from groups without a gradient for the policy, so with a critic all mini-batches stay.
        if not models.critic:
            minibatches = drop_if_no_gradient(minibatches, loss_cfg, ranks)

        # ---- update: one optimizer step per mini-batch
        dump = partial(log.trajectories, step, batch.sampled, kind="nonfinite")
        with timers("update"):
            update_metrics = update_models(
                models, minibatches, step=step, loss_cfg=loss_cfg, cfg=cfg, ranks=ranks, before_nonfinite_error=dump
            )
        metrics.merge(update_metrics)

        # ---- the engine, asleep since the rollout, gets the new policy
        with timers("sync"):
            engine.wake_up()
            engine.sync_weights(models.policy.hf_parameters())

        # ---- validate, log, save; in this order, so that no checkpoint is ahead of the log
        # `values` are the same on every rank; `metrics` are this rank's, until they are reduced
        values = batch.global_values | rollouts.validate_if_due(step, timers)
        metrics.merge(memory_metrics(ranks.device, engine.pool_bytes))
        values |= ranks.step_times(timers)
        values |= ranks.reduce_metrics(metrics).values()
        if noise:
            sketches = step_sketches(models.policy, minibatches, ranks)
            values |= noise.of_step(step, batch.groups, sketches)
        is_final = step == num_steps or rollouts.must_stop or stop.agreed(ranks)
        log.scalars(step, values | speeds(values, ranks.world_size), distributions(batch.sampled))
        if run.dump_every and (is_final or step % run.dump_every == 0):
            log.trajectories(step, batch.sampled)
        was_validated = "valid/tool_calls" in values  # the console keeps the line of each validation
        progress.at(step, console_text(values), keep=was_validated)
        entropy_target.add(values.get("loss/entropy"))
        alarms.check(step, values)
        saver.save_if_due(step, rollouts, is_final=is_final)
        rollouts.raise_if_broken()  # after the save, so that the finished steps are kept
        if is_final:
            break

    log.finish()
    for opened in (progress, env.tools, engine, ranks):
        opened.close()


def check_start(cfg: RLConfig, ranks: Ranks) -> None:
    """Log the devices. Raise UserError if they, a user's function, the critic or the reference do not fit the run."""
    try_functions(cfg.branching, cfg.advantage, cfg.loss)
    dtypes = {"model.compute_dtype": cfg.model.compute_dtype, "engine.dtype": cfg.engine.dtype}
    ranks.log_devices(dtypes, attention_backend(cfg.model, ranks.device))
    ranks.check_multiple(cfg.data.num_prompts_per_step, "data.num_prompts_per_step")
    check_memory(job_of(cfg, num_shards=ranks.mesh.shape[-1]), ranks.device)
    tokenizer = load_tokenizer(cfg.model.path)
    for option, path in {"critic.path": cfg.critic.path, "loss.reference": cfg.loss.reference}.items():
        if path:
            check_companion(path, tokenizer, max_model_len=cfg.max_model_len, option=option)


def job_of(cfg: RLConfig, num_shards: int) -> Job:
    """Return the settings that decide the memory of a GPU. num_shards: ranks that share a copy of the model."""
    is_reference_on_gpu = cfg.loss.kl_coefficient > 0 and not cfg.loss.offload_reference
    return Job(
        sizes_of(cfg.model.path),
        cfg.model,
        num_shards=num_shards,
        engine=cfg.engine,
        max_model_len=cfg.max_model_len,
        critic=sizes_of(cfg.critic_model.path) if cfg.advantage.needs_critic else None,
        reference=sizes_of(cfg.reference_model.path) if is_reference_on_gpu else None,
        offload=cfg.optim.offload,
    )


@dataclass(frozen=True)
class Models:
    """The models of a run, beside the engine's copy of the policy."""

    policy: Policy
    optimizer: Optimizer
    num_updates: int
    """Optimizer steps of the policy in the run, for its learning rate's schedule. The critic's warm-up has none."""
    critic: TrainedCritic | None
    """None unless the advantages need one (advantage.kind)."""
    reference: Policy | None
    """None unless the loss or the reward has a KL term (loss.kl_coefficient)."""


def load_models(cfg: RLConfig, ranks: Ranks, num_updates: int) -> Models:
    """Load the policy with its optimizer, and critic and reference if the algorithm has any. Collective.

    num_updates: optimizer steps of the run, with the critic's warm-up.
    """
    seed_everything(cfg.run.seed + ranks.rank)
    # the same seed on all ranks, because LoRA's adapters must begin with the same weights
    policy = load_policy(cfg.model, ranks.mesh, device=ranks.device, max_model_len=cfg.max_model_len, seed=cfg.run.seed)
    optimizer = build_optimizer(policy, cfg.optim)
    if cfg.update.measure_noise:  # the updates fill the sketch, and `step_sketches` reads it
        policy.sketch = GradientSketch(policy.hf.config.get_text_config().hidden_size, ranks.device)
    critic = None
    if cfg.advantage.needs_critic:
        critic = TrainedCritic.load(
            cfg.critic_model, cfg.critic_optim, num_updates, ranks, max_model_len=cfg.max_model_len
        )
    reference = None
    if cfg.loss.kl_coefficient:
        reference = load_policy(
            cfg.reference_model,
            ranks.mesh,
            device=ranks.device,
            max_model_len=cfg.max_model_len,
            offload=cfg.loss.offload_reference,
        )
        reference.requires_grad_(False)
    return Models(policy, optimizer, num_updates - cfg.num_critic_only_updates, critic=critic, reference=reference)


def start_engine(cfg: RLConfig, policy: Policy, seed: int) -> Engine:
    """Return vLLM with the policy's weights."""
    # load_weights=False: the folder's weights would be overwritten at once
    engine = Engine(cfg.model.path, cfg.engine, max_model_len=cfg.max_model_len, seed=seed, load_weights=False)
    engine.sync_weights(policy.hf_parameters())
    return engine


def open_log(cfg: RLConfig, ranks: Ranks, done_steps: int) -> RunLog:
    """Return the log of the run's folder; its rows after `done_steps` are dropped."""
    return RunLog(
        cfg.run.folder,
        cfg,
        is_main=ranks.is_main,
        resume_step=done_steps,
        charts=RL_CHARTS,
        keep_dumps=cfg.run.keep_dumps,
        trackers=cfg.run.trackers,
    )


def log_plan(cfg: RLConfig, num_steps: int, log: RunLog, *, tokenizer) -> None:
    """Log the expected branching and cost of tool calls, and warnings about the settings and the model's folder."""
    lines = [
        checks.forecast(cfg.rollout, cfg.branching),
        *checks.warnings_of(cfg.rollout, cfg.branching, cfg.advantage, cfg.loss),
        expected_calls(cfg.tools, cfg.rollout, num_steps, cfg.data.num_prompts_per_step),
        why_no_best(cfg.run, cfg.data.valid, num_steps),
        why_no_end(cfg.model.path, tokenizer),
    ]
    for line in filter(None, lines):  # without "", which says that there is nothing to report
        log.line(line)


def make_sampler(cfg: RLConfig, engine: Engine, env: Environment, *, score: Scoring, log: RunLog) -> Sampler:
    """Return the sampler: engine, tools and settings of all rollouts of the run."""
    return Sampler(
        engine=engine,
        tools=env.tools,
        codec=env.codec,
        team=score.team,
        log=log,
        seed=cfg.run.seed,
        rollout=cfg.rollout,
        branching=cfg.branching,
        max_num_seqs=cfg.engine.max_num_seqs,
        score=score,
        on_group=score.on_group,
    )


def entropies_until(done_steps: int, cfg: RLConfig, ranks: Ranks) -> list[float]:
    """Return the mean entropy of each finished step, from metrics.jsonl; [] without an entropy target. Collective."""
    if cfg.loss.entropy_target is None:
        return []
    rows = ranks.from_rank_0(rows_until(cfg.run.folder / "metrics.jsonl", done_steps, names=["loss/entropy"]))
    return [row["loss/entropy"] for _, row in sorted(rows.items())]


def fill_model_outputs(
    minibatches: list[Minibatch], models: Models, loss_cfg: LossConfig, *, temperature: float, timers: Timers
) -> Metrics:
    """Fill, before the update, each token's logprobs under policy and reference, and the critic's values.

    The first mini-batch may get its policy logprobs in its own update: nothing has changed the policy by then. The
    metrics are the distance of the policy's logprobs to vLLM's.
    """
    metrics = Metrics()
    with timers("old_logprobs"):
        to_fill = minibatches[1:] if first_update_computes_old_logprobs(loss_cfg) else minibatches
        for minibatch in to_fill:
            metrics.merge(fill_old_logprobs(models.policy, minibatch.micros, loss_cfg, temperature))
    if models.reference:
        with timers("reference"):
            for minibatch in minibatches:
                fill_ref_logprobs(models.reference, minibatch.micros, temperature)
    if models.critic:
        with timers("values"):
            for minibatch in minibatches:
                fill_values(models.critic.model, minibatch.micros)
    return metrics


def update_models(
    models: Models,
    minibatches: list[Minibatch],
    *,
    step: int,
    loss_cfg: LossConfig,
    cfg: RLConfig,
    ranks: Ranks,
    before_nonfinite_error: Callable[[], None],
) -> Metrics:
    """Do one optimizer step per mini-batch, for policy and critic, `update.num_epochs` times over. Collective.

    before_nonfinite_error: called before the UserError that ends the run if a gradient is not finite.
    """
    metrics = Metrics()
    for index, minibatch in enumerate(minibatches * cfg.update.num_epochs):
        # Counted from the step, not from the updates done: a step with fewer mini-batches must not delay the schedule.
        update_index = (step - 1) * cfg.num_updates_per_step + index
        name = f"step {step}, mini-batch {index + 1}"
        with reported_if_not_finite(name, minibatch.micros, cfg.run.folder, ranks, also=before_nonfinite_error):
            if models.critic:
                metrics.merge(models.critic.update(minibatch.micros, update_index, ranks))
            # while the critic warms up (warmup_steps is 0 without a critic), the policy is not trained
            if step > cfg.critic.warmup_steps:
                # The schedule begins with the policy's first update: its warm-up must not pass while the critic's does.
                policy_index = update_index - cfg.num_critic_only_updates
                lr = set_learning_rate(models.optimizer, policy_index, models.num_updates, cfg.optim)
                metrics.mean("optim/lr", lr)
                update_metrics = update_policy(
                    policy=models.policy,
                    optimizer=models.optimizer,
                    micros=minibatch.micros,
                    cfg=loss_cfg,
                    temperature=cfg.rollout.temperature,
                    max_grad_norm=cfg.optim.max_grad_norm,
                    ranks=ranks,
                    is_first=index == 0,
                )
                metrics.merge(update_metrics)
    return metrics


if __name__ == "__main__":
    run_or_exit(main, CONFIG)
